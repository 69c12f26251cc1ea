"""KL estimators in TRL's trainers: against the definition, and against TRL's own loss."""

import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks.kills.children import Child
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import (
    EstimatorMemory,
    MonteCarlo,
    RaoBlackwell,
    RaoBlackwellControlVariate,
    RaoBlackwellLoss,
    RaoBlackwellTokenValues,
    RaoBlackwellTopK,
)
from lit_klrb.functional import leave_one_out_baseline
from lit_klrb.integrations import trl as adapter
from lit_klrb.integrations.trl_batches import rollout_of
from lit_klrb.models.loading import freeze, fresh_model
from lit_klrb.models.scoring import Scorer, completion_logits

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
BETA, GROUP = 0.3, 4
KEPT = []  # what DDP wraps, as its destructor can wait forever; forked processes end without it


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
    added, _ = adapter.add_weights(batch, scorer, EstimatorMemory(estimator), BETA, GROUP)
    found = gradient(policy, adapter.weighted_loss(added, scorer, estimator, BETA))
    rollout = rollout_of(batch)
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
    added, _ = adapter.add_weights(batch, scorer, EstimatorMemory(MonteCarlo()), BETA, GROUP)
    found = gradient(policy, adapter.weighted_loss(added, scorer, MonteCarlo(), BETA))
    rollout = rollout_of(batch)
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
    added, kl = adapter.add_weights(batch, scorer, EstimatorMemory(estimator), BETA, GROUP)
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
        {**batch, "tool_mask": tools},
        Scorer(policy, reference, 1.0),
        EstimatorMemory(RaoBlackwell()),
        BETA,
        GROUP,
    )
    assert added["kl_weights_score"][:, 1].eq(0).all()
    assert added["kl_weights_kl"][:, 1].eq(0).all()


def on_half_of_the_rows(arguments):
    """Each process has one and a half of the groups; a forked process compares with the whole."""
    rank, port = arguments
    torch.set_num_threads(1)  # a forked process has no others
    policy, reference = models()
    _, batch = batch_of_trl(groups=3)
    scorer, estimator = Scorer(policy, reference, 1.0), RaoBlackwell()
    added, kl = adapter.add_weights(batch, scorer, EstimatorMemory(estimator), BETA, GROUP)
    whole = gradient(policy, adapter.weighted_loss(added, scorer, estimator, BETA))
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    wrapper = DistributedDataParallel(policy)
    KEPT.append(wrapper)
    rows = slice(6 * rank, 6 * rank + 6)
    part = {name: value[rows] for name, value in batch.items()}
    part, kl_of_all = adapter.add_weights(part, scorer, EstimatorMemory(estimator), BETA, GROUP)
    loss = adapter.inside(wrapper, policy, lambda: adapter.weighted_loss(part, scorer, estimator, BETA))
    loss.backward()
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)
    assert kl_of_all == pytest.approx(kl)
    assert policy(batch["prompt_ids"]).logits.shape[0] == 12  # its own forward pass is back
    return 0


def test_two_processes_that_share_a_group_have_the_gradient_of_one(tmp_path):
    in_two_processes(on_half_of_the_rows, tmp_path)


def in_two_processes(function, tmp_path, *arguments, **environment):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # One thread: a forked process has no others
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    group |= environment
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    first, second = (
        Child(function, (rank, port, *arguments), log, group | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    )
    with first, second:
        codes = [child.wait(120) for child in (first, second)]
        assert codes == [0, 0], "".join(log.read_text() for log in logs)


def trainer_of_trl(**changes):
    """The attributes of a trainer of TRL that are checked."""
    arguments = {
        "beta": 0.1,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 2,
    }
    own = {"model": torch.nn.Dropout(0.0), "num_iterations": 1}
    own |= {"is_deepspeed_enabled": False, "is_fsdp_enabled": False}
    arguments |= {name: value for name, value in changes.items() if name in arguments}
    own |= {name: value for name, value in changes.items() if name not in arguments}
    return SimpleNamespace(args=SimpleNamespace(**arguments), **own)


PROMPTS = torch.nn.Identity()  # a model with prompts of peft
PROMPTS.get_base_model = torch.nn.Identity
PROMPTS.peft_config = {"default": SimpleNamespace(is_prompt_learning=True)}


@pytest.mark.parametrize(
    ("changes", "estimator"),
    [({}, RaoBlackwell()), ({"teacher_model": object(), "beta": 1.0}, RaoBlackwell(baseline=None))],
)
def test_a_trainer_that_fits_passes(changes, estimator):
    adapter.check_trainer(trainer_of_trl(**changes), EstimatorMemory(estimator))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "beta: must not be 0"),
        ({"top_p": 0.9}, r"top_p: must be 1.0, got 0.9: the KL is that of samples"),
        ({"top_k": 50}, "top_k: must be 0, got 50"),
        ({"min_p": 0.1}, "min_p: must be None, got 0.1"),
        ({"repetition_penalty": 1.2}, "repetition_penalty: must be 1.0, got 1.2"),
        ({"is_fsdp_enabled": True}, "accelerate: DeepSpeed and FSDP are not supported"),
        ({"is_deepspeed_enabled": True}, "accelerate: DeepSpeed and FSDP are not supported"),
        ({"model": PROMPTS}, "peft_config: prompt learning is not supported"),
        (
            {"model": torch.nn.Sequential(torch.nn.Dropout(0.1))},
            "disable_dropout: must be true, as the policy",
        ),
        ({"steps_per_generation": 4}, "off_policy: must not be none with 2 optimizer steps per rollout"),
        ({"num_iterations": 3}, "off_policy: must not be none with 3 optimizer steps per rollout"),
        ({"teacher_model": None}, "teacher_model: must be a model, got None"),
        ({"teacher_model": object(), "beta": 0.5}, "beta: must be 1, the reverse KL, got 0.5"),
        (
            {"teacher_model": object(), "beta": 1.0},
            "kl_estimator.baseline: must be None, got leave_one_out",
        ),
    ],
)
def test_other_trainers_are_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        adapter.check_trainer(trainer_of_trl(**changes), EstimatorMemory(RaoBlackwell()))


def test_distillation_with_token_values_is_refused_as_it_samples_one_completion_per_prompt():
    trainer = trainer_of_trl(teacher_model=object(), beta=1.0)
    with pytest.raises(ConfigurationError, match="kl_estimator: RaoBlackwellTokenValues fits token values"):
        adapter.check_trainer(trainer, EstimatorMemory(RaoBlackwellTokenValues(baseline=None)))


def test_a_trainer_that_does_not_sample_is_refused():
    class GKDTrainer:
        pass

    message = "trainer: GKDTrainer is not supported; allowed: RLOOTrainer, GRPOTrainer, DistillationTrainer"
    with pytest.raises(ConfigurationError, match=message):
        adapter.with_kl_estimator(GKDTrainer)


DEFAULTS = object()
OF_ONE_LENGTH = ["I saw", "Do not", "What a", "It was"]


def step_of(kind, folder, estimator=None, lora=None, prompts=OF_ONE_LENGTH, **settings):
    """The change of the trained weights in one step of a trainer of TRL, with plain gradient descent.

    Args:
        kind: RLOO, GRPO or Distillation.
        folder: Where to write.
        estimator: Ours, `DEFAULTS` for that of the adapter; None for TRL's own loss.
        lora: "new" for a new adapter, "continued" for one whose training continues.
        prompts: The data.
        settings: Further settings.
    """
    import datasets
    import trl

    policy, reference = models()
    if not (folder / "policy").exists():
        policy.save_pretrained(folder / "policy")
    arguments = {
        "output_dir": str(folder / "out"), "beta": BETA, "num_generations": 2, "max_completion_length": 4,
        "max_steps": 1, "learning_rate": 1.0, "lr_scheduler_type": "constant", "optim": "sgd",
        "max_grad_norm": 0.0, "report_to": [], "use_cpu": True, "seed": 3, "save_strategy": "no",
        "bf16": False, "disable_tqdm": True, "disable_dropout": True,
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
    before = [parameter.detach().clone() for parameter in trained.values()]
    KEPT.append(made)
    made.train()
    changes = [(p.detach() - b).flatten() for p, b in zip(trained.values(), before, strict=True)]
    return torch.cat(changes)


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
    assert theirs.norm() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


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
def test_a_step_on_prompts_of_unequal_length_is_not_that_of_trl(tmp_path):
    """TRL passes no position ids, so GPT-2 reads padded prompts at other positions than it sampled them."""
    settings = {
        "per_device_train_batch_size": 8,
        "prompts": ["I", "I saw the", "What a", "It was not a good"],
    }
    theirs = step_of("RLOO", tmp_path, **settings)
    ours = step_of("RLOO", tmp_path, MonteCarlo(), **settings)
    assert 0.5 < torch.cosine_similarity(ours, theirs, dim=0) < 0.99


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [None, "new"])
def test_a_step_of_distillation_with_the_token_level_loss_is_that_of_trl(tmp_path, lora):
    settings = {"beta": 1.0, "per_device_train_batch_size": 4, "lora": lora}
    theirs = step_of("Distillation", tmp_path, **settings)
    ours = step_of("Distillation", tmp_path, RaoBlackwellLoss(baseline=None, allow_biased=True), **settings)
    assert theirs.norm() > 0.1
    # TRL's loss is a mean over tokens, of which each completion has 4
    torch.testing.assert_close(ours, 4 * theirs, rtol=1e-3, atol=1e-5)
    other = step_of("Distillation", tmp_path, RaoBlackwell(baseline=None), **settings)
    assert (other - ours).norm() > 0.1 * ours.norm()


@pytest.mark.filterwarnings("ignore")
def test_a_step_of_distillation_with_the_forward_kl_is_that_of_trl(tmp_path):
    settings = {"per_device_train_batch_size": 4}
    theirs = step_of("Distillation", tmp_path, beta=0.0, **settings)
    forward = RaoBlackwell(baseline=None, discount=0.0, forward=1.0, allow_biased=True)
    ours = step_of("Distillation", tmp_path, forward, beta=1.0, **settings)
    assert theirs.norm() > 0.1
    torch.testing.assert_close(ours, 4 * theirs, rtol=1e-3, atol=1e-5)


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
def test_the_loss_has_the_precision_of_the_statistics(tmp_path, monkeypatch):
    dtypes = []

    def recording(function):
        def record(*arguments, **settings):
            dtypes.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
            return function(*arguments, **settings)

        return record

    for name in ("weighted_loss", "add_weights"):
        monkeypatch.setattr(adapter, name, recording(getattr(adapter, name)))
    step_of("GRPO", tmp_path, RaoBlackwell(), bf16=True, per_device_train_batch_size=8)
    assert dtypes == [torch.bfloat16, torch.bfloat16]


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
        ("RLOO", {"per_device_train_batch_size": 3}, MonteCarlo(), 1),
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
    assert theirs.norm() > 0.1
    torch.testing.assert_close(ours, scale * theirs, rtol=1e-3, atol=1e-5)
    assert torch.equal(ours, same)


@pytest.mark.filterwarnings("ignore")
def test_the_example_of_the_documentation_runs(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "trl.md"
    example = re.search("```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)[1]
    models()[0].save_pretrained(tmp_path / "policy")
    grammar_tokenizer().save_pretrained(tmp_path / "policy")
    small = "max_steps=1, max_completion_length=4, use_cpu=True, bf16=False, report_to=[], output_dir"
    example = example.replace('"gpt2"', f'"{tmp_path}/policy"').replace("runs/trl", f"{tmp_path}")
    example = example.replace("output_dir", small)
    found = {}
    exec(example, found)
    assert found["trainer"].state.global_step == 1
    assert "kl_per_sequence" in found["trainer"].state.log_history[0]
