"""Changes of the evidence, each of which changes the verdict on a claim.

A change takes the contents of the artifacts of studies, which it edits, and the sweeps, which it replaces.
"""

import copy
import dataclasses

import numpy as np

from replication.claims.claim import Status
from replication.claims.evidence import CAPACITIES


def same(value, number):
    """The same nested lists with all numbers replaced."""
    return [same(one, number) for one in value] if isinstance(value, list) else number


def change(content, *path):
    """The parent of a place in nested dictionaries, and the last key."""
    *above, last = path
    for key in above:
        content = content[key]
    return content, last


def put(number, *path):
    """A change of an artifact: all numbers at a place."""

    def changed(contents, sweeps):
        parent, last = change(contents, *path)
        parent[last] = same(parent[last], number)

    return changed


def copied(source, *path):
    """A change of an artifact: what is at one place is put at another."""

    def changed(contents, sweeps):
        parent, last = change(contents, *path)
        before, name = change(contents, *source)
        parent[last] = copy.deepcopy(before[name])

    return changed


def several(*changes):
    def changed(contents, sweeps):
        for one in changes:
            one(contents, sweeps)

    return changed


def spread(name, factor):
    """The estimates of a kind have `factor` times their spread, on enumerated models and on reviews."""

    def changed(contents, sweeps):
        for one in snapshots_of_values(contents):
            values = one["values"]["k1"]
            means = [sum(row) / len(row) for row in values]
            one["values"][name] = [
                [mean + factor * (x - mean) for x in row] for mean, row in zip(means, values, strict=True)
            ]

    return changed


def snapshots_of_values(contents):
    return [one for name in ("estimation", "reviews", "smollm2") for one in contents[name]["snapshots"]]


def with_runs(trained, runs):
    return dataclasses.replace(trained, sweep=dataclasses.replace(trained.sweep, runs=tuple(runs)))


def ends(trained, arm, final):
    """A sweep in which `final` gives the outcomes of an arm's runs from (beta index, replicate)."""
    return with_runs(
        trained,
        [
            dataclasses.replace(run, final=final(run.point.beta_index, run.point.replicate), prompts={})
            if run.cell.point is not None and run.point.arm == arm
            else run
            for run in trained.sweep.runs
        ],
    )


def ahead(contents, sweeps):
    """Every run with RaoBlackwell is on the frontier below 5 nats, and none of the few with MonteCarlo."""
    for name, one in sweeps.items():
        arm, control = one.arm("RaoBlackwell"), one.arm("MonteCarlo")
        if name not in CAPACITIES:
            sweeps[name] = ends(
                ends(one, arm, lambda b, r: {"kl": 0.01 * (b + 10 * r + 1), "reward": b + 10 * r}),
                control,
                lambda b, r: {"kl": 100.0 * r + 4.0, "reward": -100.0},
            )


def neural(arms, factor):
    """Students of some arms end at about `factor` times the KL of own-token credit, sampled if it was run."""

    def changed(contents, sweeps):
        for name in CAPACITIES.keys() & sweeps.keys():
            grid = sweeps[name].sweep.grid
            control = "own-sampled" if ("own-sampled", 0, 0) in grid else "own-exact"
            for arm in arms:
                sweeps[name] = ends(
                    sweeps[name],
                    arm,
                    lambda b, r, grid=grid, control=control: {
                        "kl": factor * (1 + 0.01 * (r % 3)) * grid[control, b, r].final["kl"]
                    },
                )

    return changed


def reported(change):
    """A change of the numbers of all reports."""

    def changed(contents, sweeps):
        for name, one in sweeps.items():
            numbers = copy.deepcopy(one.numbers)
            change(numbers["sections"])
            sweeps[name] = dataclasses.replace(one, numbers=numbers)

    return changed


def quiet_reports(sections):
    for one in sections.get("gradient_noise", {"findings": []})["findings"]:
        one |= {"log_ratio": -1.0, "interval": [-1.1, -0.9]}


def quiet_reviews(contents, sweeps):
    """The reward has no gradient, and RaoBlackwell's is half of MonteCarlo's."""
    study = contents["reviews_noise"]
    batches, (mc, rb) = study["batches"], map(study["estimators"].index, ("MonteCarlo", "RaoBlackwell"))
    change = np.eye((1 + len(study["estimators"])) * batches)
    reward, mc, rb = (slice(n * batches, (n + 1) * batches) for n in (0, 1 + mc, 1 + rb))
    change[reward], change[rb] = 0, change[mc] / 2
    for one in study["snapshots"]:
        lower = np.zeros_like(change)
        for index, row in enumerate(one["gram"]):
            lower[index, : len(row)] = row
        gram = change @ (lower + np.tril(lower, -1).T) @ change.T
        one["gram"] = [row[: index + 1].tolist() for index, row in enumerate(gram)]


def default_ahead(contents, sweeps):
    """On reviews every run with RaoBlackwellControlVariate ends far above the others."""
    for name, one in sweeps.items():
        if (arm := one.arm("RaoBlackwellControlVariate")) is not None and one.title.startswith("reviews"):
            sweeps[name] = ends(one, arm, lambda b, r: {"kl": 1.0, "reward": 50.0 + r})


def prefix_ahead(contents, sweeps):
    """Every run with prefix rewards ends far above the others."""
    for name, one in sweeps.items():
        for arm in {"prefix", "prefix-8"} & {*one.sweep.plan.grid.arms}:
            sweeps[name] = ends(one, arm, lambda b, r: {"kl": 1.0, "reward": 50.0 + r})


def as_quick(contents, sweeps):
    """Runs with RaoBlackwell take as long as those with MonteCarlo."""
    for name, one in sweeps.items():
        arm, control = one.arm("RaoBlackwell"), one.arm("MonteCarlo")
        if one.sweep.seconds and arm and control:
            grid, of_control = one.sweep.grid, one.seconds(control)
            same_time = {grid[arm, *place].cell.id: time for place, time in of_control.items()}
            seconds = {**one.sweep.seconds, **same_time}
            sweeps[name] = dataclasses.replace(one, sweep=dataclasses.replace(one.sweep, seconds=seconds))


def steady_reports(sections):
    for verdicts in sections["verdict"].get("verdicts", {}).values():
        for one in verdicts:
            if one["claim"].startswith("spread_"):
                one |= {"outcome": "better", "estimate": -0.5}


def scarce(contents, sweeps):
    """Horvitz-Thompson estimates have a quarter of their spread, on enumerated models and on reviews."""

    def shrunk(rows):
        values = np.array(rows)
        mean = values.mean(axis=1, keepdims=True)
        return mean + (values - mean) / 4

    for one in snapshots_of_values(contents):
        one["horvitz_thompson"] = {
            size: shrunk(rows).tolist() for size, rows in one["horvitz_thompson"].items()
        }


def topk(name, key, number):
    def changed(contents, sweeps):
        for case in contents["identities"]["topk"].values():
            for row in case["estimates"][name].values():
                row[key] = number

    return changed


def arm(name, factor):
    """An arm ends at `factor` times the KL of sampled own-token credit."""

    def changed(contents, sweeps):
        finals = contents["distillation"]["finals"]
        scaled = [
            [[factor * kl * (1 + 0.01 * (i % 3)) for i, kl in enumerate(runs)] for runs in rates]
            for rates in finals["own token, sampled"]
        ]
        finals[name] = scaled

    return changed


def prefix_noise(factor):
    def changed(contents, sweeps):
        for by_correction in contents["off_policy"]["moments"].values():
            noise = by_correction["sequence"]["kl"]["noise"]
            by_correction["prefix"]["kl"]["noise"] = [[factor * x for x in row] for row in noise]

    return changed


def biased_everywhere(contents, sweeps):
    for by_correction in contents["off_policy"]["moments"].values():
        by_correction["prefix"]["kl"]["bias"] = same(by_correction["prefix"]["kl"]["bias"], 0.1)


def quiet_path(contents, sweeps):
    path = contents["identities"]["path"]
    path["RaoBlackwell"] = [[0.5 * x for x in row] for row in path["MonteCarlo"]]


PITFALLS = "pitfalls", "gradients"
ORTHOGONAL = put(0.1, *PITFALLS, "K3LossSequence", "reverse_cosine")
CHANGES = {
    "rb-value-variance": (spread("rb", 2.0), Status.FAILS),
    "cv-alpha-1": (spread("cv", 2.0), Status.HOLDS),
    "cv-fitted": (spread("cv_fitted", 1.0), Status.HOLDS),
    "ht-no-improvement": (scarce, Status.FAILS),
    "provably-no-more-variance": (put(0.0, "identities", "counterexample", "rb"), Status.HOLDS),
    "rb-gradient-noise": (several(quiet_path, quiet_reviews, reported(quiet_reports)), Status.HOLDS),
    "frontier-78": (ahead, Status.HOLDS),
    "frontier-95": (ahead, Status.HOLDS),
    "rb-more-stable-training": (reported(steady_reports), Status.HOLDS),
    "k1-loss-zero-mean": (put(0.5, *PITFALLS, "K1Loss", "bias"), Status.FAILS),
    "k3-loss-direction": (ORTHOGONAL, Status.FAILS),
    "token-level-partial": (put(0.0, *PITFALLS, "K2Loss", "bias"), Status.FAILS),
    "tabular-mean-squared-error": (put(0.2, *PITFALLS, "MonteCarlo", "bias"), Status.FAILS),
    "descent-by-estimate": (copied(("pitfalls", "kl", "K3Loss"), "pitfalls", "kl", "K1Loss"), Status.FAILS),
    "distillation-sequence-level": (
        several(arm("whole future, sampled", 0.5), neural(["future-sampled"], 0.5)),
        Status.HOLDS,
    ),
    "worked-coins": (put(0.09, "identities", "worked_examples", "coins"), Status.FAILS),
    "worked-token": (put(1.7, "identities", "worked_examples", "log_ratio"), Status.FAILS),
    "k2-loss-is-k1-reward": (put(0.0, "identities", "token_level", "to_sequence"), Status.HOLDS),
    "deepseek-unbiased-kl": (
        put(0.1, "identities", "names", "ratio times k3 (unbiased KL)"),
        Status.FAILS,
    ),
    "k1-in-reward-best": (
        copied(("pitfalls", "objective", "K1Loss"), "pitfalls", "objective", "MonteCarlo"),
        Status.FAILS,
    ),
    "ema-pg-unbiased-topk": (topk("detached tail", "gradient_bias", 0.0), Status.HOLDS),
    "mopd-head": (
        several(topk("head only", "gradient_bias", 0.0), topk("head only", "value_bias", 0.0)),
        Status.HOLDS,
    ),
    "vopd-variance": (topk("baseline", "gradient_bias", 0.1), Status.FAILS),
    "shrinkage-baselines": (
        several(
            *(
                put(0.9, "identities", "shrinkage", f"spread 3, {count} completions", "ratio")
                for count in (4, 8)
            )
        ),
        Status.HOLDS,
    ),
    "optimal-token-baseline": (
        several(
            put(0.5, "identities", "token_baseline", "row_per_prefix", "cumulative"),
            put(0.5, "identities", "token_baseline", "one_row", "cumulative"),
            put(0.6, "identities", "token_baseline", "row_per_prefix", "own"),
        ),
        Status.HOLDS,
    ),
    "opd-sequence-credit-too-noisy": (
        several(
            arm("whole future, sampled", 2.0),
            arm("whole future, exact", 2.0),
            neural(["future-sampled", "future-exact"], 2.0),
        ),
        Status.HOLDS,
    ),
    "ctpo-prefix-ratios": (prefix_noise(0.9), Status.HOLDS),
    "sdpo-no-gain": (
        several(arm("whole future, exact", 2.0), neural(["future-exact"], 2.0)),
        Status.HOLDS,
    ),
    "zero-overhead": (as_quick, Status.HOLDS),
    "own-default-on-reviews": (default_ahead, Status.HOLDS),
    "own-prefix-rewards": (prefix_ahead, Status.HOLDS),
    # Sweeps of eight pairs cannot reject after the correction
    "own-annealed-discount": (neural(["discount-annealed"], 0.001), Status.HOLDS),
    "own-off-policy": (biased_everywhere, Status.ONLY_IF),
}
