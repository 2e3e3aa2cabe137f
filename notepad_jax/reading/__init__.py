"""Readings: the memory agent, and the completers that answer it."""
