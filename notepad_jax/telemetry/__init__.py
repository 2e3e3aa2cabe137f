"""Logging of a run: metrics on disk (metrics), and its progress on a screen (screen)."""
