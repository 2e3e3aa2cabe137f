"""HTML pages for browsers: one to read a document with, and the traces of readings and runs."""
