"""From a plan file to the cells of a sweep, their ids and seeds; what a design can show. Writes no files."""

from analysis.design.cells import Expansion as Expansion, expand as expand
from analysis.design.plan import read_plan as read_plan
from analysis.design.power import smallest_p as smallest_p
