"""The programs behind the commands, but training: each reads a config and wires the parts."""
