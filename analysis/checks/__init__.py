"""Whether the runs of a sweep are those of its plan and can be compared: what files say of each other.

`load_sweep` reads a sweep for everything that is computed from it, with the problems that these checks find.
"""

from analysis.checks.consistency import load_sweep as load_sweep
