"""A sweep as pandas data frames, for whoever wants to look further."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.results.cell import Cell
from analysis.results.load import load_sweep
from lit_klrb import schema

if TYPE_CHECKING:
    import pandas as pd


class Frames(NamedTuple):
    """Everything in a sweep that is a number.

    Args:
        runs: A row per cell: id, stage, arm, beta, beta_index, replicate, seed, state (done, diverged, or
            failed where the machinery lost it), and the metrics of its final evaluation.
        curves: A row per logged value: id, arm, beta, replicate, metric, step and value, NaN where it was not
            finite.
    """

    runs: "pd.DataFrame"
    curves: "pd.DataFrame"


def read_frames(directory: str | Path) -> Frames:
    """The data frames of a sweep: what `analysis.frames` returns."""
    import pandas as pd  # slow, and nothing else needs it

    sweep = load_sweep(Path(directory))
    runs: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []
    for run in sweep.runs:
        state = schema.DIVERGED if run.diverged else schema.DONE
        runs.append({**_where(run.cell), "state": state, **run.final})
        for metric, curve in run.curves.items():
            known = {name: _where(run.cell)[name] for name in ("id", "arm", "beta", "replicate")}
            points = zip(curve.step.astype(int).tolist(), curve.value.tolist(), strict=True)
            curves += [{**known, "metric": metric, "step": step, "value": value} for step, value in points]
    runs += [{**_where(failure.cell), "state": "failed"} for failure in sweep.failures]
    columns = ["id", "arm", "beta", "replicate", "metric", "step", "value"]
    return Frames(_whole(pd.DataFrame(runs)), _whole(pd.DataFrame(curves, columns=columns)))


def _where(cell: Cell) -> dict[str, Any]:
    point = cell.point._asdict() if cell.point else dict.fromkeys(("arm", "beta", "beta_index", "replicate"))
    return {"id": cell.id, "stage": cell.stage, **point, "seed": cell.seed}


def _whole(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The frame with its counts as integers, which pandas would make floats where one is missing."""
    counts = [name for name in ("beta_index", "replicate", "seed", "step") if name in frame]
    return frame.astype(dict.fromkeys(counts, "Int64"))
