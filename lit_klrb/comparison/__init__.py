"""The KL of two given models, with its error: `python -m lit_klrb kl`."""
