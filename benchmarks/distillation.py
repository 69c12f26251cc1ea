"""Variance of distillation's gradient with token values that predict the KL to come."""

import sys
import textwrap
from pathlib import Path

import torch
import yaml
from torch import Tensor

from lit_klrb.estimators import MonteCarloRewardToGo, RaoBlackwell, RaoBlackwellTokenValues
from lit_klrb.estimators.cross_fit import EarlierRollouts
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.models import loading
from lit_klrb.models.generation import Rollout
from lit_klrb.models.scoring import Scorer

from .table import markdown
from .variance import SETTINGS, World, ratio_with_error, traces

VALUES = RaoBlackwellTokenValues()
ARMS = {"RB": RaoBlackwell(), "sampled": MonteCarloRewardToGo(), "token values": VALUES}
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
    values, earlier = TokenValues(predicted="kl_to_come"), EarlierRollouts()
    group_size = world.sampling.completions_per_prompt
    kls: list[Tensor] = []
    gradients: dict[str, list[Tensor]] = {name: [] for name in ARMS}
    for index, rollout in enumerate(world.completions(warm_up + batches)):
        if index <= warm_up:
            values.fit(vocabulary=world.policy.get_output_embeddings().weight.shape[0])
        if index >= warm_up:
            measure(world, rollout, values, earlier, gradients)
            continue
        with torch.no_grad():
            stats = world.scorer.stats(rollout, world.scorer.reference_states(rollout), values.table)
        assert stats.kl is not None
        earlier.observe(VALUES.fit_sums(stats, rollout.mask, None, beta=1.0, group_size=group_size))
        values.observe_to_come(rollout.completions, rollout.mask, stats.kl, group_size)
        kls.append(RaoBlackwell().value(stats, rollout.mask))
    found = {name: traces(torch.stack(samples)) for name, samples in gradients.items()}
    ratios = [ratio_with_error(found[name], found["RB"]) for name in list(ARMS)[1:]]
    return [f"{torch.cat(kls).mean():.3g}", f"{values.explained:.2f}", *ratios]


def measure(
    world: World,
    rollout: Rollout,
    values: TokenValues,
    earlier: EarlierRollouts,
    gradients: dict[str, list[Tensor]],
) -> None:
    """Add the gradient in all parameters of each estimator's loss, on the same rollout."""
    stats = world.scorer.stats(rollout, world.scorer.reference_states(rollout), values.table)
    rows, parameters = (stats.detach(), rollout.mask), list(world.policy.parameters())
    group_size = world.sampling.completions_per_prompt
    for name, estimator in ARMS.items():
        if estimator is VALUES:
            weights = VALUES.weights_after(earlier.sums, *rows, group_size=group_size)
        else:
            weights = estimator.weights(*rows, group_size=group_size)
        loss = estimator.loss(stats, rollout.mask, weights)
        parts = torch.autograd.grad(loss, parameters, retain_graph=True)
        gradients[name].append(torch.cat([part.flatten() for part in parts]))
