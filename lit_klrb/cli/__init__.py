"""The command line: `python -m lit_klrb`."""
