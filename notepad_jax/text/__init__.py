"""Text and tokens: tokenizers, chat templates, prompts, chunks."""
