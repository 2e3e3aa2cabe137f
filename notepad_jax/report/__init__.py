"""Reports: HTML pages and SVG pictures of what was measured."""
