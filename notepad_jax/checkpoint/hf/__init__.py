"""Hugging Face folders: names, configs, weights in and out."""
