"""Other people's files, read as our tasks."""
