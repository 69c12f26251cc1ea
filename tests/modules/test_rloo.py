"""The training step, compared with the estimators' definitions on full logits."""

import pytest
import torch
from single_steps import attached

from lit_klrb import estimators
from lit_klrb.callbacks import KLEstimatorCallback
from lit_klrb.errors import ConfigurationError
from lit_klrb.functional import token_stats
from lit_klrb.models.heads import SplitModel
from lit_klrb.modules import RLOOModule
from lit_klrb.rollouts import scoring
from lit_klrb.rollouts.scoring import completion_logits

RIGHT = [
    ("MonteCarlo", "none"),
    ("MonteCarlo", "clip"),
    ("MonteCarlo", "prefix"),
    ("RaoBlackwell", "none"),
    ("RaoBlackwell", "clip"),
    ("RaoBlackwell", "sequence"),
    ("RaoBlackwellLite", "none"),
    ("RaoBlackwellControlVariate", "none"),
    ("ReleasedRaoBlackwell", "clip"),
    ("RaoBlackwellTopK", "clip"),
    ("RaoBlackwellTopK", "prefix"),
    ("NoKL", "none"),
    ("jsd", "none"),
    ("jsd", "prefix"),
    ("forward", "clip"),
]


def gradients_of(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "off_policy"), RIGHT)
def test_a_step_has_the_gradient_of_the_objective_on_whole_logits(chain, tmp_path, name, off_policy):
    settings = {"k": 3, "allow_biased": True} if "TopK" in name else {}
    if name in ("jsd", "forward"):
        name, settings = "RaoBlackwell", {"divergence": name}
    estimator = getattr(estimators, name)(off_policy=off_policy, **settings)
    module, batch = attached(chain, tmp_path, estimator)
    module.training_step(batch, 0).backward()
    stepped = gradients_of(module)
    assert all(key.startswith("policy.") for key in stepped)
    assert len(stepped) == len(list(module.policy.parameters()))
    module.zero_grad()

    experience = module.experience
    rollout = experience.rollout
    with torch.no_grad():
        ref_logits = completion_logits(module.reference, rollout)
    logits = completion_logits(module.policy, rollout)
    sums = {"topk": estimator.topk, "jsd_weight": estimator.reads_jsd}
    stats = token_stats(logits, ref_logits, rollout.completions, **sums)
    loss = estimator.objective(
        stats,
        rollout.mask,
        module.pair.rewards(module.reward, rollout, batch),
        beta=0.3,
        group_size=3,
        behaviour_logprobs=stats.logprobs.detach(),
    )
    loss.backward()
    expected = gradients_of(module)
    module.zero_grad()
    module.policy_loss(experience).backward()  # as in later inner steps
    for key, gradient in expected.items():
        for got in (stepped, gradients_of(module)):
            assert (got[key] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-5, key
    assert max(gradient.abs().max() for gradient in stepped.values()) > 1e-3


@pytest.mark.parametrize(("off_policy", "inner_epochs"), [("none", 1), ("clip", 2), ("prefix", 2)])
def test_every_forward_pass_reads_the_head_of_the_estimator(
    chain, tmp_path, monkeypatch, off_policy, inner_epochs
):
    """Statistics without a head would be those of RaoBlackwell, whose gradient is nearly the same."""
    estimator = estimators.RaoBlackwellTopK(k=3, off_policy=off_policy)
    module, batch = attached(chain, tmp_path, estimator, inner_epochs=inner_epochs)
    read = []
    for name in ("tiled_token_stats", "tiled_policy_loss"):
        original = getattr(scoring, name)

        def recorded(*args, original=original, **options):
            read.append(options["topk"])
            return original(*args, **options)

        monkeypatch.setattr(scoring, name, recorded)
    for step in range(inner_epochs):
        module.training_step(batch, step).backward()
    assert read == [estimator.topk] * inner_epochs


def test_the_ratio_is_one_at_the_first_inner_step_whatever_the_dropout(chain, tmp_path):
    module, batch = attached(chain, tmp_path, estimators.RaoBlackwell(off_policy="clip"))
    for part in module.policy.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    module.on_train_start()
    module.training_step(batch, 0)
    experience = module.experience
    stats = module.pair.scorer.stats(experience.rollout, experience.reference_states)
    assert torch.equal(stats.logprobs.detach(), experience.behaviour_logprobs)


@pytest.mark.parametrize(("mini_batches", "expected"), [(1, [1, 1]), (2, [2, 1, 1, 1])])
def test_forward_passes_of_the_policy(chain, tmp_path, monkeypatch, mini_batches, expected):
    """The first step on a whole rollout has the forward pass of its statistics."""
    module, batch = attached(
        chain, tmp_path, estimators.RaoBlackwell(off_policy="clip"), inner_epochs=2, mini_batches=mini_batches
    )
    passes, hidden_states = [], SplitModel.hidden_states

    def counted(self, rollout):
        passes.append(self.backbone is module.policy.base_model)
        return hidden_states(self, rollout)

    monkeypatch.setattr(SplitModel, "hidden_states", counted)
    for step, count in enumerate(expected):
        passes.clear()
        module.training_step(batch, step).backward()
        assert sum(passes) == count


def test_inner_epochs_use_one_rollout_and_mini_batches_share_it_out(chain, tmp_path):
    module, batch = attached(chain, tmp_path, estimators.MonteCarlo(), inner_epochs=2, mini_batches=2)
    assert module.steps_per_batch == 4
    module.training_step(batch, 0)
    first = module.experience
    for step in (1, 2, 3):
        module.training_step(batch, step)
        assert module.experience is first
    module.training_step(batch, 4)
    assert module.experience is not first
    halves = [first.part(index, 2) for index in (0, 1)]
    assert [len(half.rewards) for half in halves] == [6, 6]
    assert torch.equal(torch.cat([half.weights.score for half in halves]), first.weights.score)


def test_rollouts_are_addressed_by_seed_and_number(chain, tmp_path):
    module, batch = attached(chain, tmp_path, estimators.MonteCarlo(), seed=5)
    tokens = []
    for number in (0, 0, 1):
        module.training_step(batch, number)
        tokens.append(module.experience.rollout.tokens)
    assert torch.equal(tokens[0], tokens[1])
    assert tokens[0].shape != tokens[2].shape or not torch.equal(tokens[0], tokens[2])


def test_a_checkpoint_holds_the_policy_and_never_the_reference(chain):
    saved = torch.load(chain.checkpoint("rloo"), weights_only=True)
    assert saved["state_dict"]
    assert all(key.startswith("policy.") for key in saved["state_dict"])
    module = RLOOModule.load_from_checkpoint(chain.checkpoint("rloo"))
    assert not hasattr(module, "reference")
    for key, value in module.state_dict().items():
        assert torch.equal(value, saved["state_dict"][key])


def test_any_number_of_processes_evaluates_a_checkpoint_and_as_many_as_before_resume_it(
    chain, tmp_path, capsys
):
    saved = torch.load(chain.checkpoint("rloo"), weights_only=True)
    saved["experience"] *= 2
    path = str(tmp_path / "two.ckpt")
    torch.save(saved, path)
    assert chain.run("validate", "rloo", "--ckpt_path", path, run=tmp_path / "run") == 0
    assert chain.run("fit", "rloo", "--ckpt_path", path, run=tmp_path / "run") == 2
    assert "saved by 2 processes" in capsys.readouterr().err


def test_the_policy_trains_and_the_reference_does_not(chain, tmp_path):
    module, _ = attached(chain, tmp_path, estimators.MonteCarlo())
    assert not any(p.requires_grad for p in module.reference.parameters())
    assert not module.reference.training
    trained = {
        id(p) for group in module.configure_optimizers()["optimizer"].param_groups for p in group["params"]
    }
    assert trained == {id(p) for p in module.policy.parameters()}


def test_the_callback_refuses_what_is_known_wrong_and_a_second_estimator(chain, tmp_path):
    with pytest.raises(ValueError, match="K1Loss is refused for training"):
        KLEstimatorCallback(estimators.K1Loss(), 0.1)
    module, _ = attached(chain, tmp_path, estimators.MonteCarlo())
    with pytest.raises(ConfigurationError, match="plug in one only"):
        KLEstimatorCallback(estimators.K1Loss(allow_biased=True), 0.1).setup(module.trainer, module, "fit")
    other = KLEstimatorCallback(module.kl_estimator, 0.7)
    other.setup(module.trainer, module, "fit")
    assert module.beta == 0.7
