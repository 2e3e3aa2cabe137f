"""The policy behind OpenAI's API; start with `served`, then `app`."""
