"""The rollout engine: a JetStream Engine over a paged cache, and the driver that feeds it."""
