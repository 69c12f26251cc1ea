"""Objects in memory, warnings and rewritten files do not grow with the number of steps."""

import gc
import warnings

import pytest
from lightning.pytorch.callbacks import Callback
from runs import with_callback

from lit_klrb.cli.error_translation import warn_once_per_line

STEPS = 40


class Watch(Callback):
    """Counts the objects in memory from the tenth step on, and gives a different warning at each step."""

    def __init__(self):
        self.objects = []

    def on_train_batch_start(self, trainer, *_):
        warnings.warn(f"step {trainer.global_step} is odd", stacklevel=1)
        if trainer.global_step % 10 == 0:
            gc.collect()
            self.objects.append(len(gc.get_objects()))


@pytest.fixture(scope="module")
def watched(chain, tmp_path_factory):
    """A run with all monitors: the run directory, the counts of objects, the warnings."""
    watch, run = Watch(), tmp_path_factory.mktemp("long") / "run"
    monitors = ["--trainer.callbacks+=KLMonitor"]
    length = ["--trainer.max_steps", str(STEPS), "--trainer.val_check_interval", "10"]
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with_callback(patch, watch)
        assert chain.run("fit", "rloo", *length, *monitors, run=run) == 0
    return run, watch, shown


def test_memory_holds_no_more_objects_after_more_steps(watched):
    _, watch, _ = watched
    grown = [after - before for before, after in zip(watch.objects[1:-1], watch.objects[2:], strict=True)]
    assert min(grown) < 5, grown  # ten steps


def test_one_warning_of_a_kind(watched):
    _, _, shown = watched
    assert [str(w.message) for w in shown if "is odd" in str(w.message)] == ["step 0 is odd"]
    places = [(w.category, w.filename, w.lineno) for w in shown]
    assert len(places) == len(set(places))


def test_kinds_are_told_apart_by_their_line(recwarn):
    with warn_once_per_line():
        for number in range(3):
            warnings.warn(f"first {number}", stacklevel=1)
            warnings.warn(f"second {number}", stacklevel=1)
    with warn_once_per_line():
        warnings.warn("the next run", stacklevel=1)
    assert [str(w.message) for w in recwarn] == ["first 0", "second 0", "the next run"]
