"""`predict` completes the prompts of a file, and writes completions with their rewards and KLs."""

import json

import pytest
import torch
from written import write_rows

from lit_klrb.models.loading import load_model, load_tokenizer
from lit_klrb.rewards import load_reward

PROMPTS = ["The film", "What a", "I saw this thriller", "The film", "The acting was superb"]


def predicted(run):
    return [json.loads(line) for line in (run / "predictions.jsonl").read_text("utf-8").splitlines()]


def slow_kl(chain, row):
    """The sum over a completion's tokens of the KL over the vocabulary, from the text of the row.

    None if the text lacks a special token of the completion, such as EOS.
    """
    tokenizer = load_tokenizer("path", chain.checkpoint("sft"))
    prompt, completion = (tokenizer(row[name])["input_ids"] for name in ("prompt", "completion"))
    if len(completion) != row["length"]:
        return None
    tokens = torch.tensor([prompt + completion])
    logits = []
    for stage in ("rloo", "sft"):
        model = load_model("path", chain.checkpoint(stage)).eval().double()
        with torch.no_grad():
            logits.append(model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1))
    policy, reference = logits
    return (policy.exp() * (policy - reference)).sum().item()


def test_predictions_of_another_program_are_not_replaced(chain, tmp_path, capsys):
    mine = '{"prompt": "What a", "prediction": "film"}\n'
    (tmp_path / "predictions.jsonl").write_text(mine)
    assert chain.run("predict", "rloo", "--ckpt_path", chain.checkpoint("rloo"), run=tmp_path) == 2
    line = f"trainer.default_root_dir: {tmp_path}/predictions.jsonl holds something else"
    assert line in capsys.readouterr().err
    assert (tmp_path / "predictions.jsonl").read_text() == mine


def test_every_prompt_of_a_file_is_completed_in_its_order(chain, tmp_path, capsys):
    source = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    settings = ["--data.source", source, "--data.eval_size", "1", "--data.eval_batch_size", "2"]
    extra = [*settings, "--model.evaluation_completions", "3", "--ckpt_path", chain.checkpoint("rloo")]
    assert chain.run("predict", "rloo", *extra, run=tmp_path) == 0
    rows = predicted(tmp_path)
    assert [row["prompt"] for row in rows] == [text for text in PROMPTS for _ in range(3)]
    reward, tokenizer = load_reward("grammar"), load_tokenizer("path", chain.checkpoint("sft"))
    for row in rows:
        ids = [i for name in ("prompt", "completion") for i in tokenizer(row[name])["input_ids"]]
        assert row["reward"] == pytest.approx(reward([tokenizer.decode(ids)]).item(), abs=1e-5)
    expected = {row["kl"]: slow_kl(chain, row) for row in rows}
    compared = {kl: slow for kl, slow in expected.items() if slow is not None}
    assert len(compared) > 5
    assert list(compared) == pytest.approx(list(compared.values()), rel=1e-4, abs=1e-6)
    assert max(compared) > 1e-3
    printed = capsys.readouterr().out
    assert f"15 rows in {tmp_path}/predictions.jsonl" in printed
    assert all(name in printed for name in ("prompt", "completion", "reward", "kl", "length"))


def test_a_policy_without_a_reward(chain, tmp_path):
    source = write_rows(tmp_path / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    student = ["--model.policy_config", "null", "--model.policy_path", chain.checkpoint("sft")]
    assert chain.run("predict", "distill", *student, "--data.source", source, run=tmp_path) == 0
    assert predicted(tmp_path)[0].keys() == {"prompt", "completion", "kl", "length"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "The film"}], "has no test split with rows; its splits: train; one in 20 of its"),
        ([{"prompt": 5}], "1 of 1 test rows cannot be read: 1 a number as prompt"),
        ([{"words": "The film"}], "1 no column prompt, messages or text; its columns: words"),
        ([{"prompt": ""}], "1 of 1 test rows cannot be read: 1 empty"),
        (
            [{"prompt": "The film " * 70}],
            "1 of 1 test rows cannot be read: 1 longer than the policy's context length",
        ),
    ],
)
def test_what_cannot_be_completed_is_one_line(chain, tmp_path, capsys, rows, message):
    source = write_rows(tmp_path / "rows.jsonl", rows)
    extra = ["--data.source", source, "--ckpt_path", chain.checkpoint("rloo")]
    assert chain.run("predict", "rloo", *extra, run=tmp_path) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: data.init_args.source: {source}")
    assert message in line
    assert not (tmp_path / "predictions.jsonl").exists()
