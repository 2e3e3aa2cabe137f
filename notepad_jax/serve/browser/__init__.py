"""What is shown to browsers: a page to read with, and the readings of runs."""
