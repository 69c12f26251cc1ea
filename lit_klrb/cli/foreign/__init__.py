"""What the configurations of other software train with: `python -m lit_klrb explain --config FILE`."""
