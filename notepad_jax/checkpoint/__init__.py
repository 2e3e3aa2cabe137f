"""Checkpoints: training state, weight hand-offs, Hugging Face folders, GGUF files."""
