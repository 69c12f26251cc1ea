"""A reward model of preferences: its loss, its ranking of held-out pairs, and its use as a reward."""

import json
import logging
import math
from types import SimpleNamespace

import pytest
import torch
from chat_tokenizer import chat_tokenizer
from written import save, write_rows

from lit_klrb.data.corpora import Source, load_rows
from lit_klrb.data.kinds import Row
from lit_klrb.data.modules import LabelledTextDataModule, TextPairDataModule
from lit_klrb.data.prompts import grammar_pairs
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.loading import CLASSIFIER, fresh_model
from lit_klrb.modules import PairwiseRewardModule
from lit_klrb.rewards import GrammarReward, load_reward

CONFIG = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
PAIRS = ["--model", "PairwiseRewardModule", "--data", "TextPairDataModule"]
LONGER = [
    *("--data.train_size", "2048", "--data.eval_size", "256", "--data.batch_size", "32"),
    *("--model.learning_rate", "0.01", "--trainer.max_steps", "100", "--trainer.val_check_interval", "100"),
]


def data_of(tokenizer, source, positions=64, kind=TextPairDataModule, **settings):
    """The data module, attached to a tokenizer and a context."""
    data = kind(source=str(source), **{"train_size": 0, "eval_size": 8, **settings})
    config = SimpleNamespace(max_position_embeddings=positions)
    learner = SimpleNamespace(
        tokenizer=tokenizer, trained=SimpleNamespace(config=config), reads=data.contents
    )
    data.trainer = SimpleNamespace(lightning_module=learner, max_steps=-1)
    return data


@pytest.mark.parametrize("outputs", [1, 2])
def test_loss_and_gradient_are_those_of_one_pair_after_another(tmp_path, outputs):
    tokenizer = grammar_tokenizer()
    names = {"id2label": {index: str(index) for index in range(outputs)}}
    model = fresh_model({**CONFIG, **NO_DROPOUT, **names}, tokenizer, 3, CLASSIFIER)
    module = PairwiseRewardModule(classifier_path=str(save(tmp_path / "model", model, tokenizer)))
    module.classifier, module.tokenizer = module.build()
    module.log = lambda *args, **kwargs: None
    module._trainer = SimpleNamespace(global_rank=0)
    data = data_of(tokenizer, "grammar", train_size=6)
    data.setup("fit")
    pairs = data.examples("train")
    assert len({len(ids) for pair in pairs for ids in pair}) > 3
    batch = data.collate("train", pairs)
    loss = module.training_step(batch, 0)
    loss.backward()

    slow = model.double()
    losses = []
    for chosen, rejected in pairs:
        first, second = (slow(input_ids=torch.tensor([ids])).logits[0] for ids in (chosen, rejected))
        rewards = [logits[0] if outputs == 1 else logits[1] - logits[0] for logits in (first, second)]
        losses.append(torch.log(1 + torch.exp(rewards[1] - rewards[0])))
    mean = torch.stack(losses).mean()
    mean.backward()
    assert loss.item() == pytest.approx(mean.item(), abs=1e-6)
    measured = module.measures(batch)
    assert measured[0].tolist() == pytest.approx([value.item() for value in losses], abs=1e-6)
    margins = [-math.log(math.expm1(value.item())) for value in losses]
    assert measured[2].tolist() == pytest.approx(margins, abs=1e-5)
    assert measured[1].tolist() == [float(margin > 0) for margin in margins]
    for (name, fast), plain in zip(module.classifier.named_parameters(), slow.parameters(), strict=True):
        assert torch.allclose(fast.grad, plain.grad.float(), atol=2e-6), name


@pytest.fixture(scope="module")
def run(chain, tmp_path_factory):
    """The run directory of a model that was trained on pairs of reviews for a while."""
    root = tmp_path_factory.mktemp("pairs")
    assert chain.run("fit", "reward", *PAIRS, *LONGER, run=root) == 0
    return root


def test_it_ranks_held_out_pairs(run):
    final = json.loads((run / "summary.json").read_text())["final"]
    exact = GrammarReward()
    odds = torch.stack([exact(pair.answers) for pair in grammar_pairs("test", 2000)])
    best = (odds[:, 0] > odds[:, 1]).float().mean().item()
    assert 0.75 < best < 0.95, "preferences are random: no reward ranks all pairs"
    assert best - 0.1 < final["accuracy"] < best + 0.1, "the exact odds tie on a tenth of the pairs"
    assert final["loss"] < 0.9 * math.log(2)
    assert final["margin"] > 0.5


def test_its_checkpoint_is_a_reward(run):
    path = str(run / "checkpoints" / "last.ckpt")
    reward, exact = load_reward(path), load_reward("grammar")
    texts = [review.text for review in exact.grammar.reviews(64, 7)]
    assert torch.corrcoef(torch.stack([reward(texts), exact(texts)]))[0, 1] > 0.6
    trained = PairwiseRewardModule.load_from_checkpoint(path)
    ids = torch.tensor([trained.tokenizer(texts[0])["input_ids"]])
    with torch.no_grad():
        assert reward(texts[:1]).item() == pytest.approx(
            trained.classifier.eval()(ids).logits.item(), abs=1e-5
        )


def test_policies_are_trained_with_it_and_it_predicts(run, chain, tmp_path):
    path = str(run / "checkpoints" / "last.ckpt")
    assert chain.run("fit", "rloo", "--model.reward_path", path, run=tmp_path / "run") == 0
    assert chain.run("predict", "reward", *PAIRS, "--ckpt_path", path, run=tmp_path) == 0
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    reward = load_reward(path)
    assert rows[0].keys() == {"chosen", "rejected", "chosen_reward", "rejected_reward"}
    for row in rows[:3]:
        given = reward([row["chosen"], row["rejected"]]).tolist()
        assert [row["chosen_reward"], row["rejected_reward"]] == pytest.approx(given, abs=1e-5)


def test_pairs_of_the_embedded_world_follow_the_bradley_terry_model():
    pairs, exact = grammar_pairs("train", 3000), GrammarReward()
    odds = torch.stack([exact(pair.answers) for pair in pairs]).double()
    difference = (odds[:, 0] - odds[:, 1]).abs()
    better = (odds[:, 0] > odds[:, 1]).double()
    expected = difference.sigmoid()
    untied = difference > 0
    for part in (untied, untied & (difference < 1.5), difference > 3):
        excess = better[part] - expected[part]
        error = (expected[part] * (1 - expected[part])).sum().sqrt()
        assert part.sum() > 200
        assert abs(excess.sum()) < 4 * error


def test_pairs_of_one_prompt_are_in_one_split(tmp_path):
    rows = [
        {"prompt": f"question {n}: ", "chosen": f"good {k}", "rejected": f"bad {k}"}
        for n in range(150)
        for k in range(3)
    ]
    source = Source(write_rows(tmp_path / "pairs.jsonl", rows), "preferences")
    prompts = {split: [pair.prompt for pair in load_rows(source, split)] for split in ("train", "test")}
    assert not set(prompts["train"]) & set(prompts["test"])
    assert len(prompts["test"]) == 3 * len(set(prompts["test"])) > 0
    without = [{"chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(150)]
    source = Source(write_rows(tmp_path / "without.jsonl", without), "preferences")
    sizes = [len(load_rows(source, split)) for split in ("train", "validation", "test")]
    assert sum(sizes) == 150
    assert min(sizes) > 0


def test_a_text_is_its_prompt_and_its_completion(tmp_path):
    rows = [{"prompt": f"ab {n}", "chosen": " yes", "rejected": " no"} for n in range(60)]
    tokenizer = chat_tokenizer()
    data = data_of(tokenizer, write_rows(tmp_path / "pairs.jsonl", rows))
    data.setup("fit")
    for pair, ids in zip(data.rows["train"], data.examples("train"), strict=True):
        assert ids == tuple(tokenizer(pair.prompt + end)["input_ids"] for end in (" yes", " no"))
        assert ids[0][0] == tokenizer.bos_token_id
    data.system_prompt = "Be"
    with pytest.raises(
        ConfigurationError, match=r"^system_prompt: needs conversations, but the pairs are text"
    ):
        data.examples("train")


def test_pairs_that_are_too_long_are_left_out(tmp_path, caplog):
    rows = [{"chosen": f"{n}" + "yes" * (9 * (n % 3 == 0)), "rejected": f"no {n}"} for n in range(80)]
    data = data_of(chat_tokenizer(), write_rows(tmp_path / "pairs.jsonl", rows), max_tokens=12)
    data.setup("fit")
    with caplog.at_level(logging.WARNING):
        kept = data.examples("train")
    assert 0 < len(kept) < len(data.rows["train"])
    assert all(max(map(len, pair)) <= 12 for pair in kept)
    assert "longer than max_tokens=12" in caplog.text
    data.rows["train"] += [Row("", ("same", "same"))]
    assert data.examples("train") == kept
    assert "1 chosen equals rejected" in caplog.text
    data.rows["train"] = [Row("", ("same", "same"))] * 2
    with pytest.raises(ConfigurationError, match=r"^source: .* 2 of 2 train .*chosen equals rejected"):
        data.examples("train")
    data.setup("fit")
    data.max_tokens = 3
    with pytest.raises(ConfigurationError, match=r"^source: .* cannot be read: .* longer than max_tokens=3"):
        data.examples("train")
    data.max_tokens = 65
    with pytest.raises(ConfigurationError, match=r"^max_tokens: 65 exceeds the model's context length, 64"):
        data.examples("train")


@pytest.mark.parametrize("kind", [TextPairDataModule, LabelledTextDataModule])
def test_rows_that_are_cut_are_counted_once(tmp_path, caplog, kind):
    length = {n: 30 if n % 4 == 0 else 3 for n in range(80)}
    texts = {n: f"{n} " + "y" * length[n] for n in length}
    rows = [{"text": texts[n], "label": 1, "chosen": texts[n], "rejected": f"no {texts[n]}"} for n in length]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    data = data_of(chat_tokenizer(), source, kind=kind, max_tokens=12, overlong="cut")
    data.setup("fit")
    data.examples("train")
    cut = sum("yyyyy" in row.answers[0] for row in data.rows["train"])
    total = len(data.rows["train"])
    assert data.selections["train"].summary()["cut"] == cut > 0
    assert f"the answers of {cut} of {total} train rows are cut to max_tokens=12" in caplog.text
    data.overlong = "refuse"
    with pytest.raises(
        ConfigurationError, match=r"^overlong: .* has a train row of \d+ tokens; max_tokens=12"
    ):
        data.examples("train")


def test_a_pair_whose_cut_texts_are_equal_is_not_counted_as_cut(tmp_path):
    rows = [{"chosen": f"{n} yes", "rejected": f"{n} no"} for n in range(40)]
    data = data_of(chat_tokenizer(), write_rows(tmp_path / "rows.jsonl", rows), max_tokens=12, overlong="cut")
    data.setup("fit")
    data.rows["train"] += [Row("", ("y" * 20, "y" * 21))]
    data.examples("train")
    shown = data.selections["train"].summary()
    assert (shown["cut"], shown["left_out"]) == (0, {"chosen equals rejected": 1})


def test_texts_without_a_label_are_counted(tmp_path, caplog):
    rows = [{"text": f"text {n}", "label": n % 3 - 1} for n in range(150)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    loaded = load_rows(Source(source, "labels"))
    unknown = sum(row.label is None for row in loaded)
    data = data_of(chat_tokenizer(), source, kind=LabelledTextDataModule)
    data.setup("fit")
    assert len(data.rows["train"]) == len(loaded) - unknown
    line = f"{source}: {unknown} of {len(loaded)} train rows are left out: no label"
    assert caplog.messages.count(line) == 1


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([*PAIRS[:2]], "data: LabelledTextDataModule provides labelled texts, but PairwiseRewardModule"),
        (
            [*PAIRS, "--data.source", "{texts}"],
            "data.init_args.source: {texts}: 60 of 60 train rows cannot be read: 60 no column chosen",
        ),
        (
            [*PAIRS, "--model.classifier_config", "null", "--model.classifier_path", "{three}"],
            "model.init_args.classifier_path: {three} has 3 labels; the reward needs one or two",
        ),
        ([*PAIRS, "--model.classifier_config.num_labels", "2"], "classifier_config: num_labels is"),
    ],
)
def test_what_cannot_be_trained_on_is_one_line(chain, tmp_path, capsys, extra, message):
    names = {"id2label": {index: str(index) for index in range(3)}}
    tokenizer = grammar_tokenizer()
    save(tmp_path / "three", fresh_model({**CONFIG, **names}, tokenizer, 0, CLASSIFIER), tokenizer)
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": f"review {n}"} for n in range(60)])
    files = {"three": tmp_path / "three", "texts": texts}
    extra = [word.format_map(files) if word.startswith("{") else word for word in extra]
    assert chain.run("fit", "reward", *extra, run=tmp_path / "run") == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: ")
    assert message.format_map(files) in line
