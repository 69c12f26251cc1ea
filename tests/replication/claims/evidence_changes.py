"""Changes of the evidence, each of which changes the verdict on a claim.

A change takes the contents of the artifacts of studies, which it edits, and the sweeps, which it replaces.
"""

import copy

import numpy as np

from replication.claims.claim import Status


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
    studies = ("estimation", "reviews", "smollm2", "smollm2_far", "smollm2_end")
    return [x for n in studies for x in contents[n]["snapshots"]]


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


PITFALLS = "pitfalls", "gradients"
ORTHOGONAL = put(0.1, *PITFALLS, "K3LossSequence", "reverse_cosine")
CHANGES = {
    "rb-value-variance": (spread("rb", 2.0), Status.FAILS),
    "cv-alpha-1": (spread("cv", 2.0), Status.HOLDS),
    "cv-fitted": (spread("cv_fitted", 1.0), Status.HOLDS),
    "ht-no-improvement": (scarce, Status.FAILS),
    "provably-no-more-variance": (put(0.0, "identities", "counterexample", "rb"), Status.HOLDS),
    "k1-loss-zero-mean": (put(0.5, *PITFALLS, "K1Loss", "bias"), Status.FAILS),
    "k3-loss-direction": (ORTHOGONAL, Status.FAILS),
    "token-level-partial": (put(0.0, *PITFALLS, "K2Loss", "bias"), Status.FAILS),
    "tabular-mean-squared-error": (put(0.2, *PITFALLS, "MonteCarlo", "bias"), Status.FAILS),
    "descent-by-estimate": (copied(("pitfalls", "kl", "K3Loss"), "pitfalls", "kl", "K1Loss"), Status.FAILS),
    "worked-coins": (put(0.09, "identities", "worked_examples", "coins"), Status.FAILS),
    "worked-token": (put(1.7, "identities", "worked_examples", "log_ratio"), Status.FAILS),
    "k2-loss-is-k1-reward": (put(0.0, "identities", "token_level", "to_sequence"), Status.HOLDS),
    "deepseek-unbiased-kl": (put(0.1, "identities", "names", "ratio times k3 (unbiased KL)"), Status.FAILS),
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
    "ctpo-prefix-ratios": (prefix_noise(0.9), Status.HOLDS),
}
