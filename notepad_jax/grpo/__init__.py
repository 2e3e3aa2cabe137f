"""GRPO training: advantages, packing, objective, optimizer and the update step."""
