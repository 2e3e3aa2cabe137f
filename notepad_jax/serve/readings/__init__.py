"""Documents of any length, read by the memory agent: as a chat model, or as jobs."""
