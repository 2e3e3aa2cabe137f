"""Where questions come from: generated (suites), from files (files), or as a stream (records)."""
