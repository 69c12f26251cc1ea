"""A checkpoint that cannot be gone on with is refused before a run is touched."""

import pytest

from lit_klrb.errors import ConfigurationError
from lit_klrb.run.resumable import PARTS, check_resumable

WHOLE = {name: kind() for name, kind in PARTS.items()}


def test_a_whole_checkpoint_passes():
    check_resumable("a.ckpt", WHOLE)


@pytest.mark.parametrize("name", PARTS)
def test_each_part_is_needed_and_of_its_type(name):
    for found, changed in (
        ("missing", {key: value for key, value in WHOLE.items() if key != name}),
        ("NoneType", {**WHOLE, name: None}),
        ("tuple", {**WHOLE, name: ()}),
    ):
        with pytest.raises(
            ConfigurationError, match=f"a.ckpt cannot be resumed: its {name} must be .*, got {found}"
        ):
            check_resumable("a.ckpt", changed)
