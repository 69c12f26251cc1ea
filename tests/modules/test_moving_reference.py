"""A reference that follows the policy: its weights, the two KLs, plans, and what is refused."""

import copy
import re

import pytest
import torch
import yaml
from lightning import Trainer
from runs import logged, one_line_of

from analysis.cli.main import main as analyse
from lit_klrb.cli.main import main
from lit_klrb.models import loading
from lit_klrb.models.adapters import add_adapter, merged
from lit_klrb.modules import RLOOModule
from lit_klrb.modules.moving_reference import STATE_KEY, ReferenceUpdate

ONE_STEP = ["--model.inner_epochs", "1", "--model.learning_rate", "0.01"]


def model(seed, **settings):
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8}
    return loading.fresh_model(config | settings, loading.load_tokenizer("path", "grammar"), seed)


@pytest.mark.parametrize("decay", [0.0, 0.75])
@pytest.mark.parametrize("lora", [False, True])
def test_an_update_is_an_average_of_all_weights(decay, lora):
    policy, reference = model(0), model(1)
    if lora:
        policy = add_adapter(policy, {"r": 2, "init_lora_weights": False}, seed=0)
    before, whole = copy.deepcopy(reference.state_dict()), copy.deepcopy(policy)
    other = (merged(whole) if lora else whole).state_dict()
    ReferenceUpdate(1, decay).apply(reference, policy)
    after = reference.state_dict()
    assert after.keys() == other.keys()
    for name, weight in after.items():
        torch.testing.assert_close(weight, decay * before[name] + (1 - decay) * other[name])
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert any(".lora_" in name for name in policy.state_dict()) == lora


def test_the_kl_is_to_the_start_and_to_the_current_reference(chain, tmp_path, capsys):
    """Copied before the fifth step: the reference is the policy after the fourth."""
    keep = ["--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.every_n_train_steps", "2"]
    keep += ["--trainer.callbacks.save_top_k", "-1", "--trainer.callbacks.filename", "{step}"]
    keep += ["--trainer.callbacks.dirpath", str(tmp_path)]
    run, steps = tmp_path / "run", ["--trainer.max_steps", "5", "--trainer.val_check_interval", "5"]
    moving = ["--model.reference_update", "{every: 2}"]
    assert chain.run("fit", "rloo", *ONE_STEP, *keep, *steps, *moving, run=run) == 0
    last, fourth = run / "checkpoints" / "last.ckpt", tmp_path / "step=4.ckpt"
    weights = torch.load(last, weights_only=True)[STATE_KEY]
    policy = loading.load_model("path", str(fourth)).state_dict()
    assert weights.keys() == policy.keys()
    assert all(torch.equal(weights[name], policy[name]) for name in weights)
    start, current = logged(run, "val/kl"), logged(run, "val/kl_current")
    assert start[0] == current[0]
    assert min(logged(run, "train/kl").items())[1] > 1e-6, (
        "the first rollout's is to the reference of the start"
    )
    assert current[5] < 0.5 * start[5]
    for reference, kl in ((chain.checkpoint("sft"), start[5]), (str(fourth), current[5])):
        argv = ["--ckpt_path", str(last), "--model.reference_path", reference]
        assert chain.run("validate", "rloo", *argv, run=tmp_path / "other") == 0
        shown = re.search(r"val/kl\s+│\s+([\d.]+)", capsys.readouterr().out)
        assert float(shown[1]) == pytest.approx(kl, rel=1e-5)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)]
)
def test_a_reference_that_moves_has_the_digits_of_the_policy(tmp_path, precision, dtype):
    """Also if its file has 16 bits, in which a step of a hundredth would be rounded away."""
    model(0, n_positions=64).to(torch.bfloat16).save_pretrained(tmp_path)
    loading.load_tokenizer("path", "grammar").save_pretrained(tmp_path)
    paths = {"policy_path": str(tmp_path), "reference_path": str(tmp_path), "reward_path": "grammar"}
    module = RLOOModule(**paths, reference_update={"every": 2})
    module.trainer = Trainer(max_steps=1, accelerator="cpu", precision=precision, logger=False)
    module.trainer.strategy.connect(module)
    module.configure_model()
    for moving in (module.policy, module.reference):
        assert {weight.dtype for weight in moving.parameters()} == {dtype}


REFUSED = {
    "must be {every: N} or {decay: a}, got every, decay": ["{every: 2, decay: 0.5}"],
    "must be {every: N} or {decay: a}, got often": ["{often: 1}"],
    "every must be a multiple of 2, the optimizer steps per rollout, got 3": ["{every: 3}"],
    "decay must be from 0 to below 1, got 1": ["{decay: 1}"],
    "{'decay': 0.9} is lost in rounding with bf16-true": ["{decay: 0.9}", "--trainer.precision", "bf16-true"],
    "needs the weights of a reference, got reference_path=policy": [
        *("{decay: 0.9}", "--model.inner_epochs", "1", "--model.reference_path", "policy")
    ],
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_cannot_follow_is_refused(chain, tmp_path, capsys, problem):
    options = ["--model.reference_update", *REFUSED[problem]]
    assert chain.run("fit", "rloo", *options, run=tmp_path) == 2
    assert one_line_of(capsys).startswith(f"error: model.init_args.reference_update: {problem}")


def test_a_teacher_of_another_shape_cannot_follow(chain, tmp_path, capsys):
    assert chain.run("fit", "distill", "--model.reference_update", "{decay: 0.5}", run=tmp_path) == 2
    problem = "needs a reference whose weights have the shapes of the policy's, got "
    assert one_line_of(capsys).startswith(f"error: model.init_args.reference_update: {problem}")


@pytest.mark.usefixtures("plans_checked_here")
def test_plans_compare_moving_references_only_if_they_are_the_arms(chain, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    moving = ["--model.reference_update", "{every: 2}"]
    moving += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2"]
    argv = chain.commands.argv("fit", "rloo", *ONE_STEP, *moving, run="run")
    assert main(argv) == 0
    arms = {"fixed": {"model.reference_update": None}, "moving": {"model.reference_update": {"every": 2}}}
    rates = {name: {"model.learning_rate": rate} for name, rate in {"low": 1e-3, "high": 1e-2}.items()}
    for given, code in ((arms, 0), (rates, 2)):
        plan = {
            "name": "moving",
            "directory": f"runs-{code}",
            "stages": {"rloo": {"config": "run/config.yaml"}},
            "grid": {"arms": given, "beta": {0: 0.1}, "replicates": 2},
            "primary": {"control": next(iter(given))},
        }
        (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan, sort_keys=False))
        assert analyse(["plan", "--config", "plan.yaml"]) == code
    assert "grid.arms.low: model.reference_update: every run" in one_line_of(capsys)
