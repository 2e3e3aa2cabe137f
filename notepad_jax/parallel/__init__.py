"""Where arrays live: one mesh, one table from logical axes to mesh axes."""
