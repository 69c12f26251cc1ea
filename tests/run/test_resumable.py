"""A checkpoint that cannot be gone on with is refused before a run is touched."""

import pytest

from lit_klrb.errors import ConfigurationError
from lit_klrb.run.resumable import PARTS, check_resumable

WHOLE = {name: kind() for name, kind in PARTS.items()} | {
    "loops": {"fit_loop": {"state_dict": {}}},
    "lr_schedulers": [{"last_epoch": 3}],
}


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


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"loops": {}}, "loops have no fit_loop"),
        ({"loops": {"fit_loop": {}}}, "loops have no fit_loop"),
        ({"loops": {"fit_loop": "text"}}, "loops have no fit_loop"),
        ({"lr_schedulers": ["text"]}, "lr_schedulers do not say"),
        ({"lr_schedulers": [{"last_epoch": {}}]}, "lr_schedulers do not say"),
    ],
)
def test_what_the_parts_hold_is_looked_at(changes, problem):
    with pytest.raises(ConfigurationError, match=f"a.ckpt cannot be resumed: its {problem}"):
        check_resumable("a.ckpt", {**WHOLE, **changes})
