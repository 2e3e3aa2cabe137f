"""How an answer is judged: where it stands (extraction), what it is worth (metrics)."""
