"""The commands of `notepad-jax`, one file each: its config, its help, its options, its call.

`LONG` is what its `--help` says, `CONFIG` the config that it takes where none is named (None: it
takes none), `options` adds its options to its parser, and `run` calls its program and returns
what `--json` prints and what is printed without it. `parser` has their names, and is all that
`--help` needs; `options` what several have in common. Above: `cli`, which reads the config and
runs one of them; below: programs, training and planner.
"""
