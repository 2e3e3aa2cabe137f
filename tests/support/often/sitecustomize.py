"""Threads change places five hundred times as often, in child processes, too.

python imports a module of this name when it starts: `PYTHONPATH=tests/support/often` before a
command of tests finds races that it meets once in hundreds of runs otherwise.
"""

import sys

sys.setswitchinterval(1e-5)  # seconds; python's own is 5e-3
