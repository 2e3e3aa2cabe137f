"""Published datasets, read as our tasks."""
