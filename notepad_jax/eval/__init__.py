"""How well a policy reads: measured (measure), summed up (summary), shown (suite_report)."""
