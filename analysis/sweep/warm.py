"""Imported once by the server from which all cells are forked, to import the heavy libraries in advance.

A failing import must not end the server: the cell that needs the module then raises the same error, which is
in its log.
"""

import atexit
import contextlib
import gc
import importlib
import os
import signal

from analysis.sweep.launchers.local import WARM

_coordinator, _, _module = os.environ.get(WARM, "").partition(" ")
if _coordinator == str(os.getppid()):
    # A terminal or a process manager may signal all processes of a sweep: the server runs until its
    # coordinator exits
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(Exception):
        importlib.import_module(_module)
    # Else every cell would search what was imported for garbage: a third of a second
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries such as triton report what is frozen at the end as leaks
