"""What a config may say: every key with its type, its range and what it means."""
