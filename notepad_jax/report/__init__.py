"""Pages and pictures of what was measured."""
