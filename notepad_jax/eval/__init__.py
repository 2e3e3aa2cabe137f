"""How well a policy reads: measured (measure), summed up (summary), shown (evaluation_page)."""
