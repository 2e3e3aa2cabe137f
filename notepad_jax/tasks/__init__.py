"""Generated tasks at any length: RULER, BABILong, GraphWalks, memory tasks, paragraphs."""
