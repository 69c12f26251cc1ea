"""Imported once by the server that all cells are forked from: pays for the heavy imports before any cell.

The import may fail, and a failure must not take the server down: the cell that needs the module then meets
the same error, in its own log.
"""

import contextlib
import importlib
import os

from analysis.sweep.launchers.local import WARM

with contextlib.suppress(Exception):
    importlib.import_module(os.environ[WARM])
