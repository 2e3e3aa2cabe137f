"""The HTTP server: a policy behind OpenAI's API, a room for each kind of endpoint; see `app`."""
