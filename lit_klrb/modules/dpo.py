"""Direct preference optimisation: the warm start that RLOO continues from."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, final

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.data.batches import pad
from lit_klrb.data.preferences import Preference, PreferencePair, collate_pairs
from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.preference import PreferenceLoss, check_preference_loss, preference_loss
from lit_klrb.models.generation import Rollout
from lit_klrb.models.loading import tokenizer_files
from lit_klrb.models.scoring import completion_logprobs
from lit_klrb.modules.regularised import RewardedModule
from lit_klrb.run.cache import cached, weights_digest
from lit_klrb.seeding import derive_seed

T = TypeVar("T")
# Prompts completed at a time while the pairs are made; it decides their draws, so it is not a setting.
CHUNK = 128


@final
@dataclass(kw_only=True, eq=False, repr=False)
class DPOModule(RewardedModule):
    """Raises preferred completions above rejected ones, relative to the reference.

    The pairs are the reference's own: of the completions of each prompt, the one with the largest reward
    against the one with the smallest. Or they come from a data set (`preferences` of the data module).
    The reference's completions and log-probabilities are computed once and cached on disk (in
    `LIT_KLRB_CACHE`, by default ~/.cache/lit_klrb), under a hash of model, tokenizer and data. The policy
    starts as the reference unless policy_path says otherwise.

    Args:
        beta: Inverse scale of the implicit reward beta · log(policy/reference); larger keeps the policy
            closer to the reference.
        loss: Which loss of the implicit rewards: see `preference_loss`.
        label_smoothing: Assumed share of wrong preferences, for the losses sigmoid and robust.
        length_normalised: Divide each log ratio by the number of tokens of its completion, so that length
            earns nothing.
    """

    reads = ("preferences", "prompts")

    beta: float = 0.1
    loss: PreferenceLoss = "sigmoid"
    label_smoothing: float = 0.0
    length_normalised: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_preference_loss(self.loss, self.beta, self.label_smoothing)

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The policy of policy_path, or the reference."""
        return self.load_policy()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The DPO loss of a batch of pairs, chosen completions before rejected ones."""
        rollout = Rollout(batch["tokens"], batch["attention_mask"], batch["mask"])
        log_ratio = self._logprob(self.policy, rollout) - batch["ref_logprob"]
        if self.length_normalised:
            log_ratio = log_ratio / rollout.mask.sum(1)
        chosen, rejected = log_ratio.chunk(2)
        loss, stats = preference_loss(
            chosen, rejected, beta=self.beta, kind=self.loss, label_smoothing=self.label_smoothing
        )
        metrics = {"loss": loss.detach(), "margin": stats.margin, "accuracy": stats.accuracy}
        self.log_metrics("train", metrics, batch_size=len(chosen))
        return loss

    @torch.no_grad()
    def preference_pairs(self, prompts: Sequence[list[int]]) -> list[PreferencePair]:
        """The reference's best and worst completion of each prompt.

        A prompt whose completions all have the same reward gives no pair.

        Raises:
            ConfigurationError: If there is one completion of each prompt, or no prompt gives a pair.
        """
        if self.sampling.completions_per_prompt < 2:
            raise ConfigurationError(
                "must be at least 2 for a pair, unless the data module's preferences give the pairs, got "
                f"{self.sampling.completions_per_prompt}",
                key="completions_per_prompt",
            )
        starts = range(0, len(prompts), CHUNK)
        parts = [prompts[first : first + CHUNK] for first in starts]
        key = {"prompts": prompts, "sampling": asdict(self.sampling), "stop_at_eos": self.stop_at_eos}
        drafts = self._of_reference(
            "completions",
            {**key, "seed": self.seed},
            lambda: [self._draft(part, first) for part, first in zip(with_bar(parts), starts, strict=True)],
        )
        pairs: list[PreferencePair] = []
        for part, (*tensors, ref_logprob) in zip(parts, drafts, strict=True):
            rollout = Rollout(*(tensor.to(self.device) for tensor in tensors))
            pairs += best_and_worst(part, rollout, self.rewards(rollout), ref_logprob)
        if not pairs:
            raise ConfigurationError(
                f"{self.reward_path} gives all completions of a prompt the same reward "
                f"({len(prompts)} prompts, {self.sampling.completions_per_prompt} completions each)",
                key="reward_path",
            )
        return pairs

    @torch.no_grad()
    def given_pairs(self, preferences: Sequence[Preference]) -> list[PreferencePair]:
        """Pairs of a data set as tokens; completions end with EOS and are cut after max_new_tokens.

        Args:
            preferences: Texts.
        """
        eos, length = self.tokenizer.eos_token_id, self.sampling.max_new_tokens

        def tokens(texts: list[str]) -> list[list[int]]:
            ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            return ids

        prompts, *completions = (tokens(list(texts)) for texts in zip(*preferences, strict=True))
        chosen, rejected = ([[*ids, eos][:length] for ids in column] for column in completions)
        pairs = [PreferencePair(*row, 0.0, 0.0) for row in zip(prompts, chosen, rejected, strict=True)]
        parts = [pairs[first : first + CHUNK] for first in range(0, len(pairs), CHUNK)]
        key = {"pairs": pairs, "temperature": self.sampling.temperature}
        logprobs = self._of_reference(
            "logprobs", key, lambda: [self._ref_logprobs(part) for part in with_bar(parts)]
        )
        return [
            pair._replace(chosen_ref_logprob=first, rejected_ref_logprob=second)
            for part, columns in zip(parts, logprobs, strict=True)
            for pair, first, second in zip(part, *columns.view(2, -1).tolist(), strict=True)
        ]

    def _of_reference(self, name: str, key: dict[str, Any], make: Callable[[], list[Any]]) -> list[Any]:
        """What the reference makes of the data, from disk if it was made before."""
        with self.reading_reference() as reference:
            model = {"weights": weights_digest(reference), "adapter_off": self.reference_path is None}
        return cached(name, {**key, **model, "tokenizer": tokenizer_files(self.tokenizer)}, make)

    def _draft(self, prompts: Sequence[list[int]], number: int) -> tuple[Tensor, ...]:
        """Completions of some prompts by the reference, and their log-probabilities under it."""
        batch = pad(prompts, self.tokenizer.pad_token_id, side="left")
        batch = {key: value.to(self.device) for key, value in batch.items()}
        seed = derive_seed(self.seed, "pairs", number)
        with self.reading_reference() as reference:
            rollout = self.generate(reference, batch, self.sampling, seed=seed)
            return tuple(tensor.cpu() for tensor in (*rollout, self._logprob(reference, rollout)))

    def _ref_logprobs(self, pairs: Sequence[PreferencePair]) -> Tensor:
        """Log-probabilities of chosen completions and then of rejected ones, [2B]."""
        batch = collate_pairs(pairs, self.tokenizer.pad_token_id)
        tensors = (batch[name].to(self.device) for name in ("tokens", "attention_mask", "mask"))
        with self.reading_reference() as reference:
            return self._logprob(reference, Rollout(*tensors)).cpu()

    def _logprob(self, model: Any, rollout: Rollout) -> Tensor:
        logprobs = completion_logprobs(model, rollout, self.sampling.temperature)
        return torch.where(rollout.mask, logprobs, 0.0).sum(1)


def with_bar(parts: Sequence[T]) -> Iterable[T]:
    """The parts, with a progress bar."""
    return track(parts, "preference pairs", transient=True)


def best_and_worst(
    prompts: Sequence[list[int]], rollout: Rollout, rewards: Tensor, ref_logprob: Tensor
) -> list[PreferencePair]:
    """The pair with the largest difference in reward of each prompt, where there is a difference.

    Args:
        prompts: Token ids of P prompts, unpadded.
        rollout: Their K completions each, prompt-major, [P·K].
        rewards: Of each sequence, [P·K].
        ref_logprob: Log-probability of each completion under the reference, [P·K].
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
