"""Prompts and conversations, continued by a policy; start with `requests` and `choices`."""
