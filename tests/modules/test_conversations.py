"""Training on conversations with a model whose tokenizer has a chat template."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from chat_tokenizer import by_hand, chat_tokenizer, message
from written import save, write_rows, write_splits

from lit_klrb.data.modules import TextDataModule
from lit_klrb.models.loading import CLASSIFIER, fresh_model
from lit_klrb.modules.dpo import DPOModule
from lit_klrb.rewards import load_reward

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 64}
QUESTIONS = [f"Is {number} even?" for number in range(24)]
CALLS = []


def evenness(prompts, completions, answer, **columns):
    """TRL's signature for conversations."""
    assert not columns
    for prompt, completion, wanted in zip(prompts, completions, answer, strict=True):
        assert [part["role"] for part in prompt] == ["system", "user"]
        assert prompt[1]["content"] == QUESTIONS[wanted]
        assert completion[0].keys() == {"role", "content"}
    CALLS.append(len(completions))
    return [float(len(completion[0]["content"])) for completion in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy, a classifier, both with a chat template, and conversations."""
    root = tmp_path_factory.mktemp("chat")
    for name, settings in (("policy", {}), ("classifier", {"role": CLASSIFIER})):
        tokenizer = chat_tokenizer()
        save(root / name, fresh_model(CONFIG, tokenizer, seed=0, **settings), tokenizer)
    rows = [{"prompt": [message("user", text)], "answer": number} for number, text in enumerate(QUESTIONS)]
    write_splits(root / "prompts", train=rows[:16], validation=rows[16:20], test=rows[20:])
    answers = [message("assistant", text) for text in ("Yes", "No, it is not, as far as I know")]
    pairs = [{"prompt": row["prompt"], "chosen": answers[:1], "rejected": answers[1:]} for row in rows[:16]]
    write_rows(root / "pairs.jsonl", pairs)
    return root


@pytest.fixture
def fit(chain, folder, tmp_path):
    """A stage of the demo with these models and prompts."""
    paths = [
        word
        for name in ("policy_path", "reference_path")
        for word in (f"--model.{name}", str(folder / "policy"))
    ]
    source = ["--data.source", str(folder / "prompts"), "--data.eval_size", "4"]

    def run(stage, *extra):
        return chain.run("fit", stage, *paths, *source, *extra, run=tmp_path / "run")

    return run


def test_rloo_on_conversations_with_a_reward_of_messages(fit, monkeypatch, folder):
    module = ModuleType("chat_rewards")
    module.evenness = evenness
    monkeypatch.setitem(sys.modules, module.__name__, module)
    reward = ["--model.reward_path", "chat_rewards:evenness", "--data.train_size", "0"]
    CALLS.clear()
    assert fit("rloo", *reward, "--data.system_prompt", "Be brief.") == 0
    assert set(CALLS) == {16}, "4 prompts with 4 completions"


def test_preferences_of_conversations_are_tokens_of_the_template(fit, folder, monkeypatch):
    seen = []
    original = DPOModule.given_pairs
    monkeypatch.setattr(
        DPOModule, "given_pairs", lambda self, rows: seen.append((self, original(self, rows))) or seen[0][1]
    )
    reward = ["--model.reward_path", str(folder / "classifier"), "--model.max_new_tokens", "9"]
    assert fit("dpo", "--data.preferences", str(folder / "pairs.jsonl"), *reward) == 0
    module, pairs = seen[0]
    tokenizer = module.tokenizer
    assert len(pairs) == 16
    prompts = [by_hand(tokenizer, ("user", question)) for question in QUESTIONS[:16]]
    assert sorted(pair.prompt for pair in pairs) == sorted(prompts)
    for pair in pairs:
        assert pair.chosen == [
            *tokenizer("Yes", add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        assert tokenizer.decode(pair.rejected) == "No, it is not, as far as I know<eos>"


def test_whole_conversations_end_with_one_eos(folder):
    tokenizer = chat_tokenizer()
    data = TextDataModule(source="unused", max_tokens=64, system_prompt="Be")
    learner = SimpleNamespace(tokenizer=tokenizer, trained=SimpleNamespace(config=None), reads=data.contents)
    data.trainer = SimpleNamespace(lightning_module=learner, max_steps=-1)
    rows = [{"messages": [message("user", "Hi"), message("assistant", f"Yes {n}")]} for n in range(40)]
    data.source = write_rows(folder / "messages.jsonl", rows)
    data.setup("fit")
    texts = data.examples("train")
    texts = [text.ids for text in texts]
    numbers = {int(tokenizer.decode(ids, skip_special_tokens=True).split()[-1]) for ids in texts}
    assert len(numbers) == len(texts) > 30
    for ids in texts:
        answer = tokenizer.decode(ids, skip_special_tokens=True).splitlines()[-1]
        expected = by_hand(tokenizer, ("system", "Be"), ("user", "Hi"), ("assistant", answer), begun=False)
        assert ids == expected[:-1], "without the newline after EOS"


def test_a_classifier_reads_conversations_in_its_own_template(folder):
    """Public report: two BOS where tokenizer and template add one each."""
    reward = load_reward(str(folder / "classifier"))
    columns = {
        "prompts": [[message("user", question)] for question in QUESTIONS[:3]],
        "completions": [[message("assistant", text)] for text in ("Yes", "No", "Perhaps so")],
    }
    scores = reward(["unused"] * 3, columns)
    for score, prompt, completion in zip(scores, *columns.values(), strict=True):
        parts = [tuple(part.values()) for part in (*prompt, *completion)]
        ids = by_hand(reward.tokenizer, *parts, begun=False)[:-2]
        with torch.no_grad():
            logits = reward.classifier(input_ids=torch.tensor([ids])).logits[0]
        assert score.item() == pytest.approx((logits[1] - logits[0]).item(), abs=1e-5)
    texts = ["It is even", "It is odd"]
    assert torch.equal(reward(texts, {"prompts": ["It"] * 2, "completions": [" is"] * 2}), reward(texts))
    reward.tokenizer.chat_template = None
    assert torch.equal(reward(texts, {key: column[:2] for key, column in columns.items()}), reward(texts))


@pytest.mark.parametrize(
    ("stage", "extra", "message"),
    [
        (
            "rloo",
            ["--data.source", "{long}"],
            "source: {long}: 1 of 1 train rows cannot be read: 1 longer than the policy's context length=64",
        ),
        (
            "dpo",
            ["--data.preferences", "{long_pairs}", "--model.reward_path", "{classifier}"],
            "preferences: {long_pairs}: 1 of 1 train rows cannot be read: 1 longer than max_tokens=64",
        ),
        ("rloo", ["--data.source", "grammar", "--data.system_prompt", "Be"], "system_prompt: needs "),
        ("sft", ["--data.source", "{reviews}", "--data.system_prompt", "Be"], "system_prompt: needs "),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(fit, folder, chain, tmp_path, capsys, stage, extra, message):
    files = {name: tmp_path / name for name in ("long", "long_pairs", "reviews")}
    for name, place in files.items():
        for split in ("train", "validation", "test"):
            long = [{"role": "user", "content": f"{split}{' so' * 33}"}]
            yes = {"role": "assistant", "content": "Yes"}
            rows = {
                "long": {"prompt": long},
                "long_pairs": {"prompt": long, "chosen": [yes], "rejected": [yes]},
                "reviews": {"text": f"review {split}"},
            }
            write_rows(place / f"{split}.jsonl", [rows[name]])
    run = fit if stage != "sft" else lambda *args: chain.run("fit", *args, run=tmp_path / "run")
    files["long_pairs"] = files["long_pairs"] / "train.jsonl"
    files["classifier"] = folder / "classifier"
    assert run(stage, *(word.format_map(files) for word in extra)) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"error: data.init_args.{message.format_map(files)}")
