"""A package with a heavy import: `python -m warm_job fit ...`."""
