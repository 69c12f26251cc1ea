from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from replication.__main__ import main
from replication.claims import ledger
from replication.claims.ledger import compose_ledger

LEDGER = Path(__file__).parents[3] / "replication" / "ledger"


@pytest.fixture(scope="session")
def verified():
    """What the command that verifies the ledger prints, and its evidence and rulings, which take seconds."""
    composed = {}

    def remembered(evidence):
        files, rulings = compose_ledger(evidence)
        composed.update(evidence=evidence, rulings={claim.key: ruling for claim, ruling in rulings.items()})
        return files, rulings

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.setattr(ledger, "compose_ledger", remembered)
        code = main(["verify", str(LEDGER)])
    return SimpleNamespace(code=code, printed=printed.getvalue(), **composed)
