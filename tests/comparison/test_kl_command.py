"""`lit-klrb kl` on tiny models: its numbers against full logits, its output and its errors."""

import json
import re
import shutil

import pytest
import torch
from written import save, write_rows

from lit_klrb import terminal
from lit_klrb.cli.main import main
from lit_klrb.comparison.measure import (
    encode_prompts,
    encode_windows,
    load,
    noise_floor,
    read_rows,
    text_rollouts,
)
from lit_klrb.data.tokenizer import grammar_tokenizer, train_bpe
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.loading import fresh_model, load_tokenizer

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
TEXTS = ["I saw this film last night.", "What a marvelous thriller!", "Do not miss it!", "It was a treat."]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} . {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def rows_of(texts):
    return [{"text": text} for text in texts]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a reference, a policy, one with another tokenizer, and one with a chat template."""
    root = tmp_path_factory.mktemp("models")
    for number, name in enumerate(("reference", "first", "chat")):
        tokenizer = grammar_tokenizer()
        model = fresh_model(CONFIG, tokenizer, seed=0)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * number * torch.randn(parameter.shape, generator=generator))
        if name == "chat":
            tokenizer.chat_template = TEMPLATE
        save(root / name, model, tokenizer)
    tokenizer = train_bpe(["It was good."], vocab_size=258)
    save(root / "other", fresh_model(CONFIG, tokenizer, seed=0), tokenizer)
    write_rows(root / "prompts.jsonl", ({"prompt": text[:10]} for text in TEXTS))
    write_rows(root / "texts.jsonl", ({"text": text} for text in TEXTS))
    (root / "texts.txt").write_text("\n\n".join(TEXTS))
    write_rows(root / "chat.jsonl", ({"prompt": [{"role": "user", "content": text}]} for text in TEXTS))
    return root


@pytest.fixture
def kl(models, capsys):
    """The command with these models; returns its exit code, output and error."""

    def run(*arguments, policy="first", reference="reference"):
        both = ["--policy", str(models / policy), "--reference", str(models / reference)]
        files = [str(models / a) if (models / a).is_file() else a for a in arguments]
        code = main(["kl", *both, *files])
        return code, *capsys.readouterr()

    return run


PROMPTS = ("--prompts", "prompts.jsonl", "--max_new_tokens", "6", "--batch_size", "3")


def test_given_texts_have_the_kl_of_full_logits(models, kl):
    code, output, _ = kl("--texts", "texts.txt", "--json", "--batch_size", "3")
    assert code == 0
    directions = json.loads(output)["directions"]
    loaded = [load("policy", str(models / name), "cpu") for name in ("first", "reference")]
    sums, count = {"forward": [], "reverse": []}, 0
    for text in TEXTS:
        ids = torch.tensor([loaded[0].tokenizer(text)["input_ids"]])
        with torch.no_grad():
            p, q = (x.model(ids).logits[0, :-1].double().log_softmax(-1) for x in loaded)
        sums["forward"].append((p.exp() * (p - q)).sum().item())
        sums["reverse"].append((q.exp() * (q - p)).sum().item())
        count += len(p)
    for direction, per_text in sums.items():
        found = directions[direction]
        assert found["tokens"] == count
        estimate = found["estimates"]["exact next-token KL"]
        assert estimate["sequence"]["estimate"] == pytest.approx(sum(per_text) / len(TEXTS), rel=1e-4)
        assert estimate["token"]["estimate"] == pytest.approx(sum(per_text) / count, rel=1e-4)


def test_the_table_has_the_numbers_of_the_json(kl):
    rows = [line.split("\t") for line in kl("--texts", "texts.txt")[1].splitlines() if "\t" in line]
    found = json.loads(kl("--texts", "texts.txt", "--json")[1])["directions"]["forward"]["estimates"]
    for name, units in found.items():
        for shown, unit in (("text", "sequence"), ("token", "token")):
            value = next(row[2] for row in rows if row[:2] == [name, shown])
            assert float(value) == pytest.approx(units[unit]["estimate"], rel=1e-3)


def test_windows_of_a_text_predict_each_token_once(kl):
    ids = [grammar_tokenizer()(text)["input_ids"] for text in TEXTS]
    windows, numbers = encode_windows("x", rows_of(TEXTS), grammar_tokenizer(), 3)
    assert {len(window) for window in windows} <= {2, 3}
    for text, expected in enumerate(ids):
        own = [window for window, number in zip(windows, numbers, strict=True) if number == text]
        assert [token for window in own for token in window[1:]] == expected[1:]
        assert [window[0] for window in own[1:]] == [window[-1] for window in own[:-1]]
    found = json.loads(kl("--texts", "texts.txt", "--json", "--max_tokens", "3")[1])["directions"]["forward"]
    assert (found["tokens"], found["clusters"]) == (sum(map(len, ids)) - len(TEXTS), len(TEXTS))


def test_texts_that_are_left_out_are_counted(capsys, monkeypatch):
    monkeypatch.setattr(terminal, "_SAID", set())
    encode_windows("x", rows_of([*TEXTS, "", "good", None]), grammar_tokenizer(), 3)
    line = f"3 of {len(TEXTS) + 3} texts are left out: fewer than two tokens"
    assert line in capsys.readouterr().err


def test_prompts_that_are_left_out_are_counted(caplog):
    rows = [{"prompt": text} for text in ("It was", "", "good")]
    assert len(encode_prompts("x", rows, grammar_tokenizer())) == 2
    assert "prompts: 1 of 3 given rows are left out: 1 empty (x row 2)" in caplog.messages


def test_completions_are_sampled_from_the_first_model_of_each_direction(models, kl):
    code, output, _ = kl(*PROMPTS, "--json", "--completions_per_prompt", "32")
    assert code == 0
    found = json.loads(output)
    assert found["directions"]["forward"]["sequences"] == 4 * 32
    for direction in found["directions"].values():
        estimates = {name: units["sequence"] for name, units in direction["estimates"].items()}
        exact = estimates.pop("Rao-Blackwell")
        # k1 and k3 are unbiased only on samples of the direction's first model
        for estimate in estimates.values():
            assert abs(estimate["estimate"] - exact["estimate"]) < 5 * max(estimate["se"], exact["se"])
    assert "KL(reference‖policy) of the reference's own" in found["directions"]["reverse"]["estimand"]


def test_the_noise_floor_is_rounding(models):
    policy = load("policy", str(models / "first"), "cpu")
    floor = noise_floor(policy.model, text_rollouts([[5, 6, 7], [8, 9]], 0, batch_size=2)[0], 1.0)
    assert list(floor) == ["batch of one", "in bfloat16"]
    assert floor["batch of one"].stats.kl.max() < 1e-5
    assert 1e-7 < floor["in bfloat16"].stats.kl.max() < 1e-2
    assert policy.model.dtype == torch.float32


def test_a_model_compared_with_itself(kl):
    code, output, _ = kl(*PROMPTS, "--direction", "forward", policy="reference")
    assert code == 0
    assert re.search(r"^Rao-Blackwell\tsequence\t0\t0\t0 to 0$", output, re.MULTILINE)
    assert not re.search("nan|reverse", output)
    assert "NaN" not in kl(*PROMPTS, "--json", policy="reference")[1]


def test_names_are_text_in_the_terminal(kl, models):
    name = "<script>alert(1)<\x1b[2J\npolicy: fake"
    (models / name).parent.mkdir(exist_ok=True)
    shutil.copytree(models / "first", models / name)
    code, output, _ = kl(*PROMPTS, "--direction", "forward", policy=name)
    assert code == 0
    assert "\x1b" not in output
    assert len(re.findall("^policy: ", output, re.MULTILINE)) == 1


def test_lines_of_a_text_file_end_at_newlines_only(tmp_path):
    texts = ["one\x0cand\x1ctwo", "\x00three\u2028four\x85"]
    (tmp_path / "x.txt").write_text("\r\n".join(texts) + "\n \n", "utf-8")
    assert read_rows("texts", str(tmp_path / "x.txt")) == [{"text": text} for text in texts]


def test_half_of_a_surrogate_pair_is_no_text(models, kl, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "\\ud800", "text": "\\ud800"}')
    place = f"{tmp_path}/x.jsonl row 1"
    lines = {
        "prompts": f"prompts: 1 of 1 given rows cannot be read: 1 no Unicode text as prompt ({place})",
        "texts": f"texts: {place} has no Unicode text",
    }
    for option, line in lines.items():
        code, _, error = kl(f"--{option}", str(tmp_path / "x.jsonl"))
        assert (code, error) == (2, f"error: {line}\n")


def test_conversations_take_the_tokenizers_template(kl, models):
    arguments = ("--max_new_tokens", "4", "--json", "--direction", "forward", "--completions_per_prompt", "2")
    code, output, _ = kl("--prompts", "chat.jsonl", *arguments, policy="chat")
    assert code == 0
    with_system = kl("--prompts", "chat.jsonl", *arguments, "--system", "Good.", policy="chat")[1]
    assert with_system != output


def test_a_template_that_leaves_its_sandbox_ends_in_one_line(models):
    tokenizer = load_tokenizer("policy", str(models / "chat"))
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(
        ConfigurationError,
        match=r"^prompts: 1 of 1 .* 1 the chat template refuses it: access to .* \(x row 1\)",
    ):
        encode_prompts("x", [{"prompt": [{"role": "user", "content": "It"}]}], tokenizer)


def test_the_encoded_conversation(models):
    tokenizer = load_tokenizer("policy", str(models / "chat"))
    message = {"role": "user", "content": "It was a treat"}
    expected = tokenizer("system : Do not . user : It was a treat . assistant :")["input_ids"]
    answered = [message, {"role": "assistant", "content": "Do not"}]
    for row in ({"prompt": [message]}, {"messages": answered}):
        (prompt,) = encode_prompts("x", [row], tokenizer, system="Do not")
        assert prompt.tokens == expected
    (prompt,) = encode_prompts("x", [{"prompt": "It was"}], tokenizer)
    assert prompt.tokens == tokenizer("It was")["input_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (PROMPTS[2:], "one of the arguments --prompts --texts is required"),
        ((*PROMPTS, "--texts", "texts.txt"), "--texts: not allowed with argument --prompts"),
        (("--prompts", "no.jsonl"), "prompts: no.jsonl does not exist"),
        (("--texts", "prompts.jsonl"), "prompts.jsonl row 1 has no column text; its columns: prompt"),
        (("--prompts", "texts.jsonl"), "whose beginnings are no prompts here"),
        (("--prompts", "chat.jsonl"), "chat.jsonl row 1 is a conversation, but the tokenizer has no chat"),
        ((*PROMPTS, "--completions_per_prompt", "0"), "must be positive and finite, got 0"),
        (("--texts", "texts.txt", "--teacher_system", "Be"), "teacher_system: needs prompts: texts have no"),
        ((*PROMPTS, "--seed", "-1"), "seed: must be at least 0, got -1"),
        ((*PROMPTS, "--device", "tpu9"), "device: tpu9 cannot be used"),
        (("--prompts", "prompts.jsonl", "--max_new_tokens", "99"), "exceeds the policy's context length, 32"),
    ],
)
def test_wrong_usage_ends_in_one_line(kl, arguments, message):
    code, output, error = kl(*arguments)
    assert (code, output) == (2, "")
    assert len(error.splitlines()) == 1
    assert message in error


@pytest.mark.parametrize(
    ("models_given", "message"),
    [
        ({"policy": "other"}, "has another vocabulary than the policy: id 2 is"),
        ({"policy": "missing"}, "missing does not exist"),
        ({"reference": "prompts.jsonl"}, "prompts.jsonl: cannot be loaded: "),
    ],
)
def test_wrong_models_end_in_one_line(kl, models_given, message):
    code, output, error = kl(*PROMPTS, **models_given)
    assert (code, output) == (2, "")
    assert len(error.splitlines()) == 1
    assert message in error
