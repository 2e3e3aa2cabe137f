"""Rollout: many readings at once, scored and grouped into trajectories for the update."""
