"""The installed TRL has the gradients that are kept of its release; `make peers` has all of them."""

from importlib.metadata import version

import pytest

from benchmarks.peers import importing, verdicts
from benchmarks.peers.adapters import trl
from lit_klrb.cli.certify import has_gradient
from lit_klrb.cli.gradients import describe
from lit_klrb.cli.loss_roles import BoundLoss
from lit_klrb.estimators.certificate import certify

QUICK = (
    "GRPOTrainer loss_type=dapo use_bias_correction_kl=True",
    "GRPOTrainer loss_type=dapo use_bias_correction_kl=False",
    "GKDTrainer beta=1.0",
)


def test_losses_of_trl(monkeypatch):
    if not verdicts.FILE.exists():
        pytest.skip("no verdicts are kept yet: make peers KEEP=1 writes them")
    kept = verdicts.read(verdicts.FILE)["trl"]
    if version("trl") != kept["version"]:
        pytest.skip("the verdicts are of another version")
    # Installed with what it needs, it is imported as it is
    monkeypatch.setattr(trl, "load", importing.importlib.import_module)
    settings = {setting.name: setting for setting in trl.settings()}
    for name in QUICK:
        found = certify(BoundLoss(name, settings[name].function, {}, {}))
        assert describe(found.on_policy) == kept["losses"][name]["gradient"]
        assert not has_gradient(found, "kl")
