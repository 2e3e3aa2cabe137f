"""Measurements with a command line each; `python -m benchmarks.NAME` from the repository."""
