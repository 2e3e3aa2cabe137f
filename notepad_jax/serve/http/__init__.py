"""What HTTP needs and a policy does not: connections, the key, bodies, errors; start with `web`."""
