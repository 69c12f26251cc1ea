"""A package with a heavy import, as the trainer's: `python -m warm_job fit ...`."""
