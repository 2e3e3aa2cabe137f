"""Rollout: many readings at once, scored, grouped and kept for the update."""
