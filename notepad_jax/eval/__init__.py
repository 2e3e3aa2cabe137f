"""Evaluation of a policy: measured (measure), summed up (summary), shown (evaluation_page)."""
