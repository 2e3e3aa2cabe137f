"""The rollout engine: a scheduler, an executor over a paged cache, and the service they make."""
