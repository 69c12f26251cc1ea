"""Variance of distillation's gradient with token values that predict the KL to come."""

import sys
import textwrap
from pathlib import Path

import torch
import yaml
from torch import Tensor

from lit_klrb.estimators import (
    EstimatorMemory,
    KLEstimator,
    MonteCarloRewardToGo,
    RaoBlackwell,
)
from lit_klrb.models import loading
from lit_klrb.rollouts.scoring import Scorer
from replication.to_come import RaoBlackwellTokenValues

from .table import markdown
from .variance import SETTINGS, World, ratio_with_error, traces

REMEMBERING = "token values"
ARMS: dict[str, KLEstimator] = {
    "RB": RaoBlackwell(),
    "sampled": MonteCarloRewardToGo(),
    REMEMBERING: RaoBlackwellTokenValues(),
}
# The student of configs/demo/distill.yaml with fresh weights, and runs of configs/demo.
FRESH = "fresh"
STUDENTS = {FRESH: "dpo", "DPO checkpoint": "dpo", "after 56 steps of RLOO": "rloo-56"}
# Prompts per rollout, completions per prompt, earlier rollouts, and batches that are measured.
SIZES = ((16, 4, 16, 16), (8, 2, 6, 40), (8, 2, 48, 40))

TEXT = """`python -m benchmarks variance-distillation`. Trace of the covariance of the gradient of
KL(student ‖ teacher) in all parameters, relative to `RaoBlackwell` on the same batches, ± its jackknife
standard error. The teacher is the reference of configs/demo. Token values and their coefficient are fitted to
earlier rollouts of other prompts of the same student; "explained" is the share of the squared KL to come,
centred per prompt and position, that the token before it predicted. "Sampled" is `MonteCarloRewardToGo`."""


def report(quick: bool, runs: Path) -> str:
    """The part; models are trained in `runs` unless they are there."""
    rows = []
    for student, run in STUDENTS.items() if not quick else [(FRESH, "dpo")]:
        for prompts, completions, earlier, batches in SIZES if not quick else [(4, 2, 4, 4)]:
            world = World(SETTINGS["variance"]._replace(prompts=prompts), runs, run, completions)
            if student == FRESH:
                use_fresh_student(world)
            rows.append([student, f"{prompts} × {completions}", str(earlier)])
            rows[-1] += row(world, earlier, batches)
            print(rows[-1], file=sys.stderr, flush=True)
    header = ["student", "prompts × K", "earlier rollouts", "KL", "explained", "sampled", "token values"]
    text = textwrap.fill(TEXT, 118, break_on_hyphens=False)
    return f"## Variance of distillation's gradient, configs/demo\n\n{text}\n\n{markdown(header, rows)}"


def use_fresh_student(world: World) -> None:
    """Replace the policy by the student of configs/demo/distill.yaml before its training."""
    settings = yaml.safe_load(Path("configs/demo/distill.yaml").read_text("utf-8"))["model"]["init_args"]
    world.policy = loading.fresh_model(settings["policy_config"], world.tokenizer, 0).eval()
    world.scorer = Scorer(world.policy, world.scorer.reference, 1.0)


def row(world: World, warm_up: int, batches: int) -> list[str]:
    """The student's KL, the share of the KL to come that is explained, and ratios to `RaoBlackwell`."""
    size = len(world.policy.get_output_embeddings().weight)
    memory = EstimatorMemory(ARMS[REMEMBERING], vocabulary_size=size)
    kls: list[Tensor] = []
    gradients: dict[str, list[Tensor]] = {name: [] for name in ARMS}
    for index, rollout in enumerate(world.completions(warm_up + batches)):
        if index < warm_up:
            stats = world.observe(memory, rollout, None, beta=1.0)
            kls.append(RaoBlackwell().value(stats, rollout.mask))
            continue
        found = world.gradients(memory, rollout, None, 1.0, ARMS, REMEMBERING)
        for name, gradient in found.items():
            gradients[name].append(gradient)
    variances = {name: traces(torch.stack(samples)) for name, samples in gradients.items()}
    ratios = [ratio_with_error(variances[name], variances["RB"]) for name in list(ARMS)[1:]]
    return [f"{torch.cat(kls).mean():.3g}", f"{memory.metrics['kl_explained']:.2f}", *ratios]
