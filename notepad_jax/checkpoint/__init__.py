"""What is written to storage: training state, weight hand-offs, Hugging Face folders."""
