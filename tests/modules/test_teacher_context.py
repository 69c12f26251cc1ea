"""A teacher, or a reference, that reads another prompt than the policy: what runs and commands do with it."""

import json
import re

import pytest
import torch
from chat_tokenizer import by_hand, chat_tokenizer, message
from runs import StopAt, Stopped, assert_same_run, with_callback
from written import save, write_rows, write_splits

from lit_klrb.cli.main import main
from lit_klrb.models.loading import fresh_model, load_model, load_tokenizer

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 96}
QUESTIONS = [f"Is {'very ' * (number % 3)}{number} even?" for number in range(24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A student, another model with a shorter context, both with a chat template, and conversations."""
    root = tmp_path_factory.mktemp("context")
    for seed, name in enumerate(("student", "other")):
        tokenizer = chat_tokenizer()
        model = fresh_model({**CONFIG, "n_positions": 96 - 32 * seed}, tokenizer, seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(
                    0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
                )
        save(root / name, model, tokenizer)
    write(root / "prompts", [{"prompt": [message("user", text)]} for text in QUESTIONS])
    return root


def write(folder, rows):
    return write_splits(folder, train=rows[:16], validation=rows[16:20], test=rows[20:])


@pytest.fixture
def distill(chain, folder, tmp_path):
    def run(*extra, teacher="student", source=None, command="fit", where="run"):
        teacher = teacher if teacher in ("policy", "null") else str(folder / teacher)
        paths = ["--model.policy_path", str(folder / "student"), "--model.reference_path", teacher]
        data = ["--data.source", str(source or folder / "prompts"), "--data.eval_size", "4"]
        argv = [*chain.commands.argv(command, "distill", *paths, *data, *extra, run=tmp_path / where)]
        place = argv.index("--model.policy_config.n_embd")
        return main([*argv[:place], "--model.policy_config", "null", *argv[place + 2 :]])

    return run


def first_token_kl(folder, policy, teacher, pairs):
    """Mean KL of the first token of the answer, one prompt at a time."""
    models = [load_model("policy_path", str(folder / name)).eval() for name in (policy, teacher)]
    kls = []
    for pair in pairs:
        with torch.no_grad():
            p, q = (
                model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
                for model, ids in zip(models, pair, strict=True)
            )
        kls.append((p.exp() * (p - q)).sum().item())
    return sum(kls) / len(kls)


def evaluated(capsys, run):
    return json.loads((run / "summary.json").read_text())["final"]["kl"], capsys.readouterr().out


ONE_TOKEN = ["--model.max_new_tokens", "1", "--model.learning_rate", "1e-12", "--trainer.max_steps", "2"]


@pytest.mark.parametrize(
    ("teacher", "named"),
    [
        ("student", "KL(policy‖reference with its own context)"),
        ("other", "KL(policy‖reference with its own context)"),
        ("policy", "KL(policy‖policy with its own context)"),
        ("null", "KL(policy‖reference with its own context)"),
    ],
)
def test_the_evaluation_is_the_kl_to_the_teacher_with_its_context(
    distill, folder, tmp_path, capsys, teacher, named
):
    lora = ["--model.lora", "{r: 2}"] if teacher == "null" else []
    assert distill(*ONE_TOKEN, *lora, "--data.teacher_system_prompt", "Lie", teacher=teacher) == 0
    tokenizer = load_tokenizer("policy_path", str(folder / "student"))
    pairs = [
        (by_hand(tokenizer, ("user", text)), by_hand(tokenizer, ("system", "Lie"), ("user", text)))
        for text in QUESTIONS[16:20]
    ]
    expected = first_token_kl(folder, "student", "other" if teacher == "other" else "student", pairs)
    kl, printed = evaluated(capsys, tmp_path / "run")
    assert expected > 1e-3
    assert kl == pytest.approx(expected, rel=1e-4)
    assert named in printed
    checkpoint, exported = tmp_path / "run" / "checkpoints" / "last.ckpt", tmp_path / "model"
    assert main(["export", "--ckpt_path", str(checkpoint), "--output_dir", str(exported)]) == 0
    card = (exported / "README.md").read_text("utf-8")
    assert "| the reference's system prompt | Lie |" in card
    assert "base_model" not in card


def test_a_column_has_what_each_teacher_reads(distill, folder, tmp_path, capsys):
    tokenizer = load_tokenizer("policy_path", str(folder / "student"))
    chats = [
        {
            "prompt": [message("user", text)],
            "teacher_prompt": [
                [message("system", "Lie"), message("user", text)],
                f"Lie. {text}",
                [message("user", f"Again: {text}")],
                None,
            ][number % 4],
        }
        for number, text in enumerate(QUESTIONS)
    ]
    system = ["--data.teacher_system_prompt", "Be", "--data.teacher_examples", '[["2?", "Two."]]']
    assert distill(*ONE_TOKEN, *system, source=write(tmp_path / "chats", chats)) == 0
    example = [("user", "2?"), ("assistant", "Two.")]
    expected = [
        lambda text: [("system", "Lie"), *example, ("user", text)],
        lambda text: [("system", "Be"), *example, ("user", f"Lie. {text}")],
        lambda text: [("system", "Be"), *example, ("user", f"Again: {text}")],
        lambda text: [("system", "Be"), *example, ("user", text)],
    ]
    pairs = [
        (by_hand(tokenizer, ("user", text)), by_hand(tokenizer, *expected[number % 4](text)))
        for number, text in enumerate(QUESTIONS[16:20])
    ]
    kl, _ = evaluated(capsys, tmp_path / "run")
    assert kl == pytest.approx(first_token_kl(folder, "student", "student", pairs), rel=1e-4)


@pytest.mark.parametrize(("teacher", "steps_per_rollout"), [("other", "2"), ("policy", "1")])
def test_a_resumed_run_is_the_same_bit_for_bit(distill, tmp_path, monkeypatch, teacher, steps_per_rollout):
    extra = ["--data.teacher_system_prompt", "Lie", "--checkpoint.every_n_train_steps", "1"]
    extra += ["--model.mini_batches", steps_per_rollout, "--kl.estimator.off_policy", "prefix"]
    assert distill(*extra, teacher=teacher) == 0

    with monkeypatch.context() as patched:
        # With two steps per rollout, the second is made after resuming
        with_callback(patched, StopAt(3), last=True)
        with pytest.raises(Stopped):
            distill(*extra, teacher=teacher, where="stopped")
    checkpoint = str(tmp_path / "stopped" / "checkpoints" / "last.ckpt")
    assert distill(*extra, "--ckpt_path", checkpoint, teacher=teacher, where="stopped") == 0
    assert_same_run(tmp_path / "run", tmp_path / "stopped")


LONG = [{"prompt": [message("user", f"Hi {n}")], "teacher_prompt": f"Hi{' so' * 20}"} for n in range(24)]
NUMBER = [{"prompt": f"Hi {n}", "teacher_prompt": n} for n in range(24)]
BEGINNINGS = [{"text": f"Hi {n}", "label": 1, "teacher_prompt": "Hi"} for n in range(24)]
CONTEXT = ["--data.teacher_system_prompt", "Lie"]


@pytest.mark.parametrize(
    ("teacher", "rows", "extra", "message"),
    [
        (
            "other",
            LONG,
            [],
            "data.init_args.source: {rows}: 16 of 16 train rows cannot be read: 16 longer than the "
            "reference's context length=64",
        ),
        (
            "other",
            NUMBER,
            [],
            "16 of 16 train rows cannot be read: 16 a number in place of a list of messages",
        ),
        ("other", BEGINNINGS, [], "data.init_args.source: the column teacher_prompt needs conversations or"),
        ("other", BEGINNINGS, CONTEXT, "data.init_args.teacher_system_prompt: needs conversations or texts"),
        ("policy", None, [], "model.init_args.reference_path: policy has a KL of 0 to the policy on the"),
        (
            "policy",
            None,
            [*CONTEXT, "--model.mini_batches", "2"],
            "reference_path: policy changes with each optimizer",
        ),
        ("null", None, CONTEXT, "model.init_args.reference_path: None means the policy with its adapter"),
        ("null", None, ["--model.lora", "{r: 2}"], "model.init_args.reference_path: None has a KL of 0 to"),
    ],
)
def test_what_a_teacher_cannot_read_is_one_line(distill, tmp_path, capsys, teacher, rows, extra, message):
    source = None if rows is None else write(tmp_path / "rows", rows)
    assert distill(*extra, teacher=teacher, source=source) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message.replace("{rows}", str(source)) in line


@pytest.mark.parametrize(
    ("stage", "extra", "message"),
    [
        ("dpo", CONTEXT, "data.init_args.source: {prompts} gives the reference prompts of its own"),
        ("dpo", ["--model.reference_path", "policy"], "reference_path: policy is not supported by DPO"),
        (
            "rloo",
            ["--model.reference_path", "policy", "--model.policy_path", "null", "--model.inner_epochs", "1"],
            "model.init_args.policy_path: must not be None if reference_path is policy",
        ),
    ],
)
def test_other_modules_refuse_what_they_cannot_do(chain, folder, tmp_path, capsys, stage, extra, message):
    student = str(folder / "student")
    paths = ["--model.policy_path", student, "--model.reference_path", student]
    data = ["--data.source", str(folder / "prompts"), "--data.eval_size", "4"]
    assert chain.run("fit", stage, *paths, *data, *extra, run=tmp_path / "run") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message.replace("{prompts}", str(folder / "prompts")) in line


@pytest.mark.parametrize("by_column", [False, True])
def test_the_command_kl_gives_the_reference_its_context(folder, tmp_path, capsys, by_column):
    tokenizer = load_tokenizer("policy_path", str(folder / "student"))
    chats = [
        [[message("user", text)], [message("system", "Lie"), message("user", text)]] for text in QUESTIONS[:5]
    ]
    names = ("prompt", "teacher_prompt")[: 1 + by_column]
    prompts = write_rows(tmp_path / "prompts.jsonl", (dict(zip(names, chat, strict=False)) for chat in chats))
    extra = [] if by_column else ["--teacher_system", "Lie"]
    models = ["--policy", str(folder / "student"), "--reference", str(folder / "other")]
    settings = ["--prompts", prompts, "--max_new_tokens", "1", "--batch_size", "2", "--json"]
    assert main(["kl", *models, *settings, *extra]) == 0
    found = json.loads(capsys.readouterr().out)["directions"]
    pairs = [
        (by_hand(tokenizer, ("user", text)), by_hand(tokenizer, ("system", "Lie"), ("user", text)))
        for text in QUESTIONS[:5]
    ]
    expected = {
        "forward": first_token_kl(folder, "student", "other", pairs),
        "reverse": first_token_kl(folder, "other", "student", [pair[::-1] for pair in pairs]),
    }
    for direction, kl in expected.items():
        estimate = found[direction]["estimates"]["Rao-Blackwell"]["sequence"]["estimate"]
        assert estimate == pytest.approx(kl, rel=1e-4)
        assert found[direction]["estimand"].endswith("own completions, each after its own prompts, nats")


def test_a_context_that_the_reference_cannot_hold_is_one_line(folder, tmp_path, capsys):
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": [message("user", "Hi")]}])
    models = ["--policy", str(folder / "student"), "--reference", str(folder / "other")]
    long = ["--teacher_system", "so " * 20, "--direction", "forward", "--max_new_tokens", "4"]
    assert main(["kl", *models, "--prompts", prompts, *long]) == 2
    line = capsys.readouterr().err.strip()
    assert re.fullmatch(
        r"error: prompts: a sequence of \d+ tokens exceeds .*other's context length, 64", line
    )
