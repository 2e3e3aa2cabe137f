"""Datasets of tasks: files of ours and of others, and the stream that a run draws from."""
