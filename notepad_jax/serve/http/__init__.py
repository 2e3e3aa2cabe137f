"""The HTTP layer: connections, authentication, request bodies, errors; start with `web`."""
