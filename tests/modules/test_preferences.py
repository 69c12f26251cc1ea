"""Given and cached preference pairs."""

from types import SimpleNamespace

import pytest
import torch
from runs import equal, weights_of
from written import write_rows

from lit_klrb.cli.main import main
from lit_klrb.data.batches import pad
from lit_klrb.data.corpora import load_rows
from lit_klrb.data.modules import PreferenceDataModule
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.models import loading
from lit_klrb.modules.dpo import DPOModule
from lit_klrb.rollouts.pair import Pair
from lit_klrb.run import cache

ROWS = [
    {"prompt": f"The {noun}", "chosen": " was a marvelous film", "rejected": f" was {word}"}
    for noun, word in zip(
        ["film", "plot", "acting", "story"],
        ["bad", "so very bad and so very dull and ok", "ok", "dull"],
        strict=True,
    )
]


@pytest.fixture
def preferences(tmp_path):
    return write_rows(tmp_path / "preferences.jsonl", ROWS)


def test_given_pairs_are_trained_on_with_the_references_logprobs(chain, tmp_path, preferences, monkeypatch):
    """360-LLaMA-Factory#26, AReno#216: answers longer than max_new_tokens are those of the file."""
    seen = []
    original = DPOModule.given_pairs
    monkeypatch.setattr(
        DPOModule, "given_pairs", lambda self, rows: seen.append((self, original(self, rows))) or seen[0][1]
    )
    assert chain.run("fit", "dpo", "--data.preferences", preferences, run=tmp_path / "run") == 0
    assert not equal(weights_of(tmp_path / "run"), weights_of(chain.root / "dpo"))
    module, pairs = seen[0]
    eos, reference = module.tokenizer.eos_token_id, loading.load_model("path", chain.checkpoint("sft")).eval()
    assert len(pairs) == len(ROWS)
    by_prompt = {tuple(module.tokenizer(row["prompt"])["input_ids"]): row for row in ROWS}
    for pair in pairs:
        row = by_prompt.pop(tuple(pair.prompt))
        for ids, name, logprob in (
            (pair.chosen, "chosen", pair.chosen_ref_logprob),
            (pair.rejected, "rejected", pair.rejected_ref_logprob),
        ):
            text = module.tokenizer(row[name], add_special_tokens=False)["input_ids"]
            assert ids == [*text, eos]
            batch = pad([pair.prompt + ids], 0, side="left")["tokens"]
            with torch.no_grad():
                logprobs = reference(batch).logits.log_softmax(-1)[0, len(pair.prompt) - 1 : -1]
            assert logprob == pytest.approx(
                logprobs.gather(1, torch.tensor(ids)[:, None]).sum().item(), rel=1e-4
            )


def test_check_names_the_data_that_its_numbers_are_of(chain, preferences, capsys):
    assert main(["check", *chain.commands.argv("fit", "dpo", "--data.preferences", preferences)[1:]]) == 0
    found = f"rows: of grammar and {preferences}, {len(ROWS)} preferences, 0 left out"
    assert found in capsys.readouterr().out


def test_pairs_do_not_have_the_prompts_of_the_evaluation(tmp_path, caplog):
    texts = dict.fromkeys(row.text for row in load_rows("grammar", size=80))
    rows = [{"prompt": text, "chosen": " Do not miss it!", "rejected": " Avoid it!"} for text in texts]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    learner = SimpleNamespace(tokenizer=grammar_tokenizer(), trained=SimpleNamespace(config=None))
    data = PreferenceDataModule(source=source, preferences=source, train_size=0)
    shown = data.preview(learner)
    evaluated = [prompt.tokens for prompt in data.examples("validation")]
    trained = [pair.prompt for pair in data.examples("train")]
    assert evaluated
    assert not [tokens for tokens in trained if tokens in evaluated]
    tests = len(rows) - len(trained) - len(evaluated)
    assert tests > 0
    assert shown["left_out"] == {"a prompt of an evaluation": len(evaluated) + tests}
    assert f"{len(evaluated) + tests} of {len(rows)} train rows are left out" in caplog.text


@pytest.mark.parametrize("given", [False, True])
def test_the_references_part_is_computed_once(chain, tmp_path, preferences, monkeypatch, given):
    monkeypatch.setenv("LIT_KLRB_CACHE", str(tmp_path / "cache"))
    extra = ["--data.preferences", preferences] if given else []
    calls = []
    for name in ("_complete", "_ref_logprobs"):
        original = getattr(DPOModule, name)
        monkeypatch.setattr(
            DPOModule, name, lambda *args, original=original: calls.append(1) or original(*args)
        )
    assert chain.run("fit", "dpo", *extra, run=tmp_path / "first") == 0
    assert len(calls) == 1
    assert chain.run("fit", "dpo", *extra, run=tmp_path / "second") == 0
    assert len(calls) == 1
    assert equal(weights_of(tmp_path / "first"), weights_of(tmp_path / "second"))
    (file,) = (tmp_path / "cache").glob("[cl]o*")
    file.write_bytes(file.read_bytes()[:100])
    assert chain.run("fit", "dpo", *extra, run=tmp_path / "third") == 0
    assert len(calls) == 2
    assert equal(weights_of(tmp_path / "first"), weights_of(tmp_path / "third"))
    assert chain.run("fit", "dpo", *extra, "--model.temperature", "0.5", run=tmp_path / "other") == 0
    assert len(calls) == 3


def test_the_evaluation_before_the_first_step_is_computed_once(chain, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIT_KLRB_CACHE", str(tmp_path / "cache"))
    numbers, original = [], Pair.score
    monkeypatch.setattr(Pair, "score", lambda *args: numbers.append(1) or original(*args))

    def scored(name, *options):
        numbers.clear()
        assert chain.run("fit", "rloo", *options, "--trainer.max_steps", "1", run=tmp_path / name) == 0
        return len(numbers)

    every = scored("first")
    assert "from the cache" not in capsys.readouterr().out
    assert scored("second") == every - 1
    assert "prompts; completions of an earlier run's, from the cache)" in capsys.readouterr().out
    # What is of another form is computed again
    (file,) = (tmp_path / "cache").glob("evaluation-*")
    for other in ([1, 2], [(torch.zeros(1),) * 3, (torch.zeros(1),) * 3], [[], {}], "text"):
        torch.save({"result": other}, file)
        assert scored("again") == every
        assert "from the cache" not in capsys.readouterr().out
    for file in ("metrics/attempt_0/metrics.csv", "evaluation.csv"):
        assert (tmp_path / "second" / file).read_bytes() == (tmp_path / "first" / file).read_bytes()
    others = ("policy_path", chain.checkpoint("sft")), ("temperature", "0.5"), ("evaluation_seed", "7")
    assert [scored(name, f"--model.{name}", value) for name, value in others] == [every] * 3


def test_a_digest_is_of_every_weight(chain):
    model = loading.load_model("path", chain.checkpoint("sft"))
    before = cache.weights_digest(model)
    assert cache.weights_digest(loading.load_model("path", chain.checkpoint("sft"))) == before
    with torch.no_grad():
        list(model.parameters())[-1].view(-1)[-1] += 1e-6
    assert cache.weights_digest(model) != before
