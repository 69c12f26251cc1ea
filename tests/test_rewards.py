import asyncio
import math
import sys
from types import ModuleType
from urllib.error import HTTPError

import pytest
import torch
from written import save

from lit_klrb import rewards
from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.errors import ConfigurationError, NoAnswerError
from lit_klrb.models import loading
from lit_klrb.reward_functions import FunctionReward, LateColumns, TrainerState, is_unavailable
from lit_klrb.rewards import ClassifierReward, GrammarReward, TrainingReward, load_reward


def test_columns_are_made_once_and_only_for_a_reward_that_reads_them():
    made = []
    columns = LateColumns(lambda: made.append(1) or {"prompts": ["The film"], "completions": [" was good"]})
    state = TrainerState(0, 1), True
    for reward, times in ((GrammarReward(), 0), (FunctionReward("own", lambda completions: [2.0]), 1)):
        for _ in range(2):
            assert TrainingReward(reward, lambda: state)(["The film was good"], columns).shape == (1,)
        assert len(made) == times


def test_the_grammars_reward_is_its_clipped_log_odds():
    grammar, reward = ReviewGrammar(), load_reward("grammar")
    texts = [review.text for review in grammar.reviews(20, 3)]
    scores = reward(texts)
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx([grammar.clipped_log_odds(text) for text in texts])
    assert len(set(scores.tolist())) > 3


def test_any_function_is_a_reward():
    assert load_reward("builtins:sorted")([1, 2]).tolist() == [1, 2]
    reward = FunctionReward("words", lambda texts: [len(text.split()) for text in texts])
    assert reward(["a b", "c"]).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_ends_with_its_text(score):
    reward = FunctionReward("mine", lambda texts: [0.0] * (len(texts) - 1) + [score])
    with pytest.raises(ConfigurationError, match=f"mine gave {score} for the text 'the last'"):
        reward(["the first", "the last"])


def test_one_score_a_text():
    with pytest.raises(ConfigurationError, match="mine must return 2 numbers for 2 texts, got 1 elements"):
        FunctionReward("mine", lambda texts: [1.0])(["a", "b"])


@pytest.mark.parametrize("function", [math.sqrt, lambda: [1.0], lambda texts, more: [1.0]])
def test_a_function_of_something_else(function):
    with pytest.raises(ConfigurationError, match=r"^reward_path: mine cannot be called with a list of texts"):
        FunctionReward("mine", function)(["a"])


def test_an_error_within_the_function_is_its_own():
    with pytest.raises(TypeError, match="unsupported operand"):
        FunctionReward("mine", lambda texts: 1 + None)(["a"])


COLUMNS = {"prompts": ["1+1=", "1+2="], "completions": ["2", "4"], "answer": ["2", "3"], "level": [1, 5]}
JOINED = ["1+1=2", "1+2=4"]


def exact(prompts, completions, *, answer, **others):
    assert prompts == COLUMNS["prompts"]
    assert others == {"level": [1, 5]}
    return [text == wanted for text, wanted in zip(completions, answer, strict=True)]


@pytest.mark.parametrize(
    ("function", "scores"),
    [
        (exact, [1.0, 0.0]),
        (
            lambda completions, level: [len(c) * n for c, n in zip(completions, level, strict=True)],
            [1.0, 5.0],
        ),
        (lambda completions, answer, bonus=2: [bonus] * len(completions), [2.0, 2.0]),
        (lambda texts: [float(text[-1]) for text in texts], [2.0, 4.0]),
    ],
)
def test_a_function_with_a_parameter_completions_receives_the_columns_that_it_names(function, scores):
    assert FunctionReward("mine", function)(JOINED, COLUMNS).tolist() == scores


def no_answer(completions, *, solution, **others):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "columns", "message"),
    [
        (no_answer, COLUMNS, "needs the column solution; besides the texts, the prompts have answer, level"),
        (
            no_answer,
            {name: COLUMNS[name] for name in ("prompts", "completions")},
            "needs the column solution; besides the texts, the prompts have no columns",
        ),
        (
            lambda completions, **others: [1.0],
            COLUMNS,
            r"must return 2 numbers for 2 texts, got 1 elements, \[1.0\]",
        ),
        (
            lambda completions, **others: completions,
            COLUMNS,
            r"must return 2 numbers for 2 texts, got 2 elements, \['2', '4'\]",
        ),
        (lambda completions, **others: [1.0, math.inf], COLUMNS, r"gave inf for the text '1\+2=4'"),
        (
            lambda completions, /, **others: [1.0, 1.0],
            COLUMNS,
            r"cannot be called with keyword arguments \(.*completions.*\)",
        ),
    ],
)
def test_a_wrong_function_of_completions_ends_in_one_line(function, columns, message):
    with pytest.raises(ConfigurationError, match=f"^reward_path: mine {message}$") as caught:
        FunctionReward("mine", function)(JOINED, columns)
    assert "\n" not in str(caught.value)


REVIEWS = [review.text for review in ReviewGrammar().reviews(2, 3)]


def test_a_weighted_sum_passes_the_columns_on(monkeypatch):
    module = ModuleType("tests_rewards")
    module.exact = exact
    monkeypatch.setitem(sys.modules, "tests_rewards", module)
    reward = load_reward({"grammar": 1.0, "tests_rewards:exact": 0.5})
    expected = load_reward("grammar")(REVIEWS) + torch.tensor([0.5, 0.0])
    assert torch.equal(reward(REVIEWS, COLUMNS), expected)


def own_rewards(monkeypatch, **functions):
    module = ModuleType("tests_rewards")
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, "tests_rewards", module)
    return load_reward({f"tests_rewards:{name}": weight for weight, name in enumerate(functions, 1)})


def test_none_is_left_out_of_a_sum_and_refused_where_nothing_is_left(monkeypatch):
    """trl#6534, as the next."""
    maths = lambda completions: [1.0, None]  # noqa: E731
    code = lambda completions: [None, 3.0]  # noqa: E731
    both = lambda completions: [5.0, 7.0]  # noqa: E731
    assert own_rewards(monkeypatch, maths=maths, code=code)(JOINED, COLUMNS).tolist() == [1.0, 6.0]
    assert own_rewards(monkeypatch, maths=maths, both=both)(JOINED, COLUMNS).tolist() == [11.0, 14.0]
    for functions in ({"maths": maths}, {"maths": maths, "again": maths}):
        with pytest.raises(
            ConfigurationError, match=r"^reward_path: .* None for 1 of 2 completions, such as '1\+2=4'"
        ):
            own_rewards(monkeypatch, **functions)(JOINED, COLUMNS)


def test_a_coroutine_reads_ids_and_state_and_logs_numbers_where_it_names_them(monkeypatch):
    async def asking(completions, completion_ids, trainer_state, log_metric, **columns):
        assert set(columns) == {"prompts", "answer", "level"}
        await asyncio.sleep(0)
        log_metric("longest", max(map(len, completion_ids)))
        return [len(ids) + trainer_state.global_step for ids in completion_ids]

    training = iter((True, True, False))
    reward = TrainingReward(
        own_rewards(monkeypatch, asking=asking), lambda: (TrainerState(5, 9), next(training))
    )
    for length in (1, 3, 8):
        columns = {**COLUMNS, "completion_ids": [[7], [8] * length]}
        assert reward(JOINED, columns).tolist() == [6, 5 + length]
    assert reward.metrics() == {"longest": 2.0}  # of training alone
    assert reward.metrics() == {}


@pytest.mark.parametrize("name", ["", "a\nb", "a\u2028b", "a\ud800", "\u202ea", 3])
def test_a_logged_number_has_a_printable_name(monkeypatch, name):
    def logging(completions, log_metric):
        log_metric(name, 1.0)
        return [0.0] * len(completions)

    reward = TrainingReward(own_rewards(monkeypatch, logging=logging), lambda: (TrainerState(0, 9), False))
    with pytest.raises(ConfigurationError, match=r"^reward_path: log_metric: .* is not a printable name"):
        reward(JOINED, COLUMNS)


def test_the_toys_reward_refuses_texts_of_others():
    """Public report: a model of one's own without a reward_path is scored 0 throughout."""
    with pytest.raises(
        ConfigurationError, match=r"^reward_path: grammar .* 3 of 6 words .* such as 'Explain'"
    ):
        load_reward("grammar")(["Explain Qwen to me, briefly"])


def test_a_label_needs_a_classifier():
    with pytest.raises(ConfigurationError, match=r"^reward_label: happy needs a classifier, got grammar"):
        load_reward("grammar", "happy")
    with pytest.raises(ConfigurationError, match=r"^reward_label: "):
        load_reward({"grammar": 1.0, "math:sqrt": 1.0}, "happy")


TEXTS = [review.text for review in ReviewGrammar().reviews(5, 0)]


def tiny_classifier(kind, **config):
    """A classifier like those on the hub, with the vocabulary of the embedded world."""
    tokenizer = grammar_tokenizer()
    tokenizer.padding_side = "right"
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return loading.fresh_model({"model_type": kind, **config}, tokenizer, 0, loading.CLASSIFIER), tokenizer


KINDS = {
    "distilbert": {"dim": 8, "n_heads": 2, "n_layers": 1, "hidden_dim": 8, "max_position_embeddings": 16},
    "gpt2": {"n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16},
    "bert": {
        **{"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1},
        **{"intermediate_size": 8, "max_position_embeddings": 16},
    },
}


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    """A classifier with three labels saved as a folder, and its path."""
    labels = {"id2label": {0: "bad", 1: "SO SO", 2: "good"}, "label2id": {"bad": 0, "SO SO": 1, "good": 2}}
    model, tokenizer = tiny_classifier(request.param, **KINDS[request.param], **labels)
    save(tmp_path, model, tokenizer)
    return model.eval(), tokenizer, str(tmp_path)


def logits_of(model, tokenizer, text):
    ids = torch.tensor([tokenizer(text)["input_ids"][:16]])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].detach()


def test_a_classifier_without_a_maximal_length(tmp_path):
    model, tokenizer = tiny_classifier("bloom", hidden_size=8, n_head=2, n_layer=1)
    assert tokenizer.model_max_length > 10**29
    save(tmp_path, model, tokenizer)
    reward = load_reward(str(tmp_path))
    scores = reward([*TEXTS, "good " * 100])
    assert scores[: len(TEXTS)].tolist() == pytest.approx(reward(TEXTS).tolist(), abs=1e-5)


def test_a_classifier_whose_scores_depend_on_padding_is_refused(tmp_path):
    model, tokenizer = tiny_classifier("xlnet", d_model=8, n_head=2, n_layer=1, d_inner=8)
    model.logits_proj.weight.data.mul_(1000)
    save(tmp_path, model, tokenizer)
    with pytest.raises(ConfigurationError, match=r"^reward_path: .*padding of shorter texts changes its sc"):
        load_reward(str(tmp_path))


def test_a_classifier_that_fails_on_texts_is_refused_when_it_is_loaded(tmp_path):
    """T5 needs an end token, which this tokenizer does not add."""
    config = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model, tokenizer = tiny_classifier("t5", **config)
    model.config.decoder_start_token_id = 0
    save(tmp_path, model, tokenizer)
    with pytest.raises(ConfigurationError, match=r"^reward_path: .* cannot be loaded: .*one <eos> token"):
        load_reward(str(tmp_path))


@pytest.mark.parametrize(("label", "index"), [("bad", 0), ("so so", 1), ("2", 2)])
def test_a_classifiers_reward_is_the_log_odds_or_the_logit_of_a_label(folder, label, index):
    model, tokenizer, path = folder
    log_odds, logit = (load_reward(path, label, output)(TEXTS) for output in ("log_odds", "logit"))
    for text, odds, raw in zip(TEXTS, log_odds.tolist(), logit.tolist(), strict=True):
        logits = logits_of(model, tokenizer, text)
        assert raw == pytest.approx(logits[index].item(), abs=1e-5)
        assert odds == pytest.approx(torch.logit(logits.softmax(0)[index]).item(), abs=1e-4)


def test_several_classifiers_have_labels_of_their_own(folder):
    path = folder[2]
    other = f"{path}/."  # the same classifier under another name
    reward = load_reward({path: 1.0, other: -0.5}, {path: "good", other: "bad"})
    expected = load_reward(path, "good")(TEXTS) - 0.5 * load_reward(path, "bad")(TEXTS)
    assert torch.allclose(reward(TEXTS), expected)
    with pytest.raises(
        ConfigurationError, match=r"^reward_label: grammar is not a classifier of reward_path; it"
    ):
        load_reward({path: 1.0, "grammar": 1.0}, {path: "good", "grammar": "bad"})


def test_a_classifier_reads_batches_as_it_reads_single_texts(folder, monkeypatch):
    reward = load_reward(folder[2], "good")
    together = reward(TEXTS)
    monkeypatch.setattr(rewards, "BATCH_SIZE", 2)
    assert torch.allclose(reward(TEXTS), together, atol=1e-6)
    assert torch.allclose(torch.cat([reward([text]) for text in TEXTS]), together, atol=1e-5)


@pytest.mark.parametrize("label", [None, "fine"])
def test_which_label_has_to_be_said(folder, label):
    with pytest.raises(
        ConfigurationError, match=rf"reward_label: {label} is not a label of .*; it has bad, SO SO, good"
    ):
        load_reward(folder[2], label)


def test_the_second_of_two_labels_and_the_only_output_need_no_name():
    for count, index in ((2, 1), (1, 0)):
        model, tokenizer = tiny_classifier("gpt2", **KINDS["gpt2"], num_labels=count)
        reward = ClassifierReward("it", model, tokenizer)
        assert reward.index == index
    assert reward(TEXTS[:1]).item() == pytest.approx(logits_of(model, tokenizer, TEXTS[0]).item(), abs=1e-5)


def test_a_classifier_that_gives_no_number_ends_with_the_text():
    model, tokenizer = tiny_classifier("gpt2", **KINDS["gpt2"])
    model.score.weight.data.fill_(math.nan)
    with pytest.raises(ConfigurationError, match="reward_path: it gave nan for the text"):
        ClassifierReward("it", model, tokenizer)(TEXTS)


class ReadTimeout(Exception):
    """As libraries name theirs, which are no builtin ones."""


@pytest.mark.parametrize("error", [TimeoutError("slow"), ConnectionResetError("lost"), ReadTimeout("slow")])
def test_a_reward_without_an_answer_is_called_again_with_patience(monkeypatch, caplog, error):
    """ms-swift#8123: a judge that timed out once ended the run."""
    waits, fails = [], iter([True, True, False, True, True, True])
    monkeypatch.setattr(rewards.time, "sleep", waits.append)

    def judge(texts):
        if next(fails):
            raise error
        return [1.0] * len(texts)

    reward = TrainingReward(
        own_rewards(monkeypatch, judge=judge), lambda: (TrainerState(0, 9), True), retries=2
    )
    assert reward(JOINED, COLUMNS).tolist() == [1, 1]
    assert waits == [5, 10]
    assert reward.retried == 2
    assert caplog.messages == [
        f"reward_path: {type(error).__name__}: {error}; tried again in {n} s" for n in waits
    ]
    with pytest.raises(
        NoAnswerError, match=rf"^reward_path: {type(error).__name__}: {error}, after 2 retries"
    ):
        reward(JOINED, COLUMNS)


@pytest.mark.parametrize(
    "error", [KeyError("score"), ValueError("no number"), HTTPError("u", 404, "", {}, None)]
)
def test_a_reward_with_a_mistake_is_not_called_again(monkeypatch, error):
    calls = []

    def mistaken(texts):
        calls.append(1)
        raise error

    reward = TrainingReward(
        own_rewards(monkeypatch, mistaken=mistaken), lambda: (TrainerState(0, 9), True), 5
    )
    with pytest.raises(type(error)):
        reward(JOINED, COLUMNS)
    assert len(calls) == 1
    assert is_unavailable(HTTPError("u", 503, "", {}, None))
    assert is_unavailable(HTTPError("u", 429, "", {}, None))
