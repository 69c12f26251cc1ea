"""Estimates of the KL from the k most likely tokens: bias, variance, memory and time over k."""

import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.batches import pad
from lit_klrb.data.corpora import load_rows
from lit_klrb.data.prompts import read_prompts
from lit_klrb.data.reader import Reader
from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.estimators import (
    CoarsenedTopK,
    KLEstimator,
    MonteCarloRewardToGo,
    RaoBlackwell,
    RaoBlackwellTopK,
)
from lit_klrb.estimators.recipe import per_token
from lit_klrb.functional import TopK, tiled_policy_loss, token_stats
from lit_klrb.functional.tiled import buffers
from lit_klrb.models import loading
from lit_klrb.models.rollout import Rollout
from lit_klrb.rollouts.scoring import Scorer
from lit_klrb.seeding import derive_seed
from replication.topk_rivals import RIVALS

from .table import markdown, number
from .variance import ratio_with_error, traces, trained

KINDS = {kind.__name__: kind for kind in (RaoBlackwellTopK, CoarsenedTopK, *RIVALS)}
VOCABULARY, DISTANCES = 200, (0.1, 0.5, 1.0)
SIZES = (1, 8, 32, 128, VOCABULARY)
DEMO_SIZES = (1, 8, 64)
BATCHES, PROMPTS, COMPLETIONS = 24, 4, 4
# V, D and rows of the measured memory: GPT-2's head and one tile
GPT2 = (50257, 768, 512)

TEXT = """## The k most likely tokens

`python -m benchmarks topk`. All estimators credit a token with the KL of later tokens, as
`RaoBlackwell` does.

**One position**, exact: {vocabulary} tokens with Zipf's frequencies, H from the policy. Own-token
gradients in the logits: norm of the bias relative to that of the true gradient, and variance relative
to that of the sampled log ratio, r ∇log p. "Smallest" is the smallest value that a sampled token can
give, relative to the KL, if it is negative.

{position}

**Completions** of the demo's DPO checkpoint against its reference ({kl} nats per completion): trace of
the covariance of the gradient of the KL in all parameters, with credit for later tokens and leave-one-out,
relative to that of `RaoBlackwell` on the same {batches} batches of {prompts} prompts with
{completions} completions, ± its jackknife standard error. V = {size}. Biased estimators can have little
variance.

{completion}

**Memory and time** of `tiled_policy_loss`, V = {v:,}, D = {d}, {rows} tokens, float32, one thread of a
busy machine: scratch space for logits, and the median of {rounds} rounds relative to the exact KL. A
reference on another machine would send 12 bytes (a token and its log-probability) for each of the k
tokens instead of {row} kB for a row of logits.

{memory}
"""


def report(quick: bool, runs: Path) -> str:
    """The part; models are trained in `runs` unless they are there."""
    torch.set_num_threads(1)
    position = position_table(SIZES if not quick else SIZES[1:3])
    rounds = 5 if not quick else 1
    memory = memory_table((1, 32, 128, 1024) if not quick else (32,), rounds)
    batches = BATCHES if not quick else 4
    completion, kl, size = completion_table(runs, batches, DEMO_SIZES if not quick else (4,))
    v, d, rows = GPT2
    return TEXT.format(
        vocabulary=VOCABULARY,
        position=position,
        kl=number(kl),
        batches=batches,
        prompts=PROMPTS,
        completions=COMPLETIONS,
        size=size,
        completion=completion,
        v=v,
        d=d,
        rows=rows,
        rounds=rounds,
        row=round(v * 4 / 1000),
        memory=memory,
    )


class Position(NamedTuple):
    """Bias and variance of an estimate at one position, by enumeration of the sampled token.

    Args:
        bias: Norm of the bias of the gradient in the logits, relative to the norm of the true gradient.
        variance: Trace of its covariance, relative to that of the sampled log ratio.
        smallest: Its smallest value, relative to the KL.
    """

    bias: float
    variance: float
    smallest: float


def zipf(distance: float) -> tuple[Tensor, Tensor]:
    """Logits of two models over `VOCABULARY` tokens, float64."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, VOCABULARY, dtype=torch.float64, generator=generator)
    logits = -torch.arange(1.0, VOCABULARY + 1, dtype=torch.float64).log() + 0.3 * noise[0]
    return logits, logits + distance * noise[1]


def positions(logits: Tensor, ref_logits: Tensor, k: int) -> tuple[float, dict[str, Position]]:
    """The exact KL, and each estimate with the policy's k most likely tokens."""
    size = len(logits)
    leaf = logits.expand(size, 1, -1).clone().requires_grad_()  # one row for each token that may be sampled
    tokens = torch.arange(size)[:, None]
    stats = token_stats(leaf, ref_logits.expand(size, 1, -1), tokens, topk=TopK(k))
    p = logits.softmax(0)

    def gradients(values: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(values.sum(), leaf, retain_graph=True)
        return found[:, 0]

    def variance(samples: Tensor) -> float:
        return (p @ (samples - p @ samples).square().sum(1)).item()

    assert stats.kl is not None
    true, kl = gradients(stats.kl)[0], stats.kl[0, 0].item()
    log_ratio = (stats.logprobs - stats.ref_logprobs).detach()
    sampled = variance(gradients(log_ratio * stats.logprobs))
    found = {}
    for name, kind in KINDS.items():
        values = per_token(kind.recipe.value).of(stats)
        samples = gradients(values)
        bias = ((p @ samples - true).norm() / true.norm()).item()
        found[name] = Position(bias, variance(samples) / sampled, values.min().item() / kl)
    return kl, found


def position_table(sizes: tuple[int, ...]) -> str:
    """Bias, variance and smallest value of every estimate over k, at three KLs."""
    by_distance = [[positions(*zipf(distance), k) for k in sizes] for distance in DISTANCES]
    header = ["estimator", "k"]
    for column in by_distance:
        header += [f"KL {column[0][0]:.3f}: bias", "variance", "smallest"]
    rows = []
    for name in KINDS:
        for index, k in enumerate(sizes):
            row = [f"`{name}`", str(k)]
            for column in by_distance:
                found = column[index][1][name]
                smallest = f"{found.smallest:.2g}" if found.smallest < -1e-9 else "–"
                row += [*(f"{value:.2g}" if value > 1e-9 else "0" for value in found[:2]), smallest]
            rows.append(row)
    return markdown(header, rows)


def completion_table(runs: Path, batches: int, sizes: tuple[int, ...]) -> tuple[str, float, int]:
    """Variance of the KL's gradient in the demo's models, the KL in nats, and the size of the vocabulary."""
    reference, policy_path = trained(runs, "sft"), trained(runs, "dpo")
    tokenizer = loading.load_tokenizer("policy", policy_path)
    policy = loading.load_model("policy", policy_path)
    scorer = Scorer(policy, loading.freeze(loading.load_model("reference", reference)), 1.0)
    chosen = [RaoBlackwell(), MonteCarloRewardToGo()]
    chosen += [kind(k=k, allow_biased=True) for kind in KINDS.values() for k in sizes]
    gradients: dict[str, list[Tensor]] = {}
    kls = []
    for index in range(batches):
        rollout = _sample(policy, tokenizer, index)
        states = scorer.reference_states(rollout)
        for topk in dict.fromkeys(estimator.topk for estimator in chosen):
            stats = scorer.stats(rollout, states, None, topk)
            for estimator in (each for each in chosen if each.topk == topk):
                loss = estimator.surrogate(stats, rollout.mask, group_size=COMPLETIONS)
                parts = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
                samples = gradients.setdefault(_label(estimator), [])
                samples.append(torch.cat([part.flatten() for part in parts]))
        kls.append(RaoBlackwell().value(stats.detach(), rollout.mask).mean().item())
        print(f"batch {index + 1} of {batches}", file=sys.stderr, flush=True)
    found = {label: traces(torch.stack(samples)) for label, samples in gradients.items()}
    rows = [["`MonteCarloRewardToGo`", *(_ratio(found, "MonteCarloRewardToGo") for _ in sizes)]]
    for name in KINDS:
        rows.append([f"`{name}`", *(_ratio(found, f"{name} {k}") for k in sizes)])
    table = markdown(["estimator", *(f"k = {k}" for k in sizes)], rows)
    return table, sum(kls) / len(kls), len(policy.get_output_embeddings().weight)


def _label(estimator: KLEstimator) -> str:
    name = type(estimator).__name__
    return name if estimator.topk is None else f"{name} {estimator.topk.k}"


def _ratio(found: dict[str, Tensor], label: str) -> str:
    return ratio_with_error(found[label], found["RaoBlackwell"])


def _sample(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, index: int) -> Rollout:
    reviews = load_rows("grammar", "train", (index + 1) * PROMPTS)[index * PROMPTS :]
    prompts = [prompt.tokens for prompt in read_prompts(reviews, Reader("source", tokenizer, ()), 2, 8)]
    batch = pad(prompts, tokenizer.pad_token_id, side="left")
    return generate_completions(
        policy,
        batch["tokens"],
        batch["attention_mask"],
        Sampling(COMPLETIONS, 40, 1.0),
        seed=derive_seed(0, "topk", index),
        ends=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )


def memory_table(sizes: tuple[int, ...], rounds: int) -> str:
    """Scratch space of the fused loss and its time relative to the exact KL."""
    v, d, rows = GPT2
    generator = torch.Generator().manual_seed(0)
    hidden, weight, change = (
        torch.randn(*shape, generator=generator) for shape in ((1, rows, d), (v, d), (v, d))
    )
    tokens = torch.randint(v, (1, rows), generator=generator)
    ones = torch.ones(1, rows)
    leaves = [hidden.requires_grad_(), (weight * d**-0.5).requires_grad_()]
    ref_weight = leaves[1].detach() + 0.1 * d**-0.5 * change
    variants = {"exact": None, **{f"k = {k}": TopK(k) for k in sizes}}
    seconds: dict[str, list[float]] = {label: [] for label in variants}
    space = {}
    for _ in range(rounds):
        for label, topk in variants.items():
            buffers._WORKSPACE = threading.local()  # a workspace only grows
            start = time.perf_counter()
            loss, _ = tiled_policy_loss(
                leaves[0], leaves[1], leaves[0].detach(), ref_weight, tokens, ones > 0, ones, ones, topk=topk
            )
            torch.autograd.grad(loss, leaves)
            seconds[label].append(time.perf_counter() - start)
            memory = buffers._WORKSPACE.buffers.values()
            # Tokens, and log-probabilities of both models in float64
            head = 0 if topk is None else rows * topk.k * (8 + 2 * 8)
            space[label] = sum(buffer.numel() * buffer.element_size() for buffer in memory) + head
    header = ["", "scratch space, MB", "time / exact"]
    rows_of = [
        [label, number(space[label] / 1e6), f"{median(seconds[label]) / median(seconds['exact']):.2f}"]
        for label in variants
    ]
    return markdown(header, rows_of)
