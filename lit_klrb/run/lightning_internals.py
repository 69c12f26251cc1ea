"""All that this package reads or writes of Lightning's private state, in one place.

A new release of Lightning may change any of it; `tests/run/test_lightning_internals.py` says which.
"""

import lightning as L


def trainer_of(module: L.LightningModule) -> L.Trainer | None:
    """The trainer that a module is attached to, or None, as for `load_from_checkpoint`."""
    return module._trainer
