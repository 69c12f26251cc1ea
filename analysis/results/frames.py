"""A sweep as pandas data frames, for custom analyses."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis.results.records import Cell
from analysis.results.sweep import load_sweep
from lit_klrb import schema

if TYPE_CHECKING:
    import pandas as pd


class Frames(NamedTuple):
    """The numbers of a sweep, see `analysis.frames`."""

    runs: "pd.DataFrame"
    curves: "pd.DataFrame"


def read_frames(directory: str | Path) -> Frames:
    """Read the data frames of a sweep, see `analysis.frames`."""
    import pandas as pd  # slow to import, and needed here only

    sweep = load_sweep(Path(directory))
    runs: list[dict[str, Any]] = []
    curves: list[list[Any]] = []
    columns = ["id", "arm", "beta", "replicate", "metric", "step", "value"]
    for run in sweep.runs:
        where = _where(run.cell)
        runs.append({**where, "state": schema.DIVERGED if run.diverged else schema.DONE, **run.final})
        for metric, curve in run.curves.items():
            known = [where[name] for name in columns[:4]]
            points = zip(curve.step.astype(int).tolist(), curve.value.tolist(), strict=True)
            curves += [[*known, metric, step, value] for step, value in points]
    runs += [{**_where(failure.cell), "state": "failed"} for failure in sweep.failures]
    frames = pd.DataFrame(runs), pd.DataFrame(curves, columns=columns)
    # Nullable integers, as pandas makes counts floats if one is missing
    counts = ("beta_index", "replicate", "seed", "step")
    return Frames(*(frame.astype({name: "Int64" for name in counts if name in frame}) for frame in frames))


def _where(cell: Cell) -> dict[str, Any]:
    point = cell.point._asdict() if cell.point else dict.fromkeys(("arm", "beta", "beta_index", "replicate"))
    return {"id": cell.id, "stage": cell.stage, **point, "seed": cell.seed}
