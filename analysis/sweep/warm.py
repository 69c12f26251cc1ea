"""Imported once by the server that all cells are forked from: pays for the heavy imports before any cell.

The import may fail, and a failure must not take the server down: the cell that needs the module then meets
the same error, in its own log.
"""

import contextlib
import importlib
import os
import signal

from analysis.sweep.launchers.local import WARM

_coordinator, _, _module = os.environ.get(WARM, "").partition(" ")
if _coordinator == str(os.getppid()):
    # A process manager may signal every process of a sweep: the server stays until its coordinator ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(Exception):
        importlib.import_module(_module)
