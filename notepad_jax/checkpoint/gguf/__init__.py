"""GGUF import: files as llama.cpp reads them, in the terms of Hugging Face folders."""
