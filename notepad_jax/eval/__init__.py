"""How well a policy reads: measured (measure), kept (readings), summed up (summary)."""
