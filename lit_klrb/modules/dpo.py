"""Direct preference optimisation, the warm start of RLOO."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, final

import torch
from rich.progress import track
from torch import Tensor

from lit_klrb.data.batches import pad
from lit_klrb.data.prompts import PreferencePair, Prompt, collate_pairs
from lit_klrb.distributed import gather_rows, rank_slice
from lit_klrb.errors import ConfigurationError, check_positive
from lit_klrb.estimators.token_values import TokenValues
from lit_klrb.functional.preference import preference_loss
from lit_klrb.models.loading import GRAMMAR, ITSELF, TOKEN_VALUES_KEY, tokenizer_files
from lit_klrb.models.rollout import Rollout
from lit_klrb.modules.regularised import RegularisedModule
from lit_klrb.run.cache import cached, weights_digest
from lit_klrb.seeding import derive_seed

T = TypeVar("T")
# Prompts per batch when pairs are sampled. Not a setting, as the sampled completions depend on it.
PROMPTS_PER_BATCH = 128
# Prompts whose rewards are predicted at a time, by token values fitted to those before them.
PROMPTS_PER_PREDICTION = 32


@final
@dataclass(kw_only=True, eq=False, repr=False)
class DPOModule(RegularisedModule):
    """Trains the policy to prefer chosen over rejected completions, relative to the reference.

    Pairs consist of the completions with the largest and the smallest reward among those that the reference
    samples for a prompt, or they come from a data set (`preferences` of the data module). The reference's
    completions and log-probabilities are computed once and cached on disk (in `LIT_KLRB_CACHE`, by default
    ~/.cache/lit_klrb), under a hash of model, tokenizer and data. The initial policy is the reference unless
    policy_path is given.

    The completions that the pairs are chosen from also tell how the reward depends on single tokens: token
    values are fitted to their rewards and saved in the checkpoint, and RLOO starts from them.

    Args:
        beta: Scale of the implicit reward beta · log(policy/reference); larger values keep the policy closer
            to the reference.
    """

    shards = True
    reads = ("preferences", "prompts")

    reward_path: str | dict[str, float] = GRAMMAR
    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        # Token values that predict the rewards of the reference's completions; None for given pairs.
        self.token_value_table: Tensor | None = None
        check_positive(beta=self.beta)
        if self.reference_path == ITSELF:
            problem = f"{ITSELF} is not supported by DPOModule, whose reference is fixed"
            raise ConfigurationError(f"{problem}; a folder of that name is ./{ITSELF}", key="reference_path")

    def setup(self, stage: str) -> None:
        """Check that pairs can be made, if the data do not have them."""
        super().setup(stage)
        if stage == "fit" and getattr(self.trainer.datamodule, "preferences", "") is None:  # type: ignore[attr-defined]
            self._check_pairs()

    def _check_pairs(self) -> None:
        if (count := self.completions_per_prompt) < 2:
            problem = f"must be at least 2 unless the data module has preferences, got {count}"
            raise ConfigurationError(problem, key="completions_per_prompt")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The DPO loss of a batch of pairs: all chosen completions, then all rejected ones."""
        rollout = Rollout(batch["tokens"], batch["attention_mask"], batch["mask"])
        log_ratio = self.pair.scorer.logprobs(rollout).sum(1) - batch["ref_logprob"]
        chosen, rejected = log_ratio.chunk(2)
        loss, stats = preference_loss(chosen, rejected, beta=self.beta)
        metrics = {"loss": loss.detach(), "margin": stats.margin, "accuracy": stats.accuracy}
        self.log_metrics("train", metrics, batch_size=len(chosen))
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the token values."""
        super().on_save_checkpoint(checkpoint)
        checkpoint[TOKEN_VALUES_KEY] = self.token_value_table

    @torch.no_grad()
    def preference_pairs(self, prompts: Sequence[Prompt]) -> list[PreferencePair]:
        """The reference's completions with the largest and the smallest reward for each prompt.

        Prompts whose completions all have the same reward are skipped.

        Raises:
            ConfigurationError: If completions_per_prompt is 1, or all prompts are skipped.
        """
        self._check_pairs()
        starts = range(0, len(prompts), PROMPTS_PER_BATCH)
        tokens = [prompt.tokens for prompt in prompts]
        parts = [tokens[first : first + PROMPTS_PER_BATCH] for first in starts]
        settings = {
            "sampling": asdict(self.sampling),
            "stop_at_eos": self.stop_at_eos,
            "ends": self.pair.ends,
        }
        key = {"prompts": tokens, **settings}

        def complete() -> list[Any]:
            return [self._complete(part, first) for part, first in zip(with_bar(parts), starts, strict=True)]

        completed = self._cached_for_reference("completions", {**key, "seed": self.seed}, complete)
        pairs: list[PreferencePair] = []
        scored: list[tuple[Rollout, Tensor]] = []
        for part, first, (*tensors, ref_logprob) in zip(parts, starts, completed, strict=True):
            rollout = Rollout(*(tensor.to(self.device) for tensor in tensors))
            rows = [prompt.columns for prompt in prompts[first : first + len(part)]]
            scored.append((rollout, self.pair.rewards(self.reward, rollout, {"rows": rows})))
            pairs += best_and_worst(part, *scored[-1], ref_logprob)
        self._fit_token_values(scored)
        if not pairs:
            problem = f"{self.reward_path} gives all completions of a prompt the same reward"
            counts = f"{len(prompts)} prompts, {self.sampling.completions_per_prompt} completions each"
            raise ConfigurationError(f"{problem} ({counts})", key="reward_path")
        return pairs

    @torch.no_grad()
    def given_pairs(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """The pairs of a data set with the reference's log-probabilities."""
        starts = range(0, len(pairs), PROMPTS_PER_BATCH)
        parts = [pairs[first : first + PROMPTS_PER_BATCH] for first in starts]
        key = {"pairs": pairs, "temperature": self.sampling.temperature}
        logprobs = self._cached_for_reference(
            "logprobs", key, lambda: [self._ref_logprobs(part) for part in with_bar(parts)]
        )
        return [
            pair._replace(chosen_ref_logprob=first, rejected_ref_logprob=second)
            for part, columns in zip(parts, logprobs, strict=True)
            for pair, first, second in zip(part, *columns.view(2, -1).tolist(), strict=True)
        ]

    def _fit_token_values(self, scored: Sequence[tuple[Rollout, Tensor]]) -> None:
        group_size = self.sampling.completions_per_prompt
        rows = PROMPTS_PER_PREDICTION * group_size
        columns = ((rollout.completions, rollout.mask, rewards) for rollout, rewards in scored)
        parts = [part for tensors in columns for part in zip(*(t.split(rows) for t in tensors), strict=True)]
        values = TokenValues.of_completions(parts, group_size, self.pair.vocabulary_size)
        if values.explained > 0:
            self.token_value_table = values.table
            self.print(
                f"token values explain {values.explained:.0%} of the variance of a prompt's rewards; RLOO "
                "starts from them"
            )

    def _cached_for_reference(
        self, name: str, key: dict[str, Any], compute: Callable[[], list[Any]]
    ) -> list[Any]:
        """The result of a computation with the reference, from the cache on disk if it is there."""
        with self.pair.reading_reference() as reference:
            model = {"weights": weights_digest(reference), "adapter_off": self.reference_path is None}
        key = {**key, **model, "tokenizer": tokenizer_files(self.tokenizer)}
        with self.computing():  # the trainer asks for its data outside of a step
            return cached(name, {**key, "precision": self.trainer.precision}, compute)

    def _complete(self, prompts: Sequence[list[int]], number: int) -> tuple[Tensor, ...]:
        """Completions of some prompts by the reference, and their log-probabilities under it."""
        batch = pad(prompts, self.tokenizer.pad_token_id, side="left")
        part, own = rank_slice(len(prompts))
        batch = {key: value[part].to(self.device) for key, value in batch.items()}
        seed, count = derive_seed(self.seed, "pairs", number), self.sampling.completions_per_prompt
        rollout = self.pair.sample(
            batch, self.sampling, seed=seed, rows_before=part.start * count, of_reference=True
        )
        logprobs = self.pair.scorer.reference_logprobs(rollout).sum(1)
        return tuple(gather_rows(tensor[: own * count].cpu()) for tensor in (*rollout[:3], logprobs))

    def _ref_logprobs(self, pairs: Sequence[PreferencePair]) -> Tensor:
        """Log-probabilities of the chosen, then of the rejected completions, shape [2B]."""
        batch = collate_pairs(pairs, self.tokenizer.pad_token_id)
        part, own = rank_slice(len(batch["tokens"]))
        tensors = (batch[name][part].to(self.device) for name in ("tokens", "attention_mask", "mask"))
        return gather_rows(self.pair.scorer.reference_logprobs(Rollout(*tensors)).sum(1).cpu()[:own])


def with_bar(parts: Sequence[T]) -> Iterable[T]:
    """Iterate over the parts with a progress bar."""
    return track(parts, "preference pairs", transient=True)


def best_and_worst(
    prompts: Sequence[list[int]], rollout: Rollout, rewards: Tensor, ref_logprob: Tensor
) -> list[PreferencePair]:
    """The pair with the largest difference in reward for each prompt; prompts with equal rewards are skipped.

    Args:
        prompts: Token ids of P prompts, without padding.
        rollout: K completions of each prompt, prompt-major.
        rewards: Reward of each completion, shape [P·K].
        ref_logprob: Log-probability of each completion under the reference, shape [P·K].
    """
    grouped = rewards.view(len(prompts), -1)
    first_row = torch.arange(len(prompts), device=rewards.device) * grouped.shape[1]
    best, worst = (first_row + grouped.argmax(1)).tolist(), (first_row + grouped.argmin(1)).tolist()
    return [
        PreferencePair(
            prompt,
            chosen=rollout.completions[chosen][rollout.mask[chosen]].tolist(),
            rejected=rollout.completions[rejected][rollout.mask[rejected]].tolist(),
            chosen_ref_logprob=ref_logprob[chosen].item(),
            rejected_ref_logprob=ref_logprob[rejected].item(),
        )
        for prompt, chosen, rejected in zip(prompts, best, worst, strict=True)
        if rewards[chosen] > rewards[rejected]
    ]
