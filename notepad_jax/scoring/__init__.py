"""Scoring of answers: where one stands in a completion (extraction), what it is worth (metrics)."""
