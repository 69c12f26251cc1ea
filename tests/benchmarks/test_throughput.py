"""Tokens per second and shares of time: their sums, and no influence on training."""

import itertools

import pytest
from runs import equal, rows_of, weights_of

from benchmarks import throughput

MONITOR = "--trainer.callbacks+=benchmarks.throughput.RolloutThroughput"


def logged(run):
    rows = [row for row in rows_of(run) if row.get("throughput/share_update")]
    return {
        int(row["step"]): {k: float(v) for k, v in row.items() if k.startswith("through")} for row in rows
    }


def test_a_rollouts_time_is_split_and_its_tokens_are_counted(chain, tmp_path, monkeypatch):
    ticks = iter(range(10_000))  # every reading of the clock takes a second
    monkeypatch.setattr(throughput, "now", lambda: float(next(ticks)))
    assert chain.run("fit", "rloo", MONITOR, run=tmp_path) == 0
    assert equal(weights_of(chain.root / "rloo"), weights_of(tmp_path))
    found = logged(tmp_path)
    steps = sorted(found)
    assert all(b - a == steps[1] - steps[0] for a, b in itertools.pairwise(steps))
    inner = steps[0] + 1
    for metrics in found.values():
        shares = {k.split("share_")[1]: v for k, v in metrics.items() if "share" in k}
        assert set(shares) == {"generate", "statistics", "reward", "update"}
        assert sum(shares.values()) == pytest.approx(1)
        # Within the first step the clock is read twice for each of four stages: nine seconds from its start
        # to its end; the other steps take one.
        whole = 9 + inner - 1
        assert shares["generate"] == pytest.approx(1 / whole)
        update_seconds = shares["update"] * whole
        ratio = metrics["throughput/update_tokens_per_s"] / metrics["throughput/rollout_tokens_per_s"]
        assert ratio * update_seconds in (pytest.approx(1), pytest.approx(inner))
