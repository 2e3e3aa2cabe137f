"""The programs: each reads a config from top to bottom like a recipe and wires the parts.

This is the only floor that sees a ConfigDict; what is passed further down are plain values.
"""
