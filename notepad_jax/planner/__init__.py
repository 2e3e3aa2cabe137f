"""Capacity planning: a config's memory, time and dollars on a machine, here or not, and advice."""
