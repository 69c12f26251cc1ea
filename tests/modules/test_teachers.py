"""Several teachers, each of the rows that name it: gradients by enumeration, runs, and what is refused."""

from types import SimpleNamespace

import pytest
import test_teacher_gradient
import torch
from runs import equal, logged, one_line_of, weights_of
from served_teacher import TeacherServer
from test_teacher_gradient import (
    PROMPTS,
    TEACHERS,
    VOCABULARY,
    every_batch,
    exact_kl,
    expected_gradients,
    flat_gradient,
    pair_of,
    tiny,
)
from written import write_splits

from lit_klrb.engine.served import ServedTeacher
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import MonteCarlo, RaoBlackwell, RaoBlackwellTopK
from lit_klrb.modules import DistillModule
from lit_klrb.rollouts.pair import Pair
from lit_klrb.rollouts.step import Experience, policy_loss

NAMES = ["b", "a"]


@pytest.mark.parametrize(
    ("estimator", "is_served"),
    [
        (RaoBlackwell(), False),
        (MonteCarlo(), False),
        (RaoBlackwellTopK(k=1, support="reference"), False),
        (RaoBlackwellTopK(k=2, support="reference"), True),
    ],
)
def test_the_expected_gradient_is_that_of_each_prompts_own_kl(monkeypatch, estimator, is_served):
    policy, *teachers = (tiny("gpt2", seed) for seed in range(3))
    own = [exact_kl(policy, teachers[i], PROMPTS[i : i + 1], TEACHERS[i : i + 1]) for i in (0, 1)]
    truth = flat_gradient(sum(own), list(policy.parameters()))
    rollout, batch = every_batch()
    monkeypatch.setattr(
        test_teacher_gradient,
        "every_batch",
        lambda: (rollout, batch | {"rows": [{"teacher": "a"}, {"teacher": "b"}]}),
    )
    with TeacherServer(teachers[1]) as server:
        remote = ServedTeacher(server.address, 2, VOCABULARY, None, 5.0)
        pairs = [pair_of(policy, None, served=remote) if is_served else pair_of(policy, teachers[1])]
        pairs.append(pair_of(policy, teachers[0]))
        module = DistillModule(policy_path="student", teachers=dict.fromkeys(NAMES, "teacher"))
        module.policy = policy
        module.pair = Pair(pairs[0].first, by_teacher=dict(zip(NAMES, pairs, strict=True)))
        (fused, composed), *_ = expected_gradients(estimator, module, True)
        if is_served:  # statistics of all teachers are those of its head, whatever the estimator reads
            assert module.pair.score(*test_teacher_gradient.every_batch())[1].head_kl is not None
    assert truth.abs().max() > 1e-2
    assert all((gradient - truth).abs().max() < 1e-10 for gradient in (fused, composed))


def test_the_parts_of_a_rollout_have_the_loss_and_the_gradient_of_the_whole():
    """One of seven parts has sequences of both teachers."""
    policy, *teachers = (tiny("gpt2", seed) for seed in range(3))
    pairs = dict(zip(NAMES, (pair_of(policy, teacher) for teacher in teachers), strict=True))
    pair = Pair(pairs["a"].first, by_teacher=pairs)
    rollout, batch = every_batch()
    states, stats = pair.score(rollout, batch | {"rows": [{"teacher": "a"}, {"teacher": "b"}]})
    estimator, own = RaoBlackwell(off_policy="clip"), stats.logprobs.detach()
    own = own + 0.3 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0), dtype=own.dtype)
    rewards = torch.zeros(len(own), dtype=own.dtype)
    weights = estimator.weights(stats.detach(), rollout.mask, rewards, group_size=2)
    whole = Experience(rollout, states, own, rewards, weights, None, {})

    def loss(part):
        inputs = part.rollout, part.reference_states, part.weights
        settings = {"beta": 1.0, "behaviour_logprobs": part.behaviour_logprobs}
        return policy_loss(pair.scorer, estimator, *inputs, **settings)[0]

    parts = [whole.part(index, 7) for index in range(7)]
    assert [len(part.reference_states.parts[0]) for part in parts] == [0, 0, 0, 14, 28, 28, 28]
    parameters = list(policy.parameters())
    total = sum(map(loss, parts)) / 7
    torch.testing.assert_close(total, loss(whole), rtol=1e-12, atol=1e-12)
    gradients = [flat_gradient(each, parameters) for each in (total, loss(whole))]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)
    assert gradients[0].abs().max() > 1e-3


def test_teachers_have_one_vocabulary():
    first = pair_of(tiny("gpt2", 0), tiny("gpt2", 1)).first
    pairs = {name: SimpleNamespace(vocabulary_size=size, rows=None) for name, size in (("a", 3), ("b", 4))}
    with pytest.raises(ConfigurationError, match=r"^teachers: must have one vocabulary"):
        Pair(first, by_teacher=pairs)


def rows(start, names):
    """Two prompts of each teacher."""
    nouns = ("film", "cast"), ("plot", "drama"), ("movie", "acting")
    return [
        {"prompt": f"{start} {noun} was", "teacher": name}
        for name, pair in zip(names, nouns, strict=False)
        for noun in pair
    ]


@pytest.fixture
def taught(chain, tmp_path):
    """Options of a run with two teachers, and of their paths."""

    def options(one, other, train=("a", "b"), validation=("a", "a", "b")):
        source = write_splits(
            tmp_path / "rows", train=rows("The", train), validation=rows("This", validation)
        )
        few = ["--data.train_size", "4", "--data.eval_size", str(2 * len(validation))]
        teachers = f"{{a: {one}, b: {other}}}"
        null = ["--model.reference_path", "null"]
        return ["--data.source", str(source), *few, *null, "--model.teachers", teachers]

    return options


def test_the_kl_of_all_prompts_and_of_each_teachers(chain, taught, tmp_path):
    sft, rloo = chain.checkpoint("sft"), chain.checkpoint("rloo")
    options = taught(sft, rloo)
    assert chain.run("fit", "distill", *options, run=tmp_path / "two") == 0
    alone = [*options[:-4], "--model.reference_path", sft]
    assert chain.run("fit", "distill", *alone, run=tmp_path / "one") == 0
    kl, a, b = (logged(tmp_path / "two", f"val/{name}") for name in ("kl", "kl/a", "kl/b"))
    assert kl.keys() == a.keys() == b.keys() == {0, 2, 4}
    assert [*kl.values()] == pytest.approx([(4 * a[step] + 2 * b[step]) / 6 for step in kl], rel=1e-5)
    assert abs(a[0] - b[0]) > 1e-3
    one = logged(tmp_path / "one", "val/kl")
    assert kl[0] != pytest.approx(one[0], rel=1e-4)
    same = taught(sft, sft)
    assert chain.run("fit", "distill", *same, run=tmp_path / "same") == 0
    assert logged(tmp_path / "same", "val/kl") == pytest.approx(one, rel=1e-3)


def test_a_run_with_several_teachers_resumes_bit_for_bit_within_a_rollout(chain, taught, tmp_path):
    options = taught(chain.checkpoint("sft"), chain.checkpoint("rloo"))
    options += ["--model.inner_epochs", "2", "--kl.estimator.off_policy", "prefix"]
    options += ["--trainer.callbacks+=RunCheckpoint", "--trainer.callbacks.every_n_train_steps", "3"]
    options += ["--trainer.callbacks.save_top_k", "-1", "--trainer.callbacks.filename", "{step}"]
    options += ["--trainer.callbacks.dirpath", str(tmp_path)]
    assert chain.run("fit", "distill", *options, run=tmp_path / "whole") == 0
    resume = ["--ckpt_path", str(tmp_path / "step=3.ckpt")]
    assert chain.run("fit", "distill", *options, *resume, run=tmp_path / "resumed") == 0
    first, second = (weights_of(tmp_path / name) for name in ("whole", "resumed"))
    assert equal(first, second)
    assert all(name.startswith("policy.") for name in first)
    kls = [logged(tmp_path / name, "val/kl/b")[4] for name in ("whole", "resumed")]
    assert kls[0] == kls[1]


def test_check_shows_each_teacher_and_a_validation_without_one_of_them_is_read(chain, taught, capsys):
    options = taught(chain.checkpoint("sft"), chain.checkpoint("rloo"), validation="a")
    assert chain.run("check", "distill", *options) == 0
    shown = capsys.readouterr().out
    assert (
        f"teachers.a {chain.checkpoint('sft')} (gpt2), teachers.b {chain.checkpoint('rloo')} (gpt2)" in shown
    )


WRONG = {
    "teachers: no row of the training has b in its column teacher": {"train": "a"},
    "teachers: a row has 'c' in the column teacher; the teachers are a, b": {"train": "abc"},
    "teachers: a row has no column teacher; the teachers are a, b": {"validation": [None]},
}


@pytest.mark.parametrize("problem", WRONG)
@pytest.mark.parametrize("command", ["fit", "check"])
def test_rows_and_teachers_name_each_other(chain, taught, tmp_path, capsys, command, problem):
    options = taught(chain.checkpoint("sft"), chain.checkpoint("sft"), **WRONG[problem])
    assert chain.run(command, "distill", *options, "--data.train_size", "0", run=tmp_path / "run") == 2
    assert one_line_of(capsys) == f"error: model.init_args.{problem}"


def test_other_mistakes_of_teachers_are_one_line(chain, taught, tmp_path, capsys):
    sft = chain.checkpoint("sft")
    for options, problem in {
        (*taught(sft, sft), "--model.reference_path", sft): f"reference_path: {sft} would be one more",
        (*taught(sft, "nowhere.ckpt"),): "teachers.b: nowhere.ckpt does not exist",
        (*taught(sft, sft), "--model.teachers", f"{{a.b: {sft}}}"): "teachers: must be paths by names of",
    }.items():
        assert chain.run("fit", "distill", *options, run=tmp_path / "run") == 2
        assert one_line_of(capsys).startswith(f"error: model.init_args.{problem}")
