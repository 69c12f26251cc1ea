import math

import pytest
import torch

from lit_klrb.data.grammar import ReviewGrammar
from lit_klrb.errors import ConfigurationError
from lit_klrb.rewards import FunctionReward, load_reward


def test_the_grammars_reward_is_its_clipped_log_odds():
    grammar, reward = ReviewGrammar(), load_reward("grammar")
    texts = [review.text for review in grammar.reviews(20, 3)]
    scores = reward(texts)
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx([grammar.clipped_log_odds(text) for text in texts])
    assert len(set(scores.tolist())) > 3


def test_any_function_is_a_reward():
    assert load_reward("statistics:fmean").function([1, 2]) == 1.5
    reward = FunctionReward("words", lambda texts: [len(text.split()) for text in texts])
    assert reward(["a b", "c"]).tolist() == [2.0, 1.0]


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_no_number_ends_with_its_text(score):
    reward = FunctionReward("mine", lambda texts: [0.0] * (len(texts) - 1) + [score])
    with pytest.raises(ConfigurationError, match=f"mine gave {score} for the text 'the last'"):
        reward(["the first", "the last"])


def test_one_score_a_text():
    with pytest.raises(ConfigurationError, match="mine must return 2 numbers for 2 texts, got shape"):
        FunctionReward("mine", lambda texts: [1.0])(["a", "b"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nope", "nope is neither 'grammar' nor 'package.module:function'"),
        ("no_such_module:f", "cannot import no_such_module:f: No module named 'no_such_module'"),
        ("math:nope", "cannot import math:nope: module 'math' has no attribute 'nope'"),
    ],
)
def test_a_reward_that_is_not_there(path, message):
    with pytest.raises(ConfigurationError, match=f"^reward_path: {message}$"):
        load_reward(path)
