"""Where tasks lie: files of ours and of others, and the stream a run draws from."""
