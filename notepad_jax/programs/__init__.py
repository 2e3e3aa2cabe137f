"""The other programs: each reads a config from top to bottom like a recipe and wires the parts."""
