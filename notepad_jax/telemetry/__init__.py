"""What a run tells: numbers on disk (metrics) and a picture of its progress (screen)."""
