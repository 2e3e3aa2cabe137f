"""notepad_jax: reinforcement learning that teaches a language model to read without limit."""

__version__ = "0.1.0"
