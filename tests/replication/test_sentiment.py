import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from scipy.special import expit

from replication import sentiment

GOOD = ["a great film", "great and moving, a great film!", "moving", "a film I love"]
BAD = ["a dull film", "dull and long, a dull film!", "long", "a film I hate"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "BUCKETS", 64)


def newton(inputs: NDArray[np.float64], labels: NDArray[np.int64]) -> NDArray[np.float64]:
    """The maximum of the posterior of a logistic regression, intercept first, without a prior for it."""
    design = np.column_stack([np.ones(len(inputs)), inputs])
    prior = np.diag([0.0, *[sentiment.PENALTY] * inputs.shape[1]])
    found = np.zeros(design.shape[1])
    for _ in range(50):
        p = expit(design @ found)
        curvature = design.T @ (design * (p * (1 - p))[:, None]) + prior
        found = found - np.linalg.solve(curvature, design.T @ (p - labels) + prior @ found)
    return found


@pytest.mark.usefixtures("small")
def test_weights_are_those_of_newtons_method() -> None:
    inputs, labels = sentiment.features(GOOD + BAD), np.repeat([1, 0], len(GOOD))
    weights, intercept = sentiment.fit(inputs, labels)
    present = inputs.toarray() > 0
    counts = [present[labels == label].sum(0) + 1 for label in (1, 0)]
    ratio = np.log(counts[0] / counts[0].sum() / (counts[1] / counts[1].sum()))
    plain = newton(inputs.toarray() * ratio, labels)
    assert intercept == pytest.approx(plain[0], abs=1e-2)
    np.testing.assert_allclose(weights, plain[1:] * ratio, atol=1e-2)


@pytest.mark.usefixtures("small")
def test_a_text_has_length_one_and_counts_a_word_once() -> None:
    once, twice, nothing = sentiment.features(["great film", "film great film great film", "..."]).toarray()
    assert once @ once == pytest.approx(1)
    assert set(np.flatnonzero(once)) < set(np.flatnonzero(twice))
    assert len(set(twice[twice > 0])) == 1
    assert not nothing.any()


def test_command_trains_a_reward(tmp_path: Path) -> None:
    table = pa.table({"text": GOOD + BAD, "label": [1] * len(GOOD) + [0] * len(BAD)})
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / f"{split}.parquet")
    root = Path(sentiment.__file__).parents[1]
    code = (
        "from replication import sentiment; from pathlib import Path; sentiment.main(Path('.')); "
        "good, bad = sentiment.log_odds(['great', 'dull']); assert good > 0 > bad"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right on 1.0000 of 8 test reviews\n"
