"""Variance of the complete gradient of MonteCarlo, RaoBlackwell and their control variate."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lit_klrb.data.batches import pad
from lit_klrb.data.corpora import load_reviews
from lit_klrb.data.prompts import cut_prompts
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate
from lit_klrb.models import loading
from lit_klrb.models.generation import Sampling, generate_completions
from lit_klrb.models.scoring import Scorer
from lit_klrb.rewards import GrammarReward
from lit_klrb.seeding import derive_seed
from tests.estimators.walk import GROUPS, ascent, variances, worlds

from .table import markdown, number

KINDS = (MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate)
FRACTIONS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99, 1.0)
MOMENTS = (0, 28, 112)
BETAS = (0.1, 0.3, 1.0)
PROMPTS = 16

HEADING = """## Variance of the complete gradient

`python -m benchmarks variance`. Traces of the covariance of the gradient of E[reward] - beta KL, with
the leave-one-out baseline, relative to the better of `MonteCarlo` and `RaoBlackwell` ({groups} prompts per
batch, the same batches for all three). Below 1: the control variate has less variance than both.
"""
ENUMERABLE = """### Enumerable models

On the way from the reference (0 % of the attainable objective) to the optimum, by exact gradient ascent; beta
0.4, {batches} batches per point.
"""
NEURAL = """### The demo's models

GPT-2 with two layers on the embedded world: the DPO checkpoint (0 steps), and policies after {late} RLOO
steps with `RaoBlackwell` at the beta of the row; K = 4 completions per prompt, {batches} batches of {prompts}
prompts. ± is the jackknife standard error of the ratio.
"""


def enumerable(quick: bool) -> str:
    """The table of the enumerable models."""
    batches, fractions = (30, FRACTIONS[::4]) if quick else (300, FRACTIONS)
    rows = []
    for name, reference, rewards in worlds():
        for group_size in (2, 4):
            print(f"{name}, K = {group_size}", file=sys.stderr)
            cells = []
            for policy in ascent(reference, rewards, fractions):
                mc, rb, cv = variances(policy, reference, rewards, group_size, batches, KINDS)
                cells.append(f"{cv / min(mc, rb):.2f} ({number(rb / mc)})")
            rows.append([name, str(group_size), *cells])
    header = ["control variate / better (RB / MC)", "K", *(f"{fraction:.0%}" for fraction in fractions)]
    return ENUMERABLE.format(batches=batches) + "\n" + markdown(header, rows)


def gradients(policy_path: str, reference_path: str, beta: float, batches: int) -> Iterator[list[Tensor]]:
    """Yield the gradients of all estimators on the same completions, for each batch."""
    tokenizer = loading.load_tokenizer("policy", policy_path)
    policy, reference = (
        loading.load_model("policy", policy_path),
        loading.load_model("reference", reference_path),
    )
    scorer, reward, sampling = (
        Scorer(policy, loading.freeze(reference), 1.0),
        GrammarReward(),
        Sampling(4, 40, 1.0),
    )
    prompts = cut_prompts(load_reviews("grammar", "train", batches * PROMPTS), tokenizer, 2, 8)
    parameters = list(policy.parameters())
    for index in range(batches):
        batch = pad(prompts[index * PROMPTS : (index + 1) * PROMPTS], tokenizer.pad_token_id, side="left")
        rollout = generate_completions(
            policy,
            batch["tokens"],
            batch["attention_mask"],
            sampling,
            seed=derive_seed(0, "variance", index),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        states = scorer.reference_states(rollout)
        with torch.no_grad():
            stats = scorer.stats(rollout, states)
        rewards = reward(tokenizer.batch_decode(rollout.tokens, skip_special_tokens=True))
        found = []
        for kind in KINDS:
            weights = kind().weights(stats, rollout.mask, rewards, beta=beta, group_size=4)
            loss = scorer.loss(rollout, states, weights)
            found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
        yield found


def traces(samples: Tensor) -> Tensor:
    """Trace of the covariance of samples [N, P], and the traces without each sample, shape [1 + N]."""
    gram = (samples @ samples.T).double()
    count, total, own = len(gram), gram.diagonal().sum(), gram.diagonal()
    whole = (total - gram.sum() / count) / (count - 1)
    rest = gram.sum() - 2 * gram.sum(1) + own
    left_out = (total - own - rest / (count - 1)) / (count - 2)
    return torch.cat([whole[None], left_out])


def ratio_with_error(above: Tensor, below: Tensor) -> str:
    """The ratio of two traces with its jackknife standard error."""
    ratios = above / below
    left_out = ratios[1:]
    error = ((len(left_out) - 1) * left_out.var(correction=0)).sqrt()
    return f"{ratios[0]:.2f} ± {error:.2f}"


def neural(quick: bool) -> str:
    """The table of the demo's models, trained here."""
    batches, betas, moments = (4, BETAS[1:2], MOMENTS[:1]) if quick else (100, BETAS, MOMENTS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        reference, warm = (_train(root, stage) for stage in ("sft", "dpo"))
        for beta in betas:
            for steps in moments:
                extra = ["--kl.beta", str(beta), "--trainer.max_steps", str(steps)]
                policy = _train(root, "rloo", f"rloo-{beta}-{steps}", *extra) if steps else warm
                samples = zip(*gradients(policy, reference, beta, batches), strict=True)
                mc, rb, cv = (traces(torch.stack(list(kind))) for kind in samples)
                better = mc if mc[0] < rb[0] else rb
                rows.append([str(beta), str(steps), ratio_with_error(cv, better), ratio_with_error(rb, mc)])
                print(rows[-1], file=sys.stderr)
    late = " and ".join(str(steps) for steps in moments if steps) or "no"
    heading = NEURAL.format(late=late, batches=batches, prompts=PROMPTS)
    return heading + "\n" + markdown(["beta", "steps", "control variate / better", "RB / MC"], rows)


def _train(root: Path, stage: str, name: str | None = None, *extra: str) -> str:
    from lit_klrb.cli.lightning import main

    def checkpoint(run: str) -> str:
        return str(root / run / "checkpoints" / "last.ckpt")

    upstream = {"sft": [], "dpo": ["--model.reference_path", checkpoint("sft")]}
    upstream["rloo"] = [*upstream["dpo"], "--model.policy_path", checkpoint("dpo")]
    where = [
        "--trainer.default_root_dir",
        str(root / (name or stage)),
        "--trainer.enable_progress_bar",
        "false",
    ]
    argv = ["fit", "--config", f"configs/demo/{stage}.yaml", *upstream[stage], *where, *extra]
    if main(argv):
        raise SystemExit(f"training {stage} failed: {argv}")
    return checkpoint(name or stage)


def report(quick: bool) -> str:
    """The part of the document."""
    return "\n\n".join([HEADING.format(groups=GROUPS), enumerable(quick), neural(quick)])
