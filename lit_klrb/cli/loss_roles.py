"""What a KL loss of other software reads, recognised by the names of its parameters."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError, brief, refusing
from lit_klrb.estimators.enumerated_loss import LossError, LossInputs


def _of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def _zeros(inputs: LossInputs) -> Tensor:
    return inputs.logits.new_zeros(len(inputs.tokens))


def _token_kl_rewards(inputs: LossInputs) -> Tensor:
    """Minus the log ratio of each token under the policy that completions are from, 0 outside the mask."""
    log_ratio = _of_tokens(inputs.old_logits, inputs.tokens) - _of_tokens(inputs.ref_logits, inputs.tokens)
    return torch.where(inputs.mask, -log_ratio, 0).detach()


# How many tokens of a teacher's head are given: all of some models, so that it shows what is left out
TEACHER_K = 3


def _teacher_head(inputs: LossInputs) -> torch.return_types.topk:
    return inputs.ref_logits.log_softmax(-1).topk(TEACHER_K)


# What a parameter can be. Rewards and advantages are 0, which leaves the part of the loss that is the KL's.
ROLES: dict[str, Callable[[LossInputs], Tensor]] = {
    "logits": lambda inputs: inputs.logits,
    "ref_logits": lambda inputs: inputs.ref_logits,
    "logprobs": lambda inputs: _of_tokens(inputs.logits, inputs.tokens),
    "ref_logprobs": lambda inputs: _of_tokens(inputs.ref_logits, inputs.tokens),
    "old_logprobs": lambda inputs: _of_tokens(inputs.old_logits, inputs.tokens),
    "all_logprobs": lambda inputs: inputs.logits.log_softmax(-1),
    "ref_all_logprobs": lambda inputs: inputs.ref_logits.log_softmax(-1),
    "tokens": lambda inputs: inputs.tokens,
    "labels": lambda inputs: torch.where(inputs.mask, inputs.tokens, -100),
    "mask": lambda inputs: inputs.mask,
    "integer_mask": lambda inputs: inputs.mask.long(),
    "rewards": _zeros,
    "advantages": _zeros,
    "token_advantages": lambda inputs: _zeros(inputs)[:, None].expand(inputs.tokens.shape),
    "kl_rewards": lambda inputs: _token_kl_rewards(inputs).sum(-1),
    "token_kl_rewards": _token_kl_rewards,
    "topk_ids": lambda inputs: _teacher_head(inputs).indices,
    "topk_logprobs": lambda inputs: _teacher_head(inputs).values,
}
# Names in TRL, verl, Liger, OpenRLHF and this package, by role
SYNONYMS = {
    "logits": "logits policy_logits student_logits",
    "ref_logits": "ref_logits reference_logits teacher_logits",
    "logprobs": "logprobs logps log_prob logprob log_probs logp policy_logprobs "
    "per_token_logps student_logps",
    "ref_logprobs": "ref_logprobs ref_logps ref_log_prob ref_logprob ref_log_probs log_probs_base ref_logp "
    "reference_logprobs ref_per_token_logps teacher_logps teacher_logprobs",
    "old_logprobs": "old_logprobs old_logps old_log_prob old_logprob old_log_probs old_logp "
    "behaviour_logprobs behavior_logprobs old_per_token_logps rollout_log_probs sampling_per_token_logps",
    "all_logprobs": "student_log_probs policy_log_probs",
    "ref_all_logprobs": "teacher_log_probs reference_log_probs",
    "tokens": "tokens token_ids completion_ids input_ids selected_token_ids responses response_ids",
    "labels": "labels target targets shift_labels",
    "mask": "mask action_mask",
    "integer_mask": "completion_mask response_mask attention_mask loss_mask full_attention_mask eos_mask",
    "rewards": "rewards reward scores",
    "advantages": "advantages advantage",
    "topk_ids": "topk_ids teacher_topk_ids teacher_topk_indices topk_indices target_token_ids",
    "topk_logprobs": "topk_logprobs teacher_topk_log_probs teacher_topk_logprobs target_logprobs",
}
ROLE_OF = {role: role for role in ROLES}
ROLE_OF |= {name: role for role, names in SYNONYMS.items() for name in names.split()}
MASKS = {"mask", "integer_mask", "labels"}


class BoundLoss:
    """A loss function with a role for each parameter.

    Args:
        name: The function's name in messages.
        function: Returns a scalar, a loss per completion [B] or per token [B, T], or a tuple whose first
            element is one of these.
        arguments: Roles by parameter, for names that are not in `SYNONYMS`.
        options: Values by parameter.

    Raises:
        ConfigurationError: If it is not a function, a required parameter has no role, or a name is unknown;
            when called, if it returns something else.
        LossError: When called, if the function raises.
    """

    def __init__(
        self, name: str, function: Any, arguments: Mapping[str, str], options: Mapping[str, Any]
    ) -> None:
        if isinstance(function, type) or not callable(function):
            raise ConfigurationError(f"{name} is not a function")
        # Some functions written in C have none
        with refusing(f"{name} has no signature: write a function that calls it", TypeError, ValueError):
            self.parameters = inspect.signature(function).parameters
        self.name, self.function, self.options = name, function, dict(options)
        self.roles = self._roles(arguments)
        self.returned = ""

    def _roles(self, arguments: Mapping[str, str]) -> dict[str, str]:
        variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        named = {key: p for key, p in self.parameters.items() if p.kind not in variable}
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        for key in [*arguments, *self.options]:
            if key not in named and not takes_all:
                raise ConfigurationError(f"has no parameter {key}; it has {', '.join(named)}", key=self.name)
        known = {key: ROLE_OF[key] for key in named if key in ROLE_OF} | dict(arguments)
        roles = {key: role for key, role in known.items() if key not in self.options}
        for key, parameter in named.items():
            if parameter.default is parameter.empty and key not in roles and key not in self.options:
                remedy = f"--option {key}=VALUE, or --argument {key}=ROLE with one of {', '.join(ROLES)}"
                raise ConfigurationError(f"the parameter {key} is not known; give it {remedy}", key=self.name)
        return roles

    @property
    def takes_mask(self) -> bool:
        """Whether a parameter is a mask."""
        return not MASKS.isdisjoint(self.roles.values())

    @property
    def takes_old(self) -> bool:
        """Whether a parameter is the log-probabilities of the policy that completions are from."""
        return "old_logprobs" in self.roles.values()

    def __call__(self, inputs: LossInputs) -> Tensor:
        """The loss of a batch, as a scalar."""
        arguments = {key: ROLES[role](inputs) for key, role in self.roles.items()} | self.options
        positional = [key for key, p in self.parameters.items() if p.kind is p.POSITIONAL_ONLY]
        first = [arguments.pop(key) for key in positional if key in arguments]
        tensors = [value for value in (*first, *arguments.values()) if isinstance(value, Tensor)]
        before = [value.detach().clone() for value in tensors]
        try:
            result = self.function(*first, **arguments)
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise LossError(f"{type(error).__name__}: {brief(error)}") from error
        if not all(map(torch.equal, before, tensors)):
            raise LossError("it changes its inputs in place, which a training step uses again")
        if isinstance(result, (tuple, list)) and result:
            result = result[0]
        return self._scalar(result, inputs)

    def _scalar(self, result: Any, inputs: LossInputs) -> Tensor:
        shape = result.shape if isinstance(result, Tensor) else None
        if not isinstance(result, Tensor) or shape not in ((), inputs.mask.shape[:1], inputs.mask.shape):
            got = type(result).__name__ if shape is None else f"shape {list(shape)}"
            batch, width = inputs.mask.shape
            shapes = f"[{batch}] or [{batch}, {width}] for {batch} completions of {width} positions"
            problem = f"must return a scalar, or a tensor of shape {shapes}, got {got}"
            raise ConfigurationError(problem, key=self.name)
        result = result.double()
        if result.ndim < 2:
            self.returned = "a scalar" if result.ndim == 0 else "a loss per completion, averaged here"
            return result.mean()
        self.returned = "a loss per token, here summed over the mask and averaged over completions"
        return torch.where(inputs.mask, result, 0).sum() / len(result)
