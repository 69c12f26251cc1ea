"""Trial: baselines of each token from the policy's last hidden state, and from the norms of scores.

    python -m replication.notes.hidden_baseline CONFIG POLICY ROLLOUTS MEASURED

prints the rows of hidden_baseline.md: of a configuration of RLOO, a policy (a folder, with a new adapter, or
a checkpoint), the earlier rollouts to fit to, and the prompts whose gradients are measured. Without arguments
it prints the exact check of the bias.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from torch import Tensor

from analysis.stats.gradient_noise import compare_gradient_variance
from lit_klrb.data.batches import Batch
from lit_klrb.data.corpora import Source, load_rows
from lit_klrb.data.kinds import Row
from lit_klrb.data.prompts import prompt_batch, read_prompts
from lit_klrb.data.reader import Reader
from lit_klrb.estimators import MonteCarlo, MonteCarloRewardToGo, RaoBlackwell
from lit_klrb.estimators.composed import on_policy_credit
from lit_klrb.functional import TokenStats, leave_one_out_baseline, tiled_token_stats, token_stats
from lit_klrb.models.heads import SplitModel, split_model
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules import RLOOModule
from lit_klrb.seeding import derive_seed
from lit_klrb.studies.gradient_noise import gram, policy_gradient
from replication.rivals import optimal_token_baseline, score_norms
from replication.studies.tabular import TabularPairs

PER_ROLLOUT = 4  # prompts, as in training
ENOUGH = 100  # prompts; with fewer, those of the evaluation are taken as well
SIZES = (3, 6, 12)  # earlier rollouts
STRENGTHS = [10.0**power for power in range(-2, 5)]
KLS = ("sampled", "exact")  # log ratios from the token on; exact KLs after it, and the token's own pathwise
KINDS = ("state", "state and others", "shrunk")
CONTROL, EXACT = "MonteCarlo", "exact, leave-one-out"
# The optimal token baseline of arXiv:2602.07078, and whether the mean includes the completion itself
OPTIMAL = {"optimal token, as in verl": True, "optimal token, leave-one-out": False}


class Fit(NamedTuple):
    """Coefficients of states, [D], and of states less the others', and the share of leave-one-out."""

    plain: Tensor
    centred: Tensor
    share: Tensor


class Group(NamedTuple):
    """The K completions of a prompt: losses (beta * credit - reward) under each KL, and states with a 1.

    `weight` is the policy's entropy before each token, as rough a measure of the variance of its score; 0
    outside the mask. `norms` are the sums of squared norms of scores up to each token. `directions` are the
    gradients of log-probability and KL for the head's input.
    """

    batch: Batch
    rollout: Rollout
    stats: TokenStats
    rewards: Tensor
    whole: Tensor
    losses: Tensor
    states: Tensor
    weight: Tensor
    norms: Tensor
    directions: Tensor


def score_weights(kind: str, losses: Tensor, states: Tensor, fit: Fit, group_size: int) -> Tensor:
    """Losses less a baseline that depends on the tokens before t and on other completions only, [B, T]."""
    others = losses - leave_one_out_baseline(losses, group_size)
    if kind == "leave-one-out":
        return others
    if kind == "state and others":
        return others - (states - leave_one_out_baseline(states, group_size)) @ fit.centred
    own = losses - states @ fit.plain
    return own if kind == "state" else fit.share * others + (1 - fit.share) * own


def ridge(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Coefficients [D, E] and held-out residuals [n, E] of weighted ridge regressions.

    The strength of each of the E is the best for parts that are left out, in closed form.

    Args:
        parts: Features [n_i, D], of which the last is constant and not penalised, targets [n_i, E] and
            weights [n_i].
    """
    x, y, w = (torch.cat(column) for column in zip(*parts, strict=True))
    mean = (w @ x) / w.sum()
    scale = (w @ (x - mean).square() / w.sum()).sqrt().clamp(min=1e-6)
    scale[-1] = 1e-3
    root, sizes = w.sqrt()[:, None], [len(part[0]) for part in parts]
    rows, targets = root * x / scale, root * y
    values, vectors = torch.linalg.eigh(rows.mT @ rows)
    rotated = rows @ vectors
    projected = rotated.mT @ targets
    best = torch.full(y.shape[1:], torch.inf, dtype=y.dtype)
    coefficients, residuals = torch.zeros_like(projected), torch.zeros_like(targets)
    for strength in STRENGTHS:
        shrunk = (values.clamp(min=0) + strength * w.sum())[:, None].reciprocal()
        found = shrunk * projected
        errors = (targets - rotated @ found).split(sizes)
        # A part's residuals without it: (1 - its block of the hat matrix)^-1 times those with it
        left_out = torch.cat(
            [
                torch.linalg.solve(torch.eye(len(own), dtype=own.dtype) - (own * shrunk.mT) @ own.mT, error)
                for own, error in zip(rotated.split(sizes), errors, strict=True)
            ]
        )
        error = left_out.square().sum(0)
        better, best = error < best, torch.minimum(error, best)
        coefficients = torch.where(better, found, coefficients)
        residuals = torch.where(better, left_out, residuals)
    return (vectors @ coefficients) / scale[:, None], residuals / root


def fitted(groups: Sequence[Group]) -> tuple[dict[str, Fit], dict[str, float]]:
    """The regressions on some groups, for each KL, and the proxies of prompts that are left out of them."""
    plain, centred, others, control = [], [], [], 0.0
    for group in groups:
        used, group_size = group.weight > 1e-6, len(group.weight)
        losses = group.losses - leave_one_out_baseline(group.losses, group_size)
        states = group.states - leave_one_out_baseline(group.states, group_size)
        whole = group.whole - leave_one_out_baseline(group.whole, group_size)
        control += (group.weight * whole.square()).sum().item()
        plain.append((group.states[used], group.losses[used], group.weight[used]))
        centred.append((states[used], losses[used], group.weight[used]))
        others.append(losses[used])
    weight, left = torch.cat([part[2] for part in plain])[:, None], torch.cat(others)
    coefficients, own = ridge(plain)
    differences, both = ridge(centred)
    # Minimises the held-out squares of share * left + (1 - share) * own
    apart = left - own
    share = -(weight * own * apart).sum(0) / (weight * apart.square()).sum(0).clamp(min=1e-300)
    share = share.clamp(0, 1)
    columns = zip(coefficients.unbind(1), differences.unbind(1), share, strict=True)
    fits = {kl: Fit(*row) for kl, row in zip(KLS, columns, strict=True)}
    residuals = dict(zip(KINDS, (own, both, own + share * apart), strict=True))
    proxies = {
        f"{kl}, {kind}": (weight[:, 0] * column.square()).sum().item() / control
        for kind, residual in {"leave-one-out": left, **residuals}.items()
        for kl, column in zip(KLS, residual.unbind(1), strict=True)
    }
    return fits, proxies


def arms(group: Group, fits: Mapping[int, Mapping[str, Fit]]) -> Iterator[tuple[str, Tensor, bool]]:
    """Each estimator's name, score weights [K, T], and whether it has the pathwise term of the exact KL."""
    group_size, nothing = len(group.weight), Fit(*torch.zeros(3, 1).double())
    yield CONTROL, group.whole - leave_one_out_baseline(group.whole, group_size), False
    for name, leave_in in OPTIMAL.items():
        losses = group.losses[..., 0]
        baseline = optimal_token_baseline(losses, group.norms, group_size, leave_in=leave_in)
        yield f"sampled, {name}", losses - baseline, False
    for index, kl in enumerate(KLS):
        settings = group.losses[..., index], group.states
        first = score_weights("leave-one-out", *settings, nothing, group_size)
        yield f"{kl}, leave-one-out", first, kl == "exact"
        for size, by_kl in fits.items():
            for kind in KINDS:
                weights = score_weights(kind, *settings, by_kl[kl], group_size)
                yield f"{kl}, {kind}, {size}", weights, kl == "exact"


def sampled(module: RLOOModule, batch: Batch, index: int) -> Group:
    """Completions of a prompt, with what the estimators read."""
    policy, reference = parts_of(module)
    count, inputs = module.group_size, []
    hook = policy.head.register_forward_pre_hook(lambda _, given: inputs.append(given[0][:, -1:]))
    seed = derive_seed(module.seed, "hidden_baseline", index)
    rollout = module.pair.sample(batch, module.sampling, seed=seed)
    hook.remove()
    # The states of the prompt's end come once for all completions
    hidden = torch.cat([inputs[0].repeat_interleave(count, 0), *inputs[1:]], 1)
    rewards = module.training_rewards(rollout, module.pair.rewards(module.reward, rollout, batch)).double()
    others = hidden if is_reference(module) else module.pair.scorer.reference_states(rollout)
    heads = [part.head_weights()[0].detach() for part in (policy, reference)]
    leaf = hidden.clone().requires_grad_()
    settings: dict[str, Any] = {"temperature": module.temperature, "mask": rollout.mask}
    stats = tiled_token_stats(leaf, heads[0], others, heads[1], rollout.completions, **settings)
    assert stats.kl is not None
    summed = stats.logprobs.sum(), stats.kl.sum()
    directions = [torch.autograd.grad(term, leaf, retain_graph=True)[0] for term in summed]
    stats = stats.detach().masked(rollout.mask).map(Tensor.double)
    assert stats.entropy is not None
    recipes = MonteCarlo.recipe, MonteCarloRewardToGo.recipe, RaoBlackwell.recipe
    losses = [module.beta * on_policy_credit(recipe, stats) - rewards[:, None] for recipe in recipes]
    states = torch.cat([hidden.double(), torch.ones(*rollout.mask.shape, 1, dtype=torch.float64)], -1)
    return Group(
        batch,
        rollout,
        stats,
        rewards,
        losses[0],
        torch.stack(losses[1:], -1),
        after_end(states, rollout.mask),
        stats.entropy,
        score_norms(hidden @ heads[0].mT / module.temperature, stats.logprobs, rollout.mask),
        torch.stack(directions),
    )


def is_reference(module: RLOOModule) -> bool:
    """Whether the policy is the reference with an adapter that is still without effect."""
    added = [parameter for name, parameter in module.policy.named_parameters() if "lora_B" in name]
    return module.reference_path is None and not any(bool(parameter.any()) for parameter in added)


def after_end(states: Tensor, mask: Tensor) -> Tensor:
    """States [B, T, D] with each completion's last one repeated after its end."""
    place = torch.minimum(torch.arange(mask.shape[1]), mask.sum(1, keepdim=True) - 1)
    return states.gather(1, place[..., None].expand_as(states))


def parts_of(module: RLOOModule) -> tuple[SplitModel, SplitModel]:
    """Backbone and head of policy and reference."""
    policy, reference = split_model(module.policy), split_model(getattr(module, "reference", module.policy))
    assert policy is not None
    assert reference is not None
    return policy, reference


def gradients(
    module: RLOOModule, group: Group, weights: Mapping[str, tuple[Tensor, bool]]
) -> dict[str, Tensor]:
    """The gradient of each estimator's loss on a group, shape [parameters]; the head is passed only once."""
    parameters = [parameter for parameter in module.policy.parameters() if parameter.requires_grad]
    hidden = parts_of(module)[0].hidden_states(group.rollout)
    score, kl = group.directions
    found = {}
    for name, (weight, pathwise) in weights.items():
        weight = (weight * group.rollout.mask).float()[..., None]
        upstream = weight * score + (module.beta * kl if pathwise else 0)
        parts = torch.autograd.grad(hidden, parameters, upstream / len(weight), retain_graph=True)
        found[name] = torch.nn.utils.parameters_to_vector(parts)
    return found


def difference(module: RLOOModule, group: Group, gradient: Tensor) -> float:
    """Relative difference of the control's gradient to the one that the package computes."""
    states = module.pair.scorer.reference_states(group.rollout)
    stats, mask = module.pair.scorer.stats(group.rollout, states), group.rollout.mask
    settings: dict[str, Any] = {"beta": module.beta, "group_size": module.group_size}
    weights = MonteCarlo().weights(stats.detach(), mask, group.rewards, **settings)
    expected = policy_gradient(module.policy, module.beta, MonteCarlo(), stats, mask, weights)
    return float((gradient - expected).norm() / expected.norm().clamp(min=1e-12))


def built(config: Mapping[str, Any], policy: str) -> tuple[RLOOModule, list[Batch]]:
    """The module of a configuration with another policy, and its prompts one by one, in random order."""
    arguments = {**config["model"]["init_args"], "policy_path": policy}
    if policy.endswith(".ckpt"):
        arguments.pop("lora", None)
    module = RLOOModule(**arguments)
    module.beta = config["kl"]["beta"]
    module.policy, module.tokenizer = module.build()
    module.pair, module.reward = module.load_pair(), module.load_reward(torch.device("cpu"))
    data = config["data"]["init_args"]
    source = data["source"] if Path(data["source"]).is_dir() else os.environ["LIT_KLRB_IMDB"]
    rows: list[Row] = []
    for split in ("train", "validation"):
        if len(rows) < ENOUGH:
            rows += load_rows(Source(source, "prompts"), split, size=data.get("train_size", 0))
    lengths = data.get("min_prompt_tokens", 2), data.get("max_prompt_tokens", 8)
    prompts = read_prompts(rows, Reader("source", module.tokenizer, ()), *lengths)
    order = np.random.default_rng(derive_seed(0, "hidden_baseline", "prompts")).permutation(len(prompts))
    pad: Any = module.tokenizer.pad_token_id
    return module, [prompt_batch([prompts[index]], pad) for index in order]


def measured(module: RLOOModule, batches: Sequence[Batch], rollouts: int, count: int) -> Iterator[str]:
    """The table of proxies and of relative variances, after every fourth of the measured prompts."""
    # The measured prompts come first: they do not depend on the number of earlier rollouts
    if len(batches) < count + PER_ROLLOUT * rollouts:
        raise ValueError(f"{len(batches)} prompts are fewer than {count} + {PER_ROLLOUT} * {rollouts}")
    past, earlier, fits = batches[count:], list[Group](), dict[int, dict[str, Fit]]()
    for size in (size for size in SIZES if size <= rollouts):
        indices = range(len(earlier), PER_ROLLOUT * size)
        earlier += [sampled(module, past[index], count + index) for index in indices]
        fits[size], left_out = fitted(earlier)
        shares = ", ".join(f"{kl} {fit.share:.2f}" for kl, fit in fits[size].items())
        yield summary(f"{size} earlier rollouts", earlier)
        yield f"shares of leave-one-out: {shares}; proxies of prompts that are left out:"
        yield from (f"| {name}, {size} | {proxy:.3f} |" for name, proxy in left_out.items())
    largest, kls = max(fits), KLS[1:] if is_reference(module) else KLS
    chosen = [CONTROL, *(f"sampled, {kind}" for kind in OPTIMAL)]
    chosen += [f"{kl}, {kind}, {largest}" for kl in kls for kind in KINDS]
    chosen += [] if is_reference(module) else [EXACT]
    groups: list[Group] = []
    proxies: dict[str, list[float]] = {}
    found: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for index, batch in enumerate(batches[:count]):
        group = sampled(module, batch, index)
        groups.append(group)
        every = {name: (weight, pathwise) for name, weight, pathwise in arms(group, fits)}
        for name, (weight, _) in every.items():
            proxies.setdefault(name, []).append((group.weight * weight.square()).sum().item())
        for name, gradient in gradients(module, group, {name: every[name] for name in chosen}).items():
            found[name].append(gradient)
        if index == 0:
            error = difference(module, group, found[CONTROL][0])
            yield f"relative difference to policy_gradient: {error:.1e}"
        if (index + 1) % PER_ROLLOUT == 0:
            yield summary(f"measured {index + 1}", groups)
            yield from rows(proxies, found)


def summary(name: str, groups: Sequence[Group]) -> str:
    """Mean reward, KL and length, and seconds of the processor."""
    kls = [group.stats.kl.sum(1) for group in groups if group.stats.kl is not None]
    columns = torch.cat([group.rewards for group in groups]), torch.cat(kls)
    means = ", ".join(f"{column.mean():.3f} ± {column.std():.3f}" for column in columns)
    length = torch.cat([group.rollout.mask.sum(1).double() for group in groups]).mean()
    return f"{name}: reward and KL {means}, length {length:.1f}, {time.process_time():.0f} s"


def rows(proxies: Mapping[str, Sequence[float]], found: Mapping[str, Sequence[Tensor]]) -> Iterator[str]:
    """Rows of the table: both relative to the control, the variance with its 95 % interval over prompts."""
    for name, values in proxies.items():
        text = "not measured"
        if name in found and name != CONTROL:
            both = torch.stack([*found[name], *found[CONTROL]])
            estimate = compare_gradient_variance(gram(both).numpy()).log_ratio
            interval = estimate.interval()
            assert interval is not None
            low, middle, high = np.exp([interval.low, estimate.value, interval.high])
            text = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        yield f"| {name} | {sum(values) / sum(proxies[CONTROL]):.3f} | {text} |"


def check() -> Iterator[str]:
    """Exact expectations over pairs of completions of an enumerated policy, with arbitrary coefficients."""
    pairs, beta = TabularPairs.random(0, 1, vocabulary=3, max_length=3), 0.3
    leaf, tokens, mask = pairs.policies.requires_grad_(), pairs.tokens, pairs.mask
    assert pairs.rewards is not None
    place = pairs.prefixes % leaf.shape[1]
    stats = token_stats(leaf[0, place], pairs.references[0, place], tokens).masked(mask)
    assert stats.kl is not None
    probability, rewards = pairs.logprobs(leaf)[0].exp(), pairs.rewards[0]
    gap = (stats.logprobs - stats.ref_logprobs).sum(1)
    (exact,) = torch.autograd.grad((probability * (beta * gap - rewards)).sum(), leaf, retain_graph=True)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(leaf.shape[1], 4, dtype=torch.float64, generator=generator)[place]
    random = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    fit = Fit(random[0], random[1], torch.tensor(0.4).double())
    both = torch.cartesian_prod(torch.arange(len(tokens)), torch.arange(len(tokens)))
    flat, weight = both.flatten(), (probability[both].prod(1) / 2).detach().repeat_interleave(2)
    detached = stats.detach()
    norms = score_norms(leaf[0, place].detach(), detached.logprobs, mask)[flat]
    for kl, recipe in zip(KLS, (MonteCarloRewardToGo.recipe, RaoBlackwell.recipe), strict=True):
        losses = beta * on_policy_credit(recipe, detached) - rewards[:, None]
        for name in ("leave-one-out", *KINDS, *(OPTIMAL if kl == "sampled" else ())):
            if name in OPTIMAL:
                baseline = optimal_token_baseline(losses[flat], norms, 2, leave_in=OPTIMAL[name])
                own = losses[flat] - baseline
            else:
                own = score_weights(name, losses[flat], after_end(states, mask)[flat], fit, 2)
            terms = (own * stats.logprobs[flat]).where(mask[flat], 0).sum(1)
            if kl == "exact":
                terms = terms + beta * stats.kl[flat].sum(1)
            (gradient,) = torch.autograd.grad((weight * terms).sum(), leaf, retain_graph=True)
            error = (gradient - exact).abs().max()
            cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), exact.flatten(), 0)
            yield f"{kl}, {name}: largest error {error:.1e} of {exact.abs().max():.2f}, cosine {cosine:.3f}"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(*check(), sep="\n")
    else:
        config, policy, rollouts, count = sys.argv[1:]
        module, batches = built(yaml.safe_load(Path(config).read_text()), policy)
        for line in measured(module, batches, int(rollouts), int(count)):
            print(line, flush=True)
