"""The program's entry point: `notepad-jax`, and `python -m notepad_jax`.

Importing jax takes seconds, and Ctrl-C meanwhile would end in a traceback, or in nothing where
a library swallows it. So until `cli` says what is to happen the process is simply ended by it, as
by other signals, and again when `cli` is done. Ignored it stays ignored. A process that was
stopped, or failed, does not wait for its threads: one that was stopped in the middle may never end,
orbax's wait twenty minutes for a folder that a disk refused, and jax's for the other processes,
which end because of this one.
"""

import contextlib
import os
import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from notepad_jax.commands.parser import named


def main() -> None:
    """Runs the command line and ends the process with its exit code."""
    named(sys.argv[1:])  # --help, --version and what is no command are answered here, at once
    from notepad_jax import cli

    if code := cli.main(alone=True):
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
