"""verl: a KL in the loss and in the reward, and on-policy distillation."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from ..hooks import install_plugin
from ..importing import forget, load
from ..setting import HOOK, Setting

DISTRIBUTION = "verl"


def _actor(**options: Any) -> SimpleNamespace:
    config = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss_scale_factor": None}
    config |= {"global_batch_info": {}, "loss_agg_mode": "token-mean", "strategy": "fsdp"}
    return SimpleNamespace(**config, **options, get=lambda key, default: default)


def _in_loss(algos: Any, kind: str, coefficient: float) -> Any:
    def loss(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
        return coefficient * algos.agg_loss(
            algos.kl_penalty(logprobs, ref_logprobs, kind), mask, "token-mean"
        )

    return loss


def _in_reward(algos: Any, trainer: Any, kind: str, policy_loss: str = "vanilla") -> Any:
    """`apply_kl_penalty` to rewards of 0, the advantages of RLOO, and a policy loss."""
    advantages_of = algos.get_adv_estimator_fn("rloo")

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        batch = {"response_mask": mask, "token_level_scores": torch.zeros_like(ref_logprobs)}
        batch |= {"old_log_probs": old_logprobs, "ref_log_prob": ref_logprobs}
        data = SimpleNamespace(batch=_Batch(batch))
        data, _ = trainer.apply_kl_penalty(data, SimpleNamespace(value=0.001, update=lambda **_: None), kind)
        rewards = data.batch["token_level_rewards"]
        advantages, _ = advantages_of(rewards, mask, index=np.zeros(len(mask), dtype=int), config=None)
        function = algos.get_policy_loss_fn(policy_loss)
        return function(old_logprobs, logprobs, advantages, mask, config=_actor())[0]

    return loss


class _Batch(dict[str, Tensor]):
    @property
    def batch_size(self) -> torch.Size:
        return self["response_mask"].shape[:1]


def flat(values: Tensor, mask: Tensor) -> Tensor:
    """The packed values [tokens, ...] of sequences with a prompt of one token, which predicts the first."""
    rows = [torch.cat([row[:length], row[:1]]) for row, length in zip(values, mask.sum(-1), strict=True)]
    return torch.cat(rows)


def _batch(mask: Tensor, **tensors: Tensor) -> Any:
    """The data of a batch of such sequences."""
    data = {"prompts": mask[:, :1].long(), "responses": mask.long(), "response_mask": mask}
    data |= {"attention_mask": torch.cat([torch.ones_like(mask[:, :1]), mask], 1).long(), **tensors}
    return _Data(data | {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None})


class _Data(dict[str, Any]):
    """A dictionary with the methods of a TensorDict that the losses use."""

    def select(self, *keys: str) -> "_Data":
        return self

    def to_padded_tensor(self) -> "_Data":
        return self


def _distillation(losses: Any, config: Any) -> Any:
    """`distillation_ppo_loss` with the teacher's log-probability of the sampled tokens."""

    def loss(logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
        teacher = flat(ref_logprobs, mask)[:, None]
        data = _batch(mask, teacher_logprobs=teacher, old_log_probs=old_logprobs)
        output = {"log_probs": flat(logprobs, mask)}
        return losses.distillation_loss(_actor(), config, output, data)[0]

    return loss


def _topk(losses: Any, config: Any) -> Any:
    """The same with the teacher's most likely tokens."""

    def loss(logits: Tensor, topk_logprobs: Tensor, topk_ids: Tensor, mask: Tensor) -> Tensor:
        offsets = torch.nn.functional.pad((mask.sum(-1) + 1).cumsum(0), (1, 0))

        def nested(values: Tensor) -> Tensor:
            return torch.nested.nested_tensor_from_jagged(flat(values, mask), offsets)

        data = _batch(mask, teacher_logprobs=nested(topk_logprobs), teacher_ids=nested(topk_ids))
        student = flat(logits, mask)[None]
        output = losses.compute_topk_loss(_actor(), config, data, student, "thd")
        output = {key: values[0] for key, values in output.items()}
        return losses.distillation_loss(_actor(), config, output, data)[0]

    return loss


def settings() -> Iterator[Setting]:
    """The losses of verl, and this package's, which its entry point loads with it."""
    for module in ("trainer.ppo.ray_trainer", "trainer.distillation.losses"):
        load(f"verl.{module}")
    # Now that all that it misses is stubbed, it loads its plugins once
    forget("verl")
    plugin = tempfile.TemporaryDirectory()
    install_plugin(Path(plugin.name), "verl.plugins", "verl_klrb")
    algos, trainer = load("verl.trainer.ppo.core_algos"), load("verl.trainer.ppo.ray_trainer")
    folder = Path(algos.__file__).parents[1] / "config"
    actor = yaml.safe_load((folder / "actor" / "actor.yaml").read_text("utf-8"))
    defaults = {"kl_loss_type": actor["kl_loss_type"]}
    for kind in ("low_var_kl", "low_var_kl+", "k1", "k2", "abs"):
        function = _in_loss(algos, kind, actor["kl_loss_coef"])
        called = "unbiased KL gradient estimation" if kind.endswith("+") else "KL loss"
        yield Setting("use_kl_loss", {"kl_loss_type": kind}, defaults, called, function)
    algorithm = yaml.safe_load((folder / "ppo_trainer.yaml").read_text("utf-8"))["algorithm"]
    defaults = {"kl_penalty": algorithm["kl_penalty"]}
    for kind in ("kl", "low_var_kl"):
        function = _in_reward(algos, trainer, kind)
        called = "KL penalty in the reward"
        yield Setting("use_kl_in_reward, RLOO", {"kl_penalty": kind}, defaults, called, function)
    losses = load("verl.trainer.distillation.losses")
    shipped = yaml.safe_load((folder / "distillation" / "distillation.yaml").read_text("utf-8"))[
        "distillation_loss"
    ]
    defaults = {key: shipped[key] for key in ("loss_mode", "use_policy_gradient")}
    config = load("verl.workers.config").DistillationLossConfig
    known = {key: value for key, value in shipped.items() if key in config.__dataclass_fields__}
    for mode, gradient in (
        ("k3", False),
        ("k2", False),
        ("k1", True),
        ("k3", True),
        ("forward_kl_topk", False),
    ):
        options = {"loss_mode": mode, "use_policy_gradient": gradient}
        whole = SimpleNamespace(distillation_loss=config(**known | options))
        function = (_topk if mode == "forward_kl_topk" else _distillation)(losses, whole)
        called = "forward KL" if mode == "forward_kl_topk" else "reverse KL estimator"
        yield Setting("distillation_loss", options, defaults, called, function)
    options = {"loss_mode": "completions_kl", "use_policy_gradient": False}
    whole = SimpleNamespace(distillation_loss=config(**known | options))
    yield Setting("distillation_loss", options, {}, HOOK, _distillation(losses, whole))
    function = _in_reward(algos, trainer, "kl", "prefix")
    yield Setting("use_kl_in_reward, RLOO", {"policy_loss": "prefix"}, {}, HOOK, function)
