"""Hugging Face folders: names, configs, import and export of weights."""
