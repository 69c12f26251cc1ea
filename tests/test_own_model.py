"""Every command of docs/own_model.md, as written, on a small Llama."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from gguf_files import TEMPLATE, llama

from lit_klrb.cli.main import main
from lit_klrb.data.tokenizer import train_bpe
from lit_klrb.models.loading import load_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own_model.md").read_text("utf-8")
MODEL = "runs/models/smollm2"
QUESTIONS = "configs/chat/questions"  # of which the first few are enough
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
COMMANDS = [
    shlex.split(command.replace("\\\n", ""))[1:]
    for command in re.findall(r"^lit-klrb (?:.*\\\n)*.*$", PAGE, re.MULTILINE)
]
# Settings that shorten a run; those of the page are given before.
SHORT = [
    *("--trainer.max_steps", "2", "--trainer.val_check_interval", "2"),
    *("--trainer.enable_progress_bar", "false"),
]
SMALLER = {
    "my_model.yaml": ["--model.max_new_tokens", "4"],
    "--model.policy_layers": ["--model.policy_layers", "[0, 2]"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with what the page says there is, and a Llama of three layers in place of its model's 30."""
    root = tmp_path_factory.mktemp("own")
    questions = root / QUESTIONS
    questions.mkdir(parents=True)
    (root / "configs" / "demo").symlink_to(ROOT / "configs" / "demo")
    for file in (ROOT / QUESTIONS).iterdir():
        (questions / file.name).write_text("".join(file.read_text("utf-8").splitlines(True)[:8]))
    tokenizer = train_bpe(["What is a bridge?"], vocab_size=280)
    tokenizer.chat_template = TEMPLATE
    model = llama(len(tokenizer), num_hidden_layers=3, max_position_embeddings=512)
    for part in (model, tokenizer):
        part.save_pretrained(root / MODEL)
    names = {"messages": "chats.jsonl", "chosen": "pairs.jsonl"}
    for example in EXAMPLES:
        for column in names.keys() & example.keys():
            rows = [json.dumps(example).replace("bridge", f"bridge {number}") for number in range(24)]
            (root / names[column]).write_text("\n".join(rows))
    for file in re.finditer(r"# (my_\w+\.(?:py|yaml))\n.*?(?=```)", PAGE, re.DOTALL):
        (root / file[1]).write_text(file[0])
    return root


def test_the_commands_run_in_this_order(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    for command in COMMANDS:
        short = [word for key, words in SMALLER.items() if key in command for word in words]
        given = [*command, *short, *(SHORT * (command[0] == "fit"))]
        assert main(given) == 0, (command, capsys.readouterr().err)
    sys.modules.pop("my_rewards")
    runs = {path.parent.name: json.loads(path.read_text()) for path in place.glob("runs/own/*/summary.json")}
    assert runs.keys() == {"rloo", "lora", "sft", "dpo", "distill"}
    assert all(run["state"] == "done" and run["steps"] == 2 for run in runs.values())
    assert all(run["final"]["kl"] > 0 for name, run in runs.items() if name != "sft")
    assert load_model("policy_path", str(place / "model")).config.model_type == "llama"
    student = load_model("policy_path", str(place / "runs/own/distill/checkpoints/last.ckpt"))
    assert student.config.num_hidden_layers == 2
    assert "KL(policy‖reference)" in capsys.readouterr().out
