"""A step of TRL's trainers with a KL estimator, against TRL's own step."""

import os
import re
from pathlib import Path

import pytest
import torch
import trl
from test_trl_adapter import BETA, KEPT, batch_of_trl, in_two_processes, models
from torch import distributed

from lit_klrb import terminal
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellControlVariate, RaoBlackwellLoss
from lit_klrb.integrations import trl as adapter
from lit_klrb.integrations.trl_batches import rollout_of
from lit_klrb.rollouts.scoring import Scorer, completion_logits

DEFAULTS = object()
OF_ONE_LENGTH = ["I saw", "Do not", "What a", "It was"]


def assert_same_step(step, expected):
    """Up to the rounding of bfloat16, in which the two round different numbers."""
    assert expected.norm() > 0.1
    assert (step - expected).norm() < 0.04 * expected.norm()


def step_of(*arguments, **settings):
    """The change of the trained weights in one step of a trainer of TRL, with plain gradient descent."""
    made = trainer_of(*arguments, **settings)
    trained = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    before = [parameter.detach().clone() for parameter in trained.values()]
    KEPT.append(made)
    made.train()
    changes = [(p.detach() - b).flatten() for p, b in zip(trained.values(), before, strict=True)]
    return torch.cat(changes)


def trainer_of(kind, folder, estimator=None, lora=None, prompts=OF_ONE_LENGTH, **settings):
    """A trainer of TRL whose policy is not its reference.

    Args:
        kind: RLOO, GRPO or Distillation.
        folder: Where to write.
        estimator: Ours, `DEFAULTS` for that of the adapter; None for TRL's own loss.
        lora: "new" for a new adapter, "continued" for one whose training continues.
        prompts: The data.
        settings: Further settings.
    """
    import datasets

    policy, reference = models()
    if not (folder / "policy").exists():
        policy.save_pretrained(folder / "policy")
    arguments = {
        "output_dir": str(folder / "out"), "beta": BETA, "num_generations": 2, "max_completion_length": 4,
        "max_steps": 1, "learning_rate": 1.0, "lr_scheduler_type": "constant", "optim": "sgd",
        "max_grad_norm": 0.0, "report_to": [], "use_cpu": True, "seed": 3, "save_strategy": "no",
        "disable_tqdm": True, "disable_dropout": True,
        "ddp_backend": "gloo" if "WORLD_SIZE" in os.environ else None,
    } | settings  # fmt: skip
    given = {"reward_funcs": lambda completions, **_: [float(len(c)) for c in completions]}
    if kind == "Distillation":
        del arguments["num_generations"]
        given = {"teacher_model": reference.train()}  # with dropout, which must be switched off
    trainer = getattr(trl, f"{kind}Trainer")
    if estimator is not None:
        trainer = adapter.with_kl_estimator(trainer)
        given |= {} if estimator is DEFAULTS else {"kl_estimator": estimator}
    if lora is not None:
        import peft

        config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        given |= {} if lora == "continued" else {"peft_config": config}
    made = trainer(
        model=peft.get_peft_model(policy, config) if lora == "continued" else str(folder / "policy"),
        args=getattr(trl, f"{kind}Config")(**arguments),
        processing_class=grammar_tokenizer(),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        eval_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        **given,
    )
    if lora is None and kind != "Distillation":
        made.ref_model.load_state_dict(reference.state_dict())
    trained = {name: p for name, p in made.model.named_parameters() if p.requires_grad}
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in trained.items():
            if lora is not None:  # away from the reference, which is the adapter's start, or no adapter
                assert ".default." in name
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 8},
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
        {"lora": "new", "per_device_train_batch_size": 8},
        {"lora": "continued", "per_device_train_batch_size": 8},
    ],
    ids=str,
)
def test_a_step_of_rloo_is_that_of_trl(tmp_path, settings):
    theirs = step_of("RLOO", tmp_path, **settings)
    ours = step_of("RLOO", tmp_path, MonteCarlo(), **settings)
    assert_same_step(ours, theirs)


def test_padding_before_a_prompt_does_not_change_log_probabilities():
    policy, reference = models()
    scorer, (_, batch) = Scorer(policy, reference, 1.0), batch_of_trl()
    found = scorer.stats(rollout := rollout_of(batch), scorer.reference_states(rollout))
    padded = batch | {
        "prompt_ids": torch.nn.functional.pad(batch["prompt_ids"], (3, 0)),
        "prompt_mask": torch.nn.functional.pad(batch["prompt_mask"], (3, 0)),
    }
    stats = scorer.stats(rollout := rollout_of(padded), scorer.reference_states(rollout))
    mask = rollout.mask
    torch.testing.assert_close(stats.logprobs[mask], found.logprobs[mask])
    # As TRL calls it, without position ids, GPT-2 counts the padding
    tokens, kept = (torch.cat([padded[f"prompt_{k}"], padded[f"completion_{k}"]], 1) for k in ("ids", "mask"))
    theirs = policy(tokens, attention_mask=kept).logits[:, 4:-1].log_softmax(-1)
    theirs = theirs.gather(-1, padded["completion_ids"][..., None])[..., 0]
    assert (theirs - found.logprobs)[mask].abs().max() > 0.1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [None, "new"])
def test_a_step_of_distillation_with_the_token_level_loss_is_that_of_trl(tmp_path, lora):
    settings = {"beta": 1.0, "per_device_train_batch_size": 4, "lora": lora}
    theirs = step_of("Distillation", tmp_path, **settings)
    ours = step_of("Distillation", tmp_path, RaoBlackwellLoss(baseline=None, allow_biased=True), **settings)
    # TRL's loss is a mean over tokens, of which each completion has 4
    assert_same_step(ours, 4 * theirs)
    other = step_of("Distillation", tmp_path, RaoBlackwell(baseline=None), **settings)
    assert (other - ours).norm() > 0.1 * ours.norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("beta", "divergence", "factor"),
    [
        (0.0, {"divergence": "forward"}, 1.0),
        (0.0, {"forward_share": 1.0}, 1.0),
        (0.25, {"divergence": "jsd", "jsd_weight": 0.75}, 0.25 * 0.75),
    ],
)
def test_a_step_of_distillation_with_another_divergence_is_that_of_trl(tmp_path, beta, divergence, factor):
    """TRL's beta is the teacher's weight in the mixture, and its divergence lacks the normalisation."""
    settings = {"per_device_train_batch_size": 4}
    theirs = step_of("Distillation", tmp_path, beta=beta, **settings)
    own_token = RaoBlackwell(baseline=None, discount=0.0, allow_biased=True, **divergence)
    ours = step_of("Distillation", tmp_path, own_token, beta=1.0, **settings)
    assert theirs.norm() > 0.1
    assert_same_step(factor * ours, 4 * theirs)


@pytest.mark.filterwarnings("ignore")
def test_distillation_without_an_estimator_begins_with_the_own_tokens_credit(tmp_path, capsys):
    settings = {"beta": 1.0, "per_device_train_batch_size": 4}
    step = step_of("Distillation", tmp_path, DEFAULTS, **settings)
    assert "the discount increases from 0 to 1 over the run" in capsys.readouterr().out
    assert KEPT[-1].kl_memory.estimator == RaoBlackwell(baseline=None, discount=0.0)
    assert KEPT[-1].kl_memory.finals == {"discount": 1}
    own = step_of("Distillation", tmp_path, RaoBlackwellLoss(baseline=None, allow_biased=True), **settings)
    torch.testing.assert_close(step, own)
    step_of("RLOO", tmp_path, DEFAULTS, per_device_train_batch_size=8)
    assert KEPT[-1].kl_memory.estimator == RaoBlackwellControlVariate()
    assert KEPT[-1].kl_memory.finals == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [("RLOO", {}), ("RLOO", {"num_generations_eval": 1}), ("GRPO", {}), ("Distillation", {"beta": 1.0})],
    ids=str,
)
def test_an_evaluation_logs_what_training_minimises(tmp_path, monkeypatch, kind, settings):
    """beta KL less the reward, the KL from plain logits; nothing is remembered, and no graph is kept."""
    settings |= {"per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 1}
    made, batches, losses = trainer_of(kind, tmp_path, DEFAULTS, **settings), [], []
    score, compute = adapter.score_rollout, adapter.loss_of

    def scored(trainer, batch):
        batches.append((trainer.model.training, batch))
        return score(trainer, batch)

    def computed(*arguments):
        losses.append(compute(*arguments))
        return losses[-1]

    monkeypatch.setattr(adapter, "score_rollout", scored)
    monkeypatch.setattr(adapter, "loss_of", computed)
    made.train()
    seen = made.kl_memory.state_dict().get("token_values", {"lengths": torch.empty(4)})["lengths"]
    assert len(seen) == 4  # the completions that it was trained on
    assert made.kl_token_values is None  # those of the rollout of training, of which more steps may follow
    assert [loss.requires_grad for loss in losses] == [training for training, _ in batches]
    (logged,) = (entry for entry in made.state.log_history if "eval_loss" in entry)
    kls, rewards = [], []
    reference = made.teacher_model if kind == "Distillation" else made.ref_model
    for training, batch in batches:
        if not training:
            rollout = rollout_of(batch)
            p, q = (completion_logits(m, rollout).log_softmax(-1) for m in (made.model, reference))
            kls.append(((p.exp() * (p - q)).sum(-1) * rollout.mask).sum(1))
            texts = grammar_tokenizer().batch_decode(batch["completion_ids"], skip_special_tokens=True)
            rewards += [float(len(text)) for text in texts]
    kl, beta = torch.cat(kls).mean().item(), made.args.beta
    assert logged["eval_kl_per_sequence"] == pytest.approx(kl, rel=0.02)
    reward = 0.0 if kind == "Distillation" else sum(rewards) / len(rewards)
    assert logged["eval_loss"] == pytest.approx(beta * kl - reward, rel=0.02)


def save_steps(arguments):
    """The steps of TRL and of this package in one of two processes."""
    rank, _, folder, kind, estimators, settings = arguments
    torch.set_num_threads(1)
    for name, estimator in estimators.items():
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._reset_state()
        step = step_of(kind, folder, estimator, **settings)
        assert distributed.get_world_size() == 2
        torch.save(step, folder / f"{name}_{rank}.pt")
    return 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "settings", "estimator", "scale"),
    [
        # Three groups of two completions: the processes share the second
        ("RLOO", {"per_device_train_batch_size": 3, "lora": "new"}, MonteCarlo(), 1),
        (
            "Distillation",
            {"per_device_train_batch_size": 2, "beta": 1.0},
            RaoBlackwellLoss(baseline=None, allow_biased=True),
            4,
        ),
    ],
    ids=str,
)
def test_a_step_in_two_processes_is_that_of_trl(tmp_path, kind, settings, estimator, scale):
    estimators = {"theirs": None, "ours": estimator}
    models()[0].save_pretrained(tmp_path / "policy")  # by one process
    in_two_processes(save_steps, tmp_path, tmp_path, kind, estimators, settings)
    theirs, ours, same = (torch.load(tmp_path / f"{name}.pt") for name in ("theirs_0", "ours_0", "ours_1"))
    assert_same_step(ours, scale * theirs)
    assert torch.equal(ours, same)


@pytest.mark.filterwarnings("ignore")
def test_the_example_of_the_documentation_takes_the_tiled_path(tmp_path, monkeypatch, capsys):
    """Unchanged, at TRL's defaults: in bfloat16, with gradient checkpointing."""
    page = Path(__file__).parents[2] / "docs" / "trl.md"
    example = re.search("```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)[1]
    models()[0].save_pretrained(tmp_path / "gpt2")
    grammar_tokenizer().save_pretrained(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)  # where "gpt2" is this model
    monkeypatch.setattr(terminal, "_SAID", set())
    defaults = {"max_steps": 1, "max_completion_length": 4, "use_cpu": True, "report_to": []}
    check = trl.RLOOConfig.__post_init__

    def on_a_cpu(config):
        vars(config).update(defaults)
        check(config)

    monkeypatch.setattr(trl.RLOOConfig, "__post_init__", on_a_cpu)
    dtypes, compute = [], adapter.weighted_loss

    def recording(*arguments):
        dtypes.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return compute(*arguments)

    monkeypatch.setattr(adapter, "weighted_loss", recording)
    variables = {}
    exec(example, variables)
    trainer = variables["trainer"]
    assert trainer.state.global_step == 1
    assert "kl_per_sequence" in trainer.state.log_history[0]
    assert dtypes == [torch.bfloat16]
    assert trainer.kl_scorer.fuses
    assert "cached keys and values" not in capsys.readouterr().err
