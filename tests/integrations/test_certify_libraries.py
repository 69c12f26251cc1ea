"""`certify` on the loss functions of installed libraries, at the versions of constraints.txt."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from lit_klrb.cli.certify import has_gradient
from lit_klrb.cli.loss_roles import BoundLoss
from lit_klrb.estimators.certificate import certify
from lit_klrb.reward_functions import import_member

GKD = "trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss"
SDPO = "trl.experimental.sdpo.loss_utils:compute_divergence"
LIGER_GRPO = "liger_kernel.chunked_loss.grpo_loss:LigerFusedLinearGRPOFunction.ppo_loss_fn"
LIGER_JSD = "liger_kernel.chunked_loss.jsd_loss:LigerFusedLinearJSDFunction.distillation_loss_fn"


def certificate(name, function, **options):
    loss = BoundLoss(name, function, {}, options)
    return certify(loss, takes_mask=loss.takes_mask, takes_old=loss.takes_old)


@pytest.mark.parametrize(
    ("path", "options", "gradient", "scale", "normalisation"),
    [
        (GKD, {"beta": 1}, "kl_own_token", 1, "batch"),
        (GKD, {"beta": 0}, "reverse_own_token", 1, "batch"),
        (GKD, {"beta": 0.5}, None, None, "batch"),
        (SDPO, {"alpha": 1.0}, "kl_own_token", 1, "sum"),
        (SDPO, {"alpha": 0.0}, "reverse_own_token", 1, "sum"),
        (LIGER_GRPO, {"loss_type": "bnpo"}, "reverse_own_token", 0.04, "batch"),
        (LIGER_GRPO, {"loss_type": "bnpo", "use_bias_correction_kl": True}, "kl_own_token", 0.04, "batch"),
        (LIGER_GRPO, {"loss_type": "grpo"}, "reverse_own_token", 0.04, "length"),
        (LIGER_GRPO, {"loss_type": "dr_grpo", "max_completion_length": 8}, "reverse_own_token", 0.005, "sum"),
        (LIGER_JSD, {"beta": 1}, "kl_own_token", 1, "sum"),
        (LIGER_JSD, {"beta": 0}, "reverse_own_token", 1, "sum"),
    ],
)
def test_functions_of_trl_and_liger(monkeypatch, path, options, gradient, scale, normalisation):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    module, _, name = path.partition(":")
    if module.startswith("liger"):
        pytest.importorskip("liger_kernel", reason="it installs triton, which only its GPU kernels use")
    found = certificate(path, import_member(path, module, name), **options)
    verdict = found.on_policy
    assert (verdict.name, verdict.normalisation) == (gradient, normalisation)
    if scale is not None:
        assert verdict.scale == pytest.approx(scale, rel=1e-5)
    assert found.padding == 0
    assert found.over_batch is (path == LIGER_JSD)
    if path == LIGER_GRPO:  # the ratio corrects the token, not its prefix
        expected = "kl_own_token (given prefixes)" if "use_bias_correction_kl" in options else None
        assert found.off_policy.name == expected
    assert not has_gradient(found, "kl")


def grpo_of_trl(loss_type, corrected=True):
    """TRL's own `_compute_loss`, with given log-probabilities in place of a model's, as a user wraps it."""
    from trl import GRPOTrainer

    trainer = SimpleNamespace(
        beta=0.1, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        epsilon_low=0.2, epsilon_high=0.2, use_vllm=False, current_gradient_accumulation_steps=1,
        max_completion_length=4, aux_loss_enabled=False, _entropy_bonus_enabled=False, loss_type=loss_type,
        args=SimpleNamespace(use_bias_correction_kl=corrected, delta=None),
        model=SimpleNamespace(training=True), _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(gather=lambda values: values, reduce=lambda values, reduction: values),
    )  # fmt: skip

    def loss(per_token_logps, ref_per_token_logps, old_per_token_logps, completion_mask, advantages):
        given = per_token_logps, torch.zeros_like(per_token_logps), None
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: given
        prompt = torch.zeros(len(completion_mask), 1, dtype=torch.long)
        inputs = {
            "prompt_ids": prompt,
            "prompt_mask": prompt + 1,
            "completion_ids": completion_mask,
            "completion_mask": completion_mask,
            "advantages": advantages,
            "old_per_token_logps": old_per_token_logps,
            "ref_per_token_logps": ref_per_token_logps,
        }
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    return loss


@pytest.mark.parametrize(
    ("options", "gradient", "off_policy", "normalisation"),
    [
        ({"loss_type": "luspo"}, "kl_own_token", "kl_own_token (given prefixes)", "sum"),
        ({"loss_type": "luspo", "corrected": False}, "reverse_own_token", None, "sum"),
        ({"loss_type": "grpo"}, "kl_own_token", "kl_own_token (given prefixes)", "length"),
    ],
)
def test_the_loss_of_trls_grpo_trainer(options, gradient, off_policy, normalisation):
    found = certificate("trl", grpo_of_trl(**options))
    assert (found.on_policy.name, found.on_policy.normalisation) == (gradient, normalisation)
    assert found.on_policy.scale == pytest.approx(0.1)
    assert found.off_policy.name == off_policy
    assert found.padding == 0
