"""Sharding: one device mesh, one table from logical axes to mesh axes."""
