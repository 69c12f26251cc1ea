"""Variance of the whole gradient, of reward and KL, relative to `MonteCarlo` at snapshots of training."""

import os
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from lit_klrb.data.batches import pad
from lit_klrb.data.corpora import load_rows
from lit_klrb.data.prompts import read_prompts
from lit_klrb.data.reader import Reader
from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.estimators import (
    EstimatorMemory,
    KLEstimator,
    MonteCarlo,
    RaoBlackwell,
    RaoBlackwellControlVariate,
    TiltedRaoBlackwell,
)
from lit_klrb.functional import TokenStats
from lit_klrb.models import loading
from lit_klrb.models.rollout import Rollout
from lit_klrb.rewards import GrammarReward, load_reward
from lit_klrb.rollouts.scoring import Scorer
from lit_klrb.seeding import derive_seed

from .table import markdown

REMEMBERING = "with earlier"
ARMS: dict[str, KLEstimator] = {
    "MC": MonteCarlo(),
    "RB": RaoBlackwell(),
    "tilted": TiltedRaoBlackwell(),
    "combination": RaoBlackwellControlVariate(),
    REMEMBERING: RaoBlackwellControlVariate(),
}
WARM_UP = 16
# Sums over earlier rollouts keep 0.8 of their weight per rollout, so those before the last 8 hardly count.
OBSERVED = 8


class Setting(NamedTuple):
    """Models of a folder of configurations, and what is measured with them.

    Args:
        configs: The folder, below configs/.
        source: Reviews whose first words are prompts.
        beta: Weight of the KL, in RLOO and in the measured gradient.
        prompts: Prompts per rollout.
        max_new_tokens: Maximum length of a completion.
        steps: RLOO steps of the snapshots middle and end.
        rewards: The rewards, of which the first is that of training and of binary and adversarial.
        centre: The adversarial reward is minus the distance of the first from this.
        batches: Completions per prompt, and how many batches are drawn with so many.
    """

    configs: str
    source: str
    beta: float
    prompts: int
    max_new_tokens: int
    steps: tuple[int, int]
    rewards: tuple[str, ...]
    centre: float
    batches: dict[int, int]

    @property
    def snapshots(self) -> dict[str, str]:
        """The run of each snapshot."""
        middle, end = self.steps
        return {"start": "dpo", "middle": f"rloo-{middle}", "end": f"rloo-{end}"}


DERIVED = ("binary", "length", "adversarial")
SETTINGS = {
    "variance": Setting(
        "demo",
        "grammar",
        0.3,
        16,
        40,
        (28, 56),
        ("grammar", "classifier", *DERIVED),
        1.5,
        {2: 24, 4: 16, 8: 12},
    ),
    "variance-imdb_small": Setting(
        "imdb_small",
        os.environ.get("LIT_KLRB_IMDB", "stanfordnlp/imdb"),
        0.1,
        8,
        32,
        (50, 100),
        ("classifier", *DERIVED),
        0.0,
        {2: 16, 4: 12, 8: 8},
    ),
}
TEXT = """`python -m benchmarks {key}`. Trace of the covariance of the gradient of E[reward] - {beta} KL in
all parameters, relative to `MonteCarlo` on the same batches of {prompts} prompts ({batches}), ± its
jackknife standard error. The policy is the DPO checkpoint (start), or that after {steps[0]} or {steps[1]}
RLOO steps with `MonteCarlo` at beta {beta} (middle, end), trained on the {main} reward. Token values start
from those that DPO fitted to that reward, and are fitted to {warm} rollouts of other prompts of the same
policy, of {prompts} prompts each; "explained" is the share of the within-prompt variance of the rewards
that they predicted before they were fitted to them. The coefficients of "combination" are fitted on the
other prompts of the batch; those of "with earlier" on the last of those rollouts too, as in training."""


def report(key: str, quick: bool, runs: Path) -> str:
    """The part; models are trained in `runs` unless they are there."""
    setting = SETTINGS[key]
    rows = []
    for snapshot, run in setting.snapshots.items() if not quick else [("start", "dpo")]:
        for completions, batches in setting.batches.items() if not quick else [(4, 4)]:
            world = World(setting, runs, run, completions)
            rows += [[snapshot, str(completions), *row] for row in world.rows(batches)]
            print(*rows[-len(setting.rewards) :], sep="\n", file=sys.stderr, flush=True)
    header = ["snapshot", "K", "reward", "explained", *list(ARMS)[1:]]
    drawn = ", ".join(f"{count} with K = {completions}" for completions, count in setting.batches.items())
    text = TEXT.format(
        key=key,
        warm=WARM_UP,
        batches=drawn,
        main=setting.rewards[0],
        **{name: getattr(setting, name) for name in ("beta", "prompts", "steps")},
    )
    heading = f"## Variance of the whole gradient, configs/{setting.configs}"
    return f"{heading}\n\n{textwrap.fill(text, 118, break_on_hyphens=False)}\n\n{markdown(header, rows)}"


class World:
    """A policy with its reference, and every reward of its completions."""

    def __init__(self, setting: Setting, runs: Path, run: str, completions: int) -> None:
        def checkpoint(name: str) -> str:
            return trained(runs, name, setting.configs, setting.beta)

        reference, classifier, policy = checkpoint("sft"), checkpoint("reward"), checkpoint(run)
        self.setting = setting
        self.tokenizer = loading.load_tokenizer("policy", policy)
        self.policy = loading.load_model("policy", policy)
        frozen = loading.freeze(loading.load_model("reference", reference))
        self.scorer = Scorer(self.policy, frozen, 1.0)
        self.sampling = Sampling(completions, setting.max_new_tokens, 1.0)
        self.grammar, self.classifier = GrammarReward(), load_reward(classifier)
        self.prior = loading.load_token_values("policy", checkpoint("dpo"))

    def rollouts(self, count: int) -> Iterator[tuple[Rollout, dict[str, Tensor]]]:
        """Rollouts of prompts of their own, with their rewards."""
        for rollout in self.completions(count):
            yield rollout, self.rewards(rollout)

    def completions(self, count: int) -> Iterator[Rollout]:
        """Rollouts of prompts of their own."""
        size = self.setting.prompts
        reviews = load_rows(self.setting.source, "train", count * size)
        reader = Reader("source", self.tokenizer, ())
        prompts = [prompt.tokens for prompt in read_prompts(reviews, reader, 2, 8)]
        for index in range(count):
            batch = pad(prompts[index * size : (index + 1) * size], self.tokenizer.pad_token_id, side="left")
            yield generate_completions(
                self.policy,
                batch["tokens"],
                batch["attention_mask"],
                self.sampling,
                seed=derive_seed(0, "variance", index),
                ends=[self.tokenizer.eos_token_id],
                pad_token_id=self.tokenizer.pad_token_id,
            )

    def rewards(self, rollout: Rollout) -> dict[str, Tensor]:
        """The rewards of the setting, shape [B] each."""
        kept = rollout.tokens.masked_fill(~rollout.attention_mask, self.tokenizer.pad_token_id)
        texts = self.tokenizer.batch_decode(kept, skip_special_tokens=True)
        makers = {"grammar": self.grammar, "classifier": self.classifier}
        found = {name: maker(texts) for name, maker in makers.items() if name in self.setting.rewards}
        odds = found[self.setting.rewards[0]]
        derived = (odds > 0).float(), rollout.mask.sum(1).float(), -(odds - self.setting.centre).abs()
        return found | dict(zip(DERIVED, derived, strict=True))

    def rows(self, batches: int) -> list[list[str]]:
        """Reward, the share of it that is explained, and the ratio of each estimator to `MonteCarlo`."""
        size = len(self.policy.get_output_embeddings().weight)
        memories = {
            name: EstimatorMemory(ARMS[REMEMBERING], vocabulary_size=size) for name in self.setting.rewards
        }
        if self.prior is not None:
            for memory in memories.values():
                memory.start_from(self.prior)
        gradients: dict[tuple[str, str], list[Tensor]] = {}
        beta = self.setting.beta
        for index, (rollout, rewards) in enumerate(self.rollouts(WARM_UP + batches)):
            for name, memory in memories.items():
                if index < WARM_UP:
                    self.observe(memory, rollout, rewards[name], beta, weighted=index >= OBSERVED)
                    continue
                found = self.gradients(memory, rollout, rewards[name], beta, ARMS, REMEMBERING)
                for arm, gradient in found.items():
                    gradients.setdefault((name, arm), []).append(gradient)
        variances = {key: traces(torch.stack(samples)) for key, samples in gradients.items()}
        return [
            [name, f"{memory.metrics['reward_explained']:.2f}"]
            + [ratio_with_error(variances[name, arm], variances[name, "MC"]) for arm in list(ARMS)[1:]]
            for name, memory in memories.items()
        ]

    @torch.no_grad()
    def observe(
        self,
        memory: EstimatorMemory,
        rollout: Rollout,
        rewards: Tensor | None,
        beta: float,
        weighted: bool = True,
    ) -> TokenStats:
        """Statistics of a rollout, which the memory then has, for its coefficients only if it is weighted."""
        stats, tokens = self.stats(memory, rollout), rollout.completions
        group_size = self.sampling.completions_per_prompt
        if weighted:
            memory.weights(stats, rollout.mask, rewards, beta=beta, group_size=group_size, tokens=tokens)
        memory.observe(tokens, rollout.mask, rewards, stats, group_size=group_size)
        return stats

    def stats(self, memory: EstimatorMemory, rollout: Rollout) -> TokenStats:
        """Statistics with the token values of a memory."""
        return self.scorer.stats(rollout, self.scorer.reference_states(rollout), memory.token_values)

    def gradients(
        self,
        memory: EstimatorMemory,
        rollout: Rollout,
        rewards: Tensor | None,
        beta: float,
        arms: Mapping[str, KLEstimator],
        remembering: str,
    ) -> dict[str, Tensor]:
        """The gradient in all parameters of each estimator's loss, on the same rollout and token values.

        The memory's coefficients are those of the arm `remembering`.
        """
        stats, parameters = self.stats(memory, rollout), list(self.policy.parameters())
        rows, found = (stats.detach(), rollout.mask, rewards), {}
        settings: dict[str, Any] = {"beta": beta, "group_size": self.sampling.completions_per_prompt}
        for name, estimator in arms.items():
            if name == remembering:
                weights = memory.weights(*rows, **settings, tokens=rollout.completions)
            else:
                weights = estimator.weights(*rows, **settings)
            loss = estimator.loss(stats, rollout.mask, weights, beta=beta)
            parts = torch.autograd.grad(loss, parameters, retain_graph=True)
            found[name] = torch.cat([part.flatten() for part in parts])
        return found


def traces(samples: Tensor) -> Tensor:
    """Trace of the covariance of samples [N, P], and with each sample left out: [1 + N]."""
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


def trained(runs: Path, name: str, configs: str = "demo", beta: float = 0.3) -> str:
    """The checkpoint of a stage of a folder of configurations; rloo-N is RLOO with N steps.

    It is trained unless it is in `runs`, with the stages that it begins with.
    """
    from lit_klrb.cli.lightning import main

    where = runs / configs / name
    result = where / "checkpoints" / "last.ckpt"
    if result.exists():
        return str(result)
    stage, _, steps = name.partition("-")
    config = f"configs/{configs}/{stage}.yaml"
    argv = ["fit", "--config", config, "--trainer.default_root_dir", str(where)]
    argv += ["--trainer.enable_progress_bar", "false"]
    settings = yaml.safe_load(Path(config).read_text("utf-8"))["model"]["init_args"]
    for key, value in settings.items():
        if str(value).startswith(f"runs/{configs}/"):
            argv += [f"--model.{key}", trained(runs, value.split("/")[2], configs, beta)]
    if steps:
        argv += ["--kl.estimator", "MonteCarlo", "--kl.beta", str(beta), "--trainer.max_steps", steps]
    if main(argv):
        raise SystemExit(f"training {stage} failed: {argv}")
    return str(result)
