"""Scoring: computes `TokenStats` and the policy loss from a rollout and two models."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_klrb.engine.served import ServedTeacher
from lit_klrb.estimators import LossWeights
from lit_klrb.functional import (
    TokenStats,
    TopK,
    served_stats,
    tiled_logprobs,
    tiled_policy_loss,
    tiled_token_stats,
    token_stats,
)
from lit_klrb.functional.sums import full_precision
from lit_klrb.functional.surrogate import ClipRange
from lit_klrb.models.adapters import adapter_off
from lit_klrb.models.heads import SplitModel, model_inputs, split_model
from lit_klrb.models.rollout import Rollout


def completion_logits(model: PreTrainedModel, rollout: Rollout, rows: int | None = None) -> Tensor:
    """Logits that predict the completion tokens, shape [B, T, V]; not computed for prompts."""
    length = rollout.mask.shape[1]
    logits: Tensor = model(**model_inputs(rollout), logits_to_keep=length).logits
    return logits[:, -length:, :rows]  # some models give all positions


def completion_logprobs(
    model: PreTrainedModel,
    rollout: Rollout,
    temperature: float,
    parts: SplitModel | None = None,
    tokens: Tensor | None = None,
    rows: int | None = None,
) -> Tensor:
    """Log-probabilities of the completion tokens under a model, shape [B, T], float32, differentiable.

    Args:
        model: The model.
        rollout: B sequences with T completion positions.
        temperature: The sampling temperature.
        parts: Backbone and head, which is then applied tile by tile; None computes [B, T, V] logits.
        tokens: Other tokens in place of those of the completions, n at each position, shape [B, T, n].
        rows: The first rows of the head that are the vocabulary; None for all.

    Returns:
        Log-probabilities, 0 outside the rollout's mask, in the shape of the tokens.
    """
    tokens = rollout.completions if tokens is None else tokens
    if parts is not None:
        hidden = parts.hidden_states(rollout)
        weight, bias = parts.head_weights(rows)
        settings: dict[str, Any] = {"bias": bias, "mask": rollout.mask, "logit_softcap": parts.softcap}
        return tiled_logprobs(hidden, weight, tokens, temperature=temperature, **settings)
    logprobs = (full_precision(completion_logits(model, rollout, rows)) / temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, tokens.view(*rollout.mask.shape, -1))
    return torch.where(rollout.mask[..., None], chosen, 0).view_as(tokens)


class Scorer:
    """Evaluates policy and reference on the same completions, both at the sampling temperature.

    If both models consist of a backbone and a linear head, the heads are applied tile by tile, without
    [B, T, V] logits. Otherwise the logits of both models are computed in full.

    Args:
        policy: The trained model; receives gradients.
        reference: The frozen model; the policy itself stands for it with its adapter disabled.
        temperature: The sampling temperature.
        reading_reference: A context in which `reference` is the reference; by default the one that disables
            the policy's adapter if the policy stands for it.
        teacher: A teacher in an engine of its own, which takes the reference's place.
        rows: The first rows of both heads that are the vocabulary, see `Pair`; None for all.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        reference: PreTrainedModel,
        temperature: float,
        reading_reference: Callable[[], AbstractContextManager[object]] | None = None,
        teacher: ServedTeacher | None = None,
        rows: int | None = None,
    ) -> None:
        self.policy, self.reference, self.temperature = policy, reference, temperature
        self._teacher, self._rows = teacher, rows
        own = (lambda: adapter_off(policy)) if reference is policy else nullcontext
        self._reading_reference = reading_reference or own
        self._parts = split_model(policy), split_model(reference)

    @property
    def tiled(self) -> bool:
        """Whether the tiled operations are used."""
        return None not in self._parts

    @property
    def fuses(self) -> bool:
        """Whether `loss` is available, which needs the reference's head: a served teacher has none."""
        return self.tiled and self._teacher is None

    def logprobs(self, rollout: Rollout) -> Tensor:
        """Log-probabilities of the completions under the policy alone, shape [B, T], differentiable."""
        return completion_logprobs(self.policy, rollout, self.temperature, self._parts[0], rows=self._rows)

    @torch.no_grad()
    def reference_logprobs(self, rollout: Rollout) -> Tensor:
        """Log-probabilities of the completions under the reference, shape [B, T], without a gradient."""
        with self._reading_reference():
            return completion_logprobs(
                self.reference, rollout, self.temperature, self._parts[1], rows=self._rows
            )

    @torch.no_grad()
    def reference_states(self, rollout: Rollout) -> Tensor:
        """The reference's part of the computation, stored for as long as the rollout is used.

        The rollout is that after the prompts that the reference reads.

        Returns:
            Hidden states [B, T, D], V / D times smaller than logits; logits [B, T, V] if `tiled` is false. Of
            a served teacher its answer, see `ServedTeacher`.
        """
        if self._teacher is not None:
            return self._teacher(rollout)
        _, split = self._parts
        with self._reading_reference():
            if split is None or not self.tiled:
                return completion_logits(self.reference, rollout, self._rows)
            return split.hidden_states(rollout)

    def stats(
        self,
        rollout: Rollout,
        reference_states: Tensor,
        token_values: Tensor | None = None,
        topk: TopK | None = None,
        jsd_weight: float | None = None,
    ) -> TokenStats:
        """Token statistics, differentiable with respect to the policy.

        Args:
            rollout: B sequences with T completion positions.
            reference_states: The result of `reference_states` for these sequences.
            token_values: A value for every token, shape [V].
            topk: The head of the vocabulary for which sums are computed; a served teacher gives its own.
            jsd_weight: That of `token_stats`.
        """
        if self._teacher is not None:
            tokens, ref_logprobs = reference_states[..., 0, :].long(), reference_states[..., 1, :]
            chosen = completion_logprobs(self.policy, rollout, self.temperature, self._parts[0], tokens)
            return served_stats(chosen, ref_logprobs, tokens)
        if not self.tiled:
            logits = completion_logits(self.policy, rollout, self._rows)
            settings = self.temperature, token_values, topk, jsd_weight
            return token_stats(logits, reference_states, rollout.completions, *settings)
        arguments = self._tiled_arguments(rollout, reference_states) | {"mask": rollout.mask}
        return tiled_token_stats(**arguments, token_values=token_values, topk=topk, jsd_weight=jsd_weight)

    def loss(
        self,
        rollout: Rollout,
        reference_states: Tensor,
        weights: LossWeights,
        behaviour_logprobs: Tensor | None = None,
        clip_range: ClipRange | None = None,
        token_values: Tensor | None = None,
        topk: TopK | None = None,
        jsd_weight: float | None = None,
    ) -> Tensor:
        """The loss of a fusable estimator, whose gradients are computed in the forward pass; see `fuses`.

        Args:
            rollout: B sequences with T completion positions.
            reference_states: The result of `reference_states` for these sequences.
            weights: The rows of `KLEstimator.weights(...)` for these sequences.
            behaviour_logprobs: Log-probabilities under the policy that sampled the completions, shape [B, T].
            clip_range: The range of the ratio to that policy, see `clipped_loss`; the ratio then replaces the
                log-probability. None for no clipping, which ignores that policy.
            token_values: The token values that the weights were computed with, shape [V]; None without.
            topk: The head of `kl_topk`; None for the exact KL.
            jsd_weight: That of `tiled_policy_loss`.
        """
        loss, _ = tiled_policy_loss(
            **self._tiled_arguments(rollout, reference_states),
            mask=rollout.mask,
            score_weights=weights.score,
            kl_weights=weights.kl,
            behaviour_logprobs=None if clip_range is None else behaviour_logprobs,
            clip_range=clip_range,
            token_values=token_values,
            value_weights=weights.value,
            topk=topk,
            jsd_weight=jsd_weight,
        )
        return loss

    def _tiled_arguments(self, rollout: Rollout, reference_states: Tensor) -> dict[str, Any]:
        policy, reference = self._parts
        assert policy is not None
        assert reference is not None
        hidden = policy.hidden_states(rollout)
        (weight, bias), (ref_weight, ref_bias) = (
            part.head_weights(self._rows) for part in (policy, reference)
        )
        return {
            "hidden": hidden,
            "weight": weight,
            "bias": bias,
            "logit_softcap": policy.softcap,
            "ref_hidden": reference_states,
            "ref_weight": ref_weight,
            "ref_bias": ref_bias,
            "ref_logit_softcap": reference.softcap,
            "tokens": rollout.completions,
            "temperature": self.temperature,
        }
