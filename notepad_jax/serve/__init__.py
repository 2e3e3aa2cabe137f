"""The policy behind OpenAI's API, a room for each kind of address; start with `app`."""
