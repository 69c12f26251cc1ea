"""The files of a sweep: their types, how they are written, read and checked.

All other code accesses a sweep's directory through this package. `sweep.read_sweep` reads a complete sweep
once; `plan` and `records` have the types of what is in its files, `rules` what types cannot say, `store` the
bytes.
"""

from analysis.results.plan import (
    Block as Block,
    Grid as Grid,
    Plan as Plan,
    Point as Point,
    Primary as Primary,
    Stage as Stage,
    Trial as Trial,
)
from analysis.results.records import Cell as Cell
from analysis.results.store import DamagedFileError as DamagedFileError
