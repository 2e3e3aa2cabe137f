"""How well a policy reads: accuracy by length (lengths), pictures (plots), report.html."""
