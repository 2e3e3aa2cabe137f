"""What a config would need on a machine, here or not: memory, time, dollars, and what to change."""
