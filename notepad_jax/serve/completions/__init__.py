"""Completions and chat completions of a policy; start with `requests` and `choices`."""
