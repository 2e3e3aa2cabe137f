"""The schema of configs: every key with its type, its range and what it means."""
