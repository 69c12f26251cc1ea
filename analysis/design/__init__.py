"""The plan of a sweep, its cells and their seeds; what the design can show. Reads files, writes none."""

from analysis.design.cells import Cell as Cell, Expansion as Expansion, Point as Point, expand as expand
from analysis.design.plan import PRIMARY_CLAIMS as PRIMARY_CLAIMS, Plan as Plan, read_plan as read_plan
from analysis.design.power import smallest_p as smallest_p
