"""The files of a sweep: their names, schema and checksum, how they are written, read and checked.

All other code accesses a sweep's directory through this package. `load.load_sweep` reads a complete sweep.
"""

from analysis.results.cell import Cell as Cell, Point as Point, Trial as Trial
from analysis.results.files import DamagedFileError as DamagedFileError
from analysis.results.grid import Block as Block, Grid as Grid
from analysis.results.plan import Plan as Plan, Primary as Primary
from analysis.results.rates import Tuning as Tuning
from analysis.results.stage import Stage as Stage
