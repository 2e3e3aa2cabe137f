"""Generated tasks: RULER, memory tasks, questions among paragraphs; any length."""
