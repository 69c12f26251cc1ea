"""A monitor of on-policy distillation: one line for what commonly goes wrong, when it does."""

import logging
import math
from collections.abc import Iterator
from typing import Any, final

import lightning as L

from lit_klrb.errors import ConfigurationError
from lit_klrb.functional.mismatch import IMPROBABLE, PARTS

log = logging.getLogger(__name__)
# Mean length relative to the first rollout's, below and above which it is said.
COLLAPSED, INFLATED = 1 / 3, 2.0
# Share of truncated completions that is inflation, too, if the first rollout had at most half of it.
TRUNCATED = 0.9
# Mean probability of the end under the teacher, below which it is said.
END = 1e-5
# Share of tokens that equal the one two places before, from which it is said.
REPEATED = 0.5
# Shares of the KL from which improbable tokens, or a quarter of the completions, are said to dominate it.
IMPROBABLE_SHARE, PART_SHARE = 0.5, 0.8


@final
class DistillationMonitor(L.Callback):
    """Warns once when the length, the end, repetitions, improbable tokens or a part of completions go wrong.

    Runs without a reward from the command line have it. It reads the metrics that the module logs for each
    rollout: `train/length` and `train/unfinished`; and, of those that `DistillModule` adds,
    `train/end_ref_prob`, the teacher's mean probability of the token that ended a completion;
    `train/improbable`, the share of tokens with log q below -20, and `train/improbable_kl`, their share of
    the KL; `train/kl_part_1` to `train/kl_part_4`, the shares of the KL of the quarters of completions of
    eight tokens or more; `train/repeated`, the share of tokens that equal the one two places before.
    """

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._said: list[str] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Refuse modules that train on a reward, or not on completions."""
        if getattr(pl_module, "trains_on_reward", True):
            needs = f"is for training without a reward, as DistillModule's, got {type(pl_module).__name__}"
            raise ConfigurationError(f"trainer.callbacks: DistillationMonitor {needs}")

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        """Compare the tokens that end completions."""
        own = pl_module.pair.ends
        for teacher in pl_module.pair.references if pl_module.stop_at_eos else ():
            if teacher.ends and teacher.ends[0] not in own:
                name = pl_module.tokenizer.convert_ids_to_tokens(teacher.ends[0])
                self._say(
                    trainer,
                    "ends",
                    f"the teacher ends with {name} ({teacher.ends[0]}), which does not end the student's "
                    f"completions ({', '.join(map(str, own))} do): they can grow to max_new_tokens; teach "
                    "the student that end by SFT, or add it to eos_token_id in its generation_config.json",
                )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the metrics of the current rollout."""
        metrics = pl_module.experience.metrics
        self._first = self._first or {name: metrics[name] for name in ("length", "unfinished")}
        for name, line in (*_of_length(metrics, self._first), *_of_tokens(metrics)):
            self._say(trainer, name, f"step {trainer.global_step}: {line}")

    def _say(self, trainer: L.Trainer, name: str, line: str) -> None:
        """Log a line, the first time."""
        if name not in self._said:
            self._said.append(name)
            if trainer.is_global_zero:
                log.warning("%s", line)

    def state_dict(self) -> dict[str, Any]:
        """The first rollout's length and truncated share, and what was said."""
        return {"first": self._first, "said": self._said}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        self._first, self._said = state_dict["first"], state_dict["said"]


def _of_length(metrics: dict[str, float], first: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Lines on the length of completions, by name."""
    length, ratio = metrics["length"], metrics["length"] / first["length"]
    change = f"completions have {length:.1f} tokens on average, {first['length']:.1f} in the first rollout"
    if ratio <= COLLAPSED:
        yield (
            "short",
            f"{change}: the KL of whole completions is lowest for a student that ends at once, if it cannot "
            "match the teacher; begin with SFT on the teacher's texts, or with a kl.final_discount below 1",
        )
    truncated = metrics["unfinished"] >= TRUNCATED >= 2 * first["unfinished"]
    if ratio >= INFLATED or truncated:
        yield (
            "long",
            f"{change}, and {metrics['unfinished']:.0%} are truncated: the student repeats itself or does "
            "not end; compare train/end_ref_prob, and read completions (CompletionTable)",
        )


def _of_tokens(metrics: dict[str, float]) -> Iterator[tuple[str, str]]:
    """Lines on ends, repetitions, improbable tokens and positions, by name; NaN gives none."""
    if metrics.get("end_ref_prob", math.nan) < END:
        yield (
            "end",
            f"the teacher gives the ends of completions a probability of {metrics['end_ref_prob']:.1e}: it "
            "may end with another token, or read another chat template than the student",
        )
    if metrics.get("repeated", math.nan) >= REPEATED:
        yield (
            "repeated",
            f"{metrics['repeated']:.0%} of the tokens equal the one two places before: the student repeats "
            "itself, which the teacher then expects, so that the KL falls; read completions "
            "(CompletionTable), and begin with SFT on the teacher's texts",
        )
    if metrics.get("improbable_kl", math.nan) >= IMPROBABLE_SHARE:
        yield (
            "improbable",
            f"tokens with log q below {IMPROBABLE:.0f} are {metrics['improbable']:.1%} of all and "
            f"{metrics['improbable_kl']:.0%} of the KL: the teacher almost excludes them, as it does with "
            "special tokens of another format; look at which they are before tuning anything else",
        )
    for part in range(1, PARTS + 1):
        if (share := metrics.get(f"kl_part_{part}", math.nan)) >= PART_SHARE:
            yield (
                "position",
                f"quarter {part} of {PARTS} of the completions has {share:.0%} of the KL; KLMonitor writes "
                "the KL at each position",
            )
