"""The commands of `python -m analysis`."""

from analysis.cli.main import main as main
