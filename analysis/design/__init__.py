"""Expands a plan file to the cells of a sweep with their ids and seeds. No files are written."""

from analysis.design.cells import Expansion as Expansion, expand as expand
from analysis.design.plan_file import read_plan as read_plan
