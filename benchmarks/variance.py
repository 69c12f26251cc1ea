"""Variance of the whole gradient, of reward and KL, relative to `MonteCarlo` on the demo's models."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lit_klrb.data.batches import pad
from lit_klrb.data.corpora import load_reviews
from lit_klrb.data.prompts import cut_prompts
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate, TiltedRaoBlackwell
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.models import loading
from lit_klrb.models.generation import Rollout, Sampling, generate_completions
from lit_klrb.models.scoring import Scorer
from lit_klrb.rewards import GrammarReward, load_reward
from lit_klrb.seeding import derive_seed

from .table import markdown

KINDS = (MonteCarlo, RaoBlackwell, TiltedRaoBlackwell, RaoBlackwellControlVariate)
SHORT = {RaoBlackwell: "RB", TiltedRaoBlackwell: "tilted", RaoBlackwellControlVariate: "combination"}
REWARDS = ("grammar", "classifier", "binary", "length", "adversarial")
MOMENTS = {"start": "dpo", "middle": "rloo-28", "end": "rloo-56"}
# Completions per prompt, and how many batches are drawn with so many.
BATCHES = {2: 24, 4: 16, 8: 12}
BETA = 0.3
PROMPTS, WARM_UP = 16, 16

TEXT = """## Variance of the whole gradient

`python -m benchmarks variance`. Trace of the covariance of the gradient of E[reward] - {beta} KL in all
parameters, relative to `MonteCarlo` on the same batches of {prompts} prompts (24 with K = 2 completions per
prompt, 16 with 4, 12 with 8), ± its jackknife standard error. The policy is the demo's DPO checkpoint
(start), or that after 28 or 56 RLOO steps with `MonteCarlo` at beta {beta} (middle, end), trained on the
grammar reward. Token values are fitted to {warm} rollouts of other prompts of the same policy, of {prompts}
prompts each; "explained" is the share of the within-prompt variance of the rewards that they predicted
before they were fitted to them.

Rewards: exact log odds of the grammar; log odds of the demo's classifier; binary, 1 if the former are
positive; length in tokens; adversarial, -|log odds - 1.5|, made so that an additive table explains little.
"""


def report(quick: bool) -> str:
    """The part, with models trained here."""
    with tempfile.TemporaryDirectory() as folder:
        return measured(Path(folder), quick)


def measured(root: Path, quick: bool) -> str:
    """The part; runs that are in `root` already are used."""
    reference, classifier = trained(root, "sft"), trained(root, "reward")
    trained(root, "dpo")
    rows = []
    for moment, run in MOMENTS.items() if not quick else [("start", "dpo")]:
        policy = trained(root, run.partition("-")[0], run)
        for completions, batches in BATCHES.items() if not quick else [(4, 4)]:
            world = _World(policy, reference, classifier, completions)
            rows += [[moment, str(completions), *row] for row in world.rows(batches)]
            print(*rows[-len(REWARDS) :], sep="\n", file=sys.stderr, flush=True)
    header = ["moment", "K", "reward", "explained", *SHORT.values()]
    text = TEXT.format(beta=BETA, prompts=PROMPTS, warm=WARM_UP)
    return text + "\n" + markdown(header, rows)


class _World:
    """A policy with its reference, and every reward of its completions."""

    def __init__(self, policy: str, reference: str, classifier: str, completions: int) -> None:
        self.tokenizer = loading.load_tokenizer("policy", policy)
        self.policy = loading.load_model("policy", policy)
        frozen = loading.freeze(loading.load_model("reference", reference))
        self.scorer = Scorer(self.policy, frozen, 1.0)
        self.sampling = Sampling(completions, 40, 1.0)
        self.grammar, self.classifier = GrammarReward(), load_reward(classifier)

    def rollouts(self, count: int) -> Iterator[tuple[Rollout, dict[str, Tensor]]]:
        """Rollouts of `PROMPTS` prompts each, with their rewards."""
        prompts = cut_prompts(load_reviews("grammar", "train", count * PROMPTS), self.tokenizer, 2, 8)
        for index in range(count):
            chosen = prompts[index * PROMPTS : (index + 1) * PROMPTS]
            batch = pad(chosen, self.tokenizer.pad_token_id, side="left")
            rollout = generate_completions(
                self.policy,
                batch["tokens"],
                batch["attention_mask"],
                self.sampling,
                seed=derive_seed(0, "variance", index),
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            kept = rollout.tokens.masked_fill(~rollout.attention_mask, self.tokenizer.pad_token_id)
            texts = self.tokenizer.batch_decode(kept, skip_special_tokens=True)
            odds = self.grammar(texts)
            found = (odds, self.classifier(texts), (odds > 0).float(), rollout.mask.sum(1).float())
            yield rollout, dict(zip(REWARDS, (*found, -(odds - 1.5).abs()), strict=True))

    def rows(self, batches: int) -> list[list[str]]:
        """Reward, the share of it that is explained, and the ratio of each estimator to `MonteCarlo`."""
        group_size = self.sampling.completions_per_prompt
        values = {name: TokenValues() for name in REWARDS}
        gradients: dict[tuple[str, type], list[Tensor]] = {}
        for index, (rollout, rewards) in enumerate(self.rollouts(WARM_UP + batches)):
            for name, fitted in values.items():
                if index <= WARM_UP:
                    fitted.fit(vocabulary=self.policy.get_output_embeddings().weight.shape[0])
                if index < WARM_UP:
                    fitted.observe(rollout.completions, rollout.mask, rewards[name], group_size)
                else:
                    for kind, gradient in self.gradients(rollout, rewards[name], fitted.table).items():
                        gradients.setdefault((name, kind), []).append(gradient)
        found = {key: traces(torch.stack(samples)) for key, samples in gradients.items()}
        return [
            [name, f"{values[name].explained:.2f}"]
            + [ratio_with_error(found[name, kind], found[name, MonteCarlo]) for kind in SHORT]
            for name in REWARDS
        ]

    def gradients(self, rollout: Rollout, rewards: Tensor, table: Tensor | None) -> dict[type, Tensor]:
        """The gradient in all parameters of each estimator's loss, on the same rollout."""
        states = self.scorer.reference_states(rollout)
        stats = self.scorer.stats(rollout, states, table)
        parameters, found = list(self.policy.parameters()), {}
        for kind in KINDS:
            estimator, group_size = kind(), self.sampling.completions_per_prompt
            weights = estimator.weights(
                stats.detach(), rollout.mask, rewards, beta=BETA, group_size=group_size
            )
            loss = estimator.loss(stats, rollout.mask, weights, beta=BETA)
            parts = torch.autograd.grad(loss, parameters, retain_graph=True)
            found[kind] = torch.cat([part.flatten() for part in parts])
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


def trained(root: Path, stage: str, name: str | None = None) -> str:
    """The checkpoint of a stage of the demo; rloo-N is one of N steps."""
    from lit_klrb.cli.lightning import main

    def checkpoint(run: str) -> str:
        return str(root / run / "checkpoints" / "last.ckpt")

    name = name or stage
    upstream = ["--model.reference_path", checkpoint("sft")] if stage in ("dpo", "rloo") else []
    if stage == "rloo":
        steps = name.partition("-")[2]
        upstream += ["--model.policy_path", checkpoint("dpo"), "--kl.estimator", "MonteCarlo"]
        upstream += ["--kl.beta", str(BETA), "--trainer.max_steps", steps]
    where = ["--trainer.default_root_dir", str(root / name), "--trainer.enable_progress_bar", "false"]
    argv = ["fit", "--config", f"configs/demo/{stage}.yaml", *upstream, *where]
    if not Path(checkpoint(name)).exists() and main(argv):
        raise SystemExit(f"training {stage} failed: {argv}")
    return checkpoint(name)
