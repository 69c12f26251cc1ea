"""A teacher in an engine of its own, which a server on the loopback stands for."""

import copy
import functools
import json
import math
import time

import pytest
import torch
from runs import assert_same_run, resume_command
from served_teacher import TeacherServer
from test_teacher_gradient import (
    PROMPTS,
    VOCABULARY,
    every_batch,
    exact_kl,
    expected_gradients,
    flat_gradient,
    pair_of,
    tiny,
)

from lit_klrb.cli.check import check
from lit_klrb.cli.main import main
from lit_klrb.engine import served
from lit_klrb.engine.served import ServedTeacher
from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import CoarsenedTopK, MonteCarloRewardToGo, RaoBlackwell, RaoBlackwellTopK
from lit_klrb.models.loading import load_model, load_tokenizer
from lit_klrb.modules import DistillModule

ONE_STEP = ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1"]
TOPK = ["--kl.estimator", "RaoBlackwellTopK", "--kl.estimator.support", "reference"]


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(served, "PAUSES", (0.01,))


@pytest.mark.parametrize(
    ("kind", "tiled", "k"), [("gpt2", True, 1), ("gpt2", True, 2), ("gpt2", False, 1), ("gpt_neox", True, 3)]
)
def test_the_gradient_of_all_batches_is_that_of_the_exact_kl(kind, tiled, k):
    policy, teacher = tiny(kind, seed=0), tiny(kind, seed=1)
    module = DistillModule(policy_path="student", reference_path="teacher")
    module.policy = policy
    truth = flat_gradient(exact_kl(policy, teacher), list(policy.parameters()))
    assert truth.abs().max() > 1e-2
    with TeacherServer(teacher) as server:
        remote = ServedTeacher(server.address, k, VOCABULARY, None, 5.0)
        for discount, baseline in ((1.0, "leave_one_out"), (1.0, None), (0.5, "leave_one_out")):
            settings = {"discount": discount, "baseline": baseline, "allow_biased": True}
            module.pair = pair_of(policy, teacher)
            (wanted, _), *_ = expected_gradients(RaoBlackwell(**settings), module, tiled)
            assert ((wanted - truth).abs().max().item() < 1e-10) == (discount == 1)
            module.pair = pair_of(policy, served=remote)
            estimators = [RaoBlackwellTopK(k=k, support="reference", **settings)]
            estimators += [MonteCarloRewardToGo(baseline=baseline)] if discount == 1 else []
            for estimator in estimators:
                for gradient in expected_gradients(estimator, module, tiled)[0]:
                    assert (gradient - wanted).abs().max().item() < 1e-10
        head = {"k": k, "support": "reference"}
        coarsened = CoarsenedTopK(**head, allow_biased=True)
        pairs = [(RaoBlackwell(divergence="forward"), RaoBlackwellTopK(**head, divergence="forward"))]
        for local, estimator in [*pairs, (coarsened, coarsened)]:
            module.pair = pair_of(policy, teacher)
            (wanted, _), *_ = expected_gradients(local, module, tiled)
            module.pair = pair_of(policy, served=remote)
            for gradient in expected_gradients(estimator, module, tiled)[0]:
                assert (gradient - wanted).abs().max().item() < 1e-10
    assert all(question["prompt_logprobs"] == k for question in server.questions)


def first(answer, token=None):
    """The last position of the first sequence, or one of its entries."""
    position = answer["choices"][-1]["prompt_logprobs"][-1]
    return position if token is None else position[token]


def changed(change):
    """An answer with a change to its last position, in the copy that JSON makes."""

    def spoil(answer):
        answer = json.loads(json.dumps(answer))
        change(answer)
        return answer

    return spoil


def late(answer):
    time.sleep(0.5)
    return answer


NOT_THAT = "does not send the prompt_logprobs of vLLM's completions"
SPOILED = {
    "late": (late, "does not answer as a teacher (timed out)"),
    "garbage": (lambda _: b"<html>", "does not answer as a teacher (Expecting value"),
    "deep": (lambda _: b"[" * 200_000, "does not answer as a teacher ("),
    "failing": (lambda _: (500, b"out of memory"), "does not answer as a teacher (500: out of memory)"),
    "refusing": (lambda _: (400, b"k is\nat most 20"), "refuses a request, 400: k is at most 20"),
    "elsewhere": (lambda _: (302, b""), "refuses a request, 302:"),
    "no choices": (lambda _: {"choices": []}, NOT_THAT),
    "a word": (changed(lambda a: first(a).__setitem__("word", {"logprob": -1.0})), NOT_THAT),
    "a missing position": (
        changed(lambda a: a["choices"][-1]["prompt_logprobs"].pop()),
        "sends [1, 2, 2, 3] positions for",
    ),
    "none": (changed(lambda a: first(a).clear()), "sends 0 log-probabilities at a position"),
    "beyond": (changed(lambda a: first(a).__setitem__("7", first(a).pop("1"))), "sends token 7; the"),
    "NaN": (changed(lambda a: first(a, "0").update(logprob=float("nan"))), "sends [nan"),
    "another spelling": (changed(lambda a: first(a).__setitem__("01", {"logprob": -9.0})), NOT_THAT),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_no_answer_is_one_line(name):
    spoil, message = SPOILED[name]
    rollout, _ = every_batch()
    with TeacherServer(tiny("gpt2", seed=1)) as server:
        teacher = ServedTeacher(server.address, 1, VOCABULARY, None, 5.0)
        rows = rollout.rows(slice(4))
        teacher(rows)
        server.spoil, teacher.timeout = spoil, 0.3 if spoil is late else 5.0
        with pytest.raises(ConfigurationError) as refused:
            teacher(rows)
    assert str(refused.value).startswith(f"reference_path: {server.address} {message}")
    assert len(str(refused.value)) < 400


def test_sums_above_one_are_refused():
    with TeacherServer(tiny("gpt2", seed=1)) as server:
        teacher = ServedTeacher(server.address, 2, VOCABULARY, None, 5.0)
        server.spoil = changed(lambda a: [entry.update(logprob=-0.1) for entry in first(a).values()])
        with pytest.raises(ConfigurationError, match=r"sends \[-0.1, -0.1.* as log-probabilities"):
            teacher(every_batch()[0])


@pytest.mark.parametrize(("head", "token"), [(0.9, 0.99), (0.01, 0.5)])
def test_a_sampled_token_belongs_to_the_head_s_distribution(head, token):
    """Beside the head, it is no more than the rest, and no more likely than what is in the head."""
    position = {"0": {"logprob": math.log(head)}, "2": {"logprob": math.log(token)}}
    with TeacherServer(tiny("gpt2", seed=1)) as server:
        teacher = ServedTeacher(server.address, 1, VOCABULARY, None, 5.0)
        with pytest.raises(ConfigurationError, match=r"as log-probabilities|a head without token 2"):
            teacher._head(position, 2)


@pytest.mark.parametrize(
    "address", ["http://me:s3cret@127.0.0.1/v1", "https://host/v1?key=s3cret", "http://a/b:s3cret@host/v1"]
)
def test_a_key_in_an_address_is_not_printed(address, chain, capsys, tmp_path, arguments):
    assert chain.run("fit", "distill", *arguments(address), run=tmp_path / "run") == 2
    printed = capsys.readouterr()
    assert "reference_path: http" in printed.err
    assert "is not an address such as" in printed.err
    assert "s3cret" not in printed.err + printed.out
    assert "s3cret" not in "".join(p.read_text() for p in (tmp_path / "run").rglob("*") if p.is_file())


def test_a_request_is_tried_again():
    rollout, _ = every_batch()
    with TeacherServer(tiny("gpt2", seed=1)) as server:
        teacher = ServedTeacher(server.address, 1, VOCABULARY, None, 5.0)
        answers = iter([(503, b"busy")])
        before = teacher(rollout)
        server.spoil = lambda answer: next(answers, answer)
        assert torch.equal(teacher(rollout), before)
    assert next(answers, None) is None


def test_the_sampled_token_is_no_part_of_the_head():
    """The head of a position is the same whatever was sampled there."""
    rollout, _ = every_batch()
    with TeacherServer(tiny("gpt2", seed=1)) as server:
        states = ServedTeacher(server.address, 2, VOCABULARY, None, 5.0)(rollout)
    heads = {}
    for row in range(len(rollout.tokens)):
        prompt = tuple(rollout.tokens[row, :-2][rollout.attention_mask[row, :-2].bool()].tolist())
        assert states[row, 0, 0, 0] == rollout.completions[row, 0]
        heads.setdefault(prompt, set()).add(tuple(sorted(states[row, 0, 0, 1:].tolist())))
    assert len(heads) == len(PROMPTS)
    assert all(len(found) == 1 for found in heads.values())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:1/v1", "does not answer as a teacher"),
        ("http://127.0.0.1:99999/v1", "does not answer as a teacher"),
        ("http://", "is not an address"),
    ],
)
def test_an_address_where_nothing_is(address, message):
    with pytest.raises(ConfigurationError, match=f"reference_path: {address[:5]}.* {message}"):
        ServedTeacher(address, 1, VOCABULARY, None, 0.3)


def test_one_of_several_models_is_named():
    with TeacherServer(tiny("gpt2", seed=1)) as server:
        server.names = ["base", "tuned"]
        with pytest.raises(ConfigurationError, match=r"served_model: .* serves base, tuned; name"):
            ServedTeacher(server.address, 1, VOCABULARY, None, 5.0)
        ServedTeacher(server.address, 1, VOCABULARY, "tuned", 5.0)(every_batch()[0])
    assert {question["model"] for question in server.questions} == {"tuned"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, "temperature: must be 1 for a served teacher, got 0.7"),
        ({"policy_path": None, "policy_config": {}}, "policy_config: a student with new weights takes its"),
        ({"served_timeout": 0}, "served_timeout: must be positive and finite, got 0"),
        ({"reference_path": "teacher", "served_model": "x"}, "served_model: x needs the address of"),
    ],
)
def test_settings_that_a_served_teacher_cannot_have(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        DistillModule(**{"policy_path": "x", "reference_path": "http://127.0.0.1:1/v1", **settings})


@pytest.fixture
def arguments(chain):
    """Options of a run that distils a served SFT checkpoint into the policy of DPO."""
    common = ["--model.policy_config", "null", "--model.policy_path", chain.checkpoint("dpo")]
    common += ["--checkpoint.every_n_train_steps", "1"]
    return lambda address, *extra: [*common, "--model.reference_path", address, *TOPK, *extra]


@pytest.fixture
def teacher(chain):
    """Arguments of a server with the SFT checkpoint."""
    tokenizer = load_tokenizer("reference_path", chain.checkpoint("sft"))
    model = load_model("reference_path", chain.checkpoint("sft")).eval()
    return model, functools.cache(lambda token: tokenizer.decode([token]))


@pytest.fixture
def other(teacher):
    """Another model of the teacher's kind."""
    other = copy.deepcopy(teacher[0])
    other.get_output_embeddings().weight.data.normal_(std=10, generator=torch.Generator().manual_seed(0))
    return other


def test_all_tokens_of_a_served_teacher_are_the_teacher(chain, tmp_path, capsys, arguments, teacher):
    vocabulary = str(teacher[0].get_output_embeddings().weight.shape[0])
    finals = []
    with TeacherServer(*teacher) as server:
        for name, path in (("local", chain.checkpoint("sft")), ("served", server.address)):
            options = arguments(path, "--kl.estimator.k", vocabulary, *ONE_STEP)
            assert check(chain.commands.argv("fit", "distill", *options))["estimator"]["biased"] is False
            assert chain.run("fit", "distill", *options, run=tmp_path / name) == 0
            finals.append(json.loads((tmp_path / name / "summary.json").read_text())["final"])
    assert finals[1]["kl"] == pytest.approx(finals[0]["kl"], rel=1e-3)
    printed = capsys.readouterr().out
    assert f"prompts, from the teacher's {vocabulary} likeliest tokens)" in printed
    assert printed.count("from the teacher's") == printed.count("KL(policy‖reference)") / 2


def test_a_teacher_that_stops_loses_nothing(chain, tmp_path, capsys, arguments, teacher, other):
    extra = ["--kl.estimator.k", "8", "--model.inner_epochs", "2", "--kl.estimator.off_policy", "prefix"]
    with TeacherServer(*teacher) as server:
        options, port = arguments(server.address, *extra), server.server_port
        assert chain.run("fit", "distill", *options, run=tmp_path / "whole") == 0
        asked = len(server.questions)
    with TeacherServer(*teacher, port=port, answers=asked - 2) as server:
        assert chain.run("fit", "distill", *options, run=tmp_path / "run") == 69
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert f"reference_path: {server.address} does not answer as a teacher" in line
    with TeacherServer(other, teacher[1], port=port) as server:
        assert main(resume_command(line)) == 2
    assert f"{server.address} is not the teacher of this run: its log-prob" in capsys.readouterr().err
    with TeacherServer(*teacher, port=port) as server:
        assert main(resume_command(line)) == 0
    assert len(server.questions) < asked
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_teacher_that_is_replaced_ends_the_run(chain, tmp_path, capsys, arguments, teacher, other):
    def replace(answer):
        if len(server.questions) == 4:
            server.model, server.known = other, {}
        return answer

    with TeacherServer(*teacher) as server:
        server.spoil = replace
        options = arguments(server.address, "--kl.estimator.k", "8")
        assert chain.run("fit", "distill", *options, run=tmp_path) == 2
    assert f"{server.address} is not the teacher of this run: its log-prob" in capsys.readouterr().err


def test_another_tokenizer_is_one_line(chain, tmp_path, capsys, arguments, teacher):
    model, decode = teacher
    with TeacherServer(model, lambda token: decode(token).upper()) as server:
        options = arguments(server.address, "--kl.estimator.k", "8")
        assert chain.run("fit", "distill", *options, run=tmp_path) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    key = "model.init_args.reference_path"
    assert line.startswith(f"error: {key}: {server.address} has another tokenizer than")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--kl.estimator", "RaoBlackwell"], "RaoBlackwell needs more than a served teacher sends"),
        (
            ["--kl.estimator.support", "policy"],
            "support: policy needs the teacher's log-probabilities of the",
        ),
        (
            ["--kl.estimator", "replication.to_come.RaoBlackwellTokenValues"],
            "RaoBlackwellTokenValues needs more than a served",
        ),
        (["--trainer.callbacks+=KLMonitor"], "trainer.callbacks: KLMonitor needs all logits of the teacher"),
        (["--trainer.callbacks+=lit_klrb.studies.GradientNoiseStudy"], "GradientNoiseStudy needs all logits"),
    ],
)
def test_what_needs_all_logits_is_refused(chain, tmp_path, capsys, arguments, extra, message):
    options = arguments("http://127.0.0.1:1/v1", *extra)
    assert chain.run("fit", "distill", *options, run=tmp_path) == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    if "needs all logits" not in message:
        assert message in check(chain.commands.argv("fit", "distill", *options))["error"]
