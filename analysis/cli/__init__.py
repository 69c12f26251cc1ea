"""The commands of `lit-klrb`."""

from analysis.cli.main import main as main
