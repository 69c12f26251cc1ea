"""KL estimators in TRL's trainers: against the definition, and against TRL's own loss if it is installed."""

import pytest
import torch

from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellTopK
from lit_klrb.functional import leave_one_out_baseline
from lit_klrb.integrations import trl as adapter
from lit_klrb.models.loading import freeze, fresh_model
from lit_klrb.models.scoring import Scorer, completion_logits

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
BETA, GROUP = 0.3, 4


def models(noise=0.3):
    tokenizer = grammar_tokenizer()
    policy, reference = (fresh_model(CONFIG, tokenizer, seed=0) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return policy.eval(), freeze(reference)


def batch_of_trl(groups=3, length=5):
    """A batch in TRL's form: two prompt tokens, completions that end at different positions."""
    generator = torch.Generator().manual_seed(0)
    rows = groups * GROUP
    rewards = torch.randn(rows, generator=generator)
    ends = torch.randint(1, length + 1, (rows, 1), generator=generator)
    return rewards, {
        "prompt_ids": torch.randint(3, 90, (groups, 2), generator=generator).repeat_interleave(GROUP, 0),
        "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
        "completion_ids": torch.randint(3, 90, (rows, length), generator=generator),
        "completion_mask": (torch.arange(length) < ends).long(),
        "advantages": rewards - leave_one_out_baseline(rewards, GROUP),
    }


def gradient(model, loss):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


@pytest.mark.parametrize(
    "estimator",
    [RaoBlackwell(), MonteCarlo(), MonteCarlo(baseline=None), RaoBlackwell(off_policy="prefix"),
     RaoBlackwellTopK(k=8)],
    ids=str,
)  # fmt: skip
def test_the_loss_is_the_estimators_objective(estimator):
    policy, reference = models()
    rewards, batch = batch_of_trl()
    scorer = Scorer(policy, reference, 1.0)
    added, _ = adapter.add_weights(batch, scorer, estimator, BETA, GROUP)
    found = gradient(policy, adapter.weighted_loss(added, scorer, estimator, BETA))
    rollout = adapter.rollout_of(batch)
    stats = scorer.stats(rollout, scorer.reference_states(rollout), topk=estimator.topk)
    # Without a baseline of its own, it gets rewards from which TRL has subtracted one
    given = rewards if estimator.baseline else batch["advantages"]
    objective = estimator.objective(
        stats, rollout.mask, given, beta=BETA, group_size=GROUP, behaviour_logprobs=stats.logprobs.detach()
    )
    torch.testing.assert_close(found, gradient(policy, objective), rtol=1e-4, atol=1e-6)


def test_the_gradient_is_that_of_rloo_with_k1_in_the_reward():
    policy, reference = models()
    rewards, batch = batch_of_trl()
    scorer = Scorer(policy, reference, 1.0)
    added, _ = adapter.add_weights(batch, scorer, MonteCarlo(), BETA, GROUP)
    found = gradient(policy, adapter.weighted_loss(added, scorer, MonteCarlo(), BETA))
    rollout = adapter.rollout_of(batch)
    p, q = (
        completion_logits(m, rollout).log_softmax(-1).gather(-1, rollout.completions[..., None])[..., 0]
        for m in (policy, reference)
    )
    penalised = rewards - BETA * ((p - q) * rollout.mask).sum(1).detach()
    advantages = penalised - leave_one_out_baseline(penalised, GROUP)
    expected = gradient(policy, -(advantages * (p * rollout.mask).sum(1)).mean())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_parts_in_any_order_have_the_gradient_of_the_whole():
    policy, reference = models()
    _, batch = batch_of_trl()
    scorer, estimator = Scorer(policy, reference, 1.0), RaoBlackwell()
    added, kl = adapter.add_weights(batch, scorer, estimator, BETA, GROUP)
    whole = gradient(policy, adapter.weighted_loss(added, scorer, estimator, BETA))
    order = torch.randperm(len(batch["advantages"]), generator=torch.Generator().manual_seed(2))
    parts = [{name: value[rows] for name, value in added.items()} for rows in order.chunk(3)]
    losses = [gradient(policy, adapter.weighted_loss(part, scorer, estimator, BETA)) for part in parts]
    torch.testing.assert_close(sum(losses) / 3, whole, rtol=1e-4, atol=1e-6)
    assert kl > 0


def test_tokens_of_tools_do_not_count():
    policy, reference = models()
    _, batch = batch_of_trl()
    tools = torch.ones_like(batch["completion_mask"])
    tools[:, 1] = 0
    added, _ = adapter.add_weights(
        {**batch, "tool_mask": tools}, Scorer(policy, reference, 1.0), RaoBlackwell(), BETA, GROUP
    )
    assert added["kl_weights_score"][:, 1].eq(0).all()
    assert added["kl_weights_kl"][:, 1].eq(0).all()


class Trainer:
    """The attributes of a trainer of TRL that are checked."""

    def __init__(self, **changes):
        settings = {
            "beta": 0.1,
            "ref_model": object(),
            "model": torch.nn.Dropout(0.0),
            "num_iterations": 1,
            **changes,
        }
        processes = settings.pop("num_processes", 1)
        steps = settings.pop("steps_per_generation", 2)
        vars(self).update(settings)
        self.accelerator = type("Accelerator", (), {"num_processes": processes})
        self.args = type("Args", (), {"steps_per_generation": steps, "gradient_accumulation_steps": 2})


def test_a_trainer_that_fits_passes():
    adapter.check_trainer(Trainer(), RaoBlackwell())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "beta: must not be 0"),
        ({"ref_model": None}, "model: an adapter of peft is not supported"),
        (
            {"model": torch.nn.Sequential(torch.nn.Dropout(0.1))},
            "disable_dropout: must be true, as the policy",
        ),
        ({"num_processes": 2}, "num_processes: several processes"),
        ({"steps_per_generation": 4}, "off_policy: must not be none with 2 optimizer steps per rollout"),
        ({"num_iterations": 3}, "off_policy: must not be none with 3 optimizer steps per rollout"),
    ],
)
def test_other_trainers_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        adapter.check_trainer(Trainer(**changes), RaoBlackwell())


def step_of(kind, tmp_path, estimator=None, **settings):
    """The policy's change in one step of a trainer of TRL, with plain gradient descent."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    policy, reference = models()
    tokenizer = grammar_tokenizer()
    policy.save_pretrained(tmp_path / "policy")
    rows = datasets.Dataset.from_dict({"prompt": ["I saw", "Do not", "What a", "It was"]})
    configuration = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path / "out"), beta=BETA, num_generations=2, max_completion_length=4, max_steps=1,
        learning_rate=1.0, lr_scheduler_type="constant", optim="sgd",
        max_grad_norm=0.0, report_to=[], use_cpu=True, seed=3, save_strategy="no", bf16=False,
        disable_tqdm=True, activation_checkpointing=False, disable_dropout=True, **settings,
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")
    more = {}
    if estimator is not None:
        trainer, more = adapter.with_kl_estimator(trainer), {"kl_estimator": estimator}
    made = trainer(
        model=str(tmp_path / "policy"),
        args=configuration,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        train_dataset=rows,
        **more,
    )
    made.ref_model.load_state_dict(reference.state_dict())
    before = torch.cat([p.detach().flatten() for p in policy.parameters()])
    made.train()
    return torch.cat([p.detach().flatten() for p in made.model.parameters()]) - before


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_of_rloo_is_that_of_trl(tmp_path, accumulated):
    settings = {"gradient_accumulation_steps": accumulated, "per_device_train_batch_size": 8 // accumulated}
    theirs = step_of("RLOO", tmp_path, **settings)
    ours = step_of("RLOO", tmp_path, MonteCarlo(), **settings)
    assert theirs.norm() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
