"""Runs of other software as a sweep: logs, mappings, the directory that `report` reads."""
