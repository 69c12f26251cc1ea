"""The exact quantities of the grammar, compared with brute force, and the form of its texts."""

import math
import random
from collections import Counter, defaultdict

import pytest
from scipy import stats

from lit_klrb.data.grammar import END, EVIDENCE_UNIT, LOG_ODDS_CLIP, ReviewGrammar, join_words, split_words
from lit_klrb.data.world import World, read_world

SMALL_RULES = """
review   = <opening> <verdict> <end>
opening  = 3 The plot was <rated> . | All in all , | What a <rated> film !
verdict  = pure <joy> | 2 so so | <rated> <film>
film     = | film
end      = | 2 .
rated  1 = 2 nice | good and fresh / dull
joy    2 = joy / agony | torture
"""


@pytest.fixture(scope="module")
def grammar():
    return ReviewGrammar()


@pytest.fixture(scope="module")
def small():
    return ReviewGrammar(SMALL_RULES)


@pytest.fixture(scope="module")
def small_texts():
    """Probability of every text of the small grammar given label 0 and label 1, by expanding derivations."""
    return dict(derivations(read_world(SMALL_RULES), ("<review>",)))


def log_prob(grammar, text, label):
    """log p(text | label) along the arcs of its words; -inf for a text that the grammar does not generate."""
    state, total = 0, 0.0
    for word in [*split_words(text), END]:
        arc = next((arc for arc in grammar._states[state] if arc.word == word), None)
        if arc is None:
            return -math.inf
        state, total = arc.target, total + math.log(arc.odds[label])
    return total


def derivations(world: World, symbols):
    """Every (words, (p given 0, p given 1)) the symbols expand to, one for each derivation."""
    if not symbols:
        yield (), (1.0, 1.0)
        return
    head, *rest = symbols
    heads = [((head,), (1.0, 1.0))]
    if head in world.rules:
        heads = [
            (words, (odds[0] * inner[0], odds[1] * inner[1]))
            for expansion, odds in world.rules[head]
            for words, inner in derivations(world, expansion)
        ]
    for words, odds in heads:
        for tail, tail_odds in derivations(world, rest):
            yield (*words, *tail), (odds[0] * tail_odds[0], odds[1] * tail_odds[1])


def conditional_entropy(texts, given):
    """E[-log p(text | its first words)] by summing over all texts that share them."""
    marginal = {words: (odds[0] + odds[1]) / 2 for words, odds in texts.items()}
    prefixes = defaultdict(float)
    for words, probability in marginal.items():
        prefixes[words[:given]] += probability
    return sum(-p * math.log(p / prefixes[words[:given]]) for words, p in marginal.items())


def test_small_grammar_is_a_distribution_over_unambiguous_texts(small_texts):
    world = read_world(SMALL_RULES)
    assert len(list(derivations(world, ("<review>",)))) == len(small_texts) == 7 * 10 * 2
    for label in (0, 1):
        assert sum(odds[label] for odds in small_texts.values()) == pytest.approx(1, abs=1e-12)


def test_log_prob_and_log_odds_equal_brute_force(small, small_texts):
    for words, odds in small_texts.items():
        text = join_words(words)
        for label in (0, 1):
            assert log_prob(small, text, label) == pytest.approx(math.log(odds[label]), abs=1e-12)
        assert small.log_odds(text) == pytest.approx(math.log(odds[1] / odds[0]), abs=1e-12)


def test_log_odds_of_every_prefix_is_the_posterior_of_the_reviews_it_starts(small, small_texts):
    mass = defaultdict(lambda: [0.0, 0.0])
    for words, odds in small_texts.items():
        for length in range(len(words) + 1):
            for label in (0, 1):
                mass[words[:length]][label] += odds[label]
    assert len(mass) == 197  # 140 texts, 57 more beginnings of texts
    for prefix, (negative, positive) in mass.items():
        assert small.log_odds(join_words(prefix)) == pytest.approx(math.log(positive / negative), abs=1e-12)


@pytest.mark.parametrize("given", [0, 1, 2, 4])
def test_entropy_equals_brute_force(small, small_texts, given):
    tokens = sum(sum(odds) / 2 * (len(words) + 1 - given) for words, odds in small_texts.items())
    per_token = conditional_entropy(small_texts, given) / tokens
    assert small.entropy_per_token(given) == pytest.approx(per_token, abs=1e-12)


def test_samples_follow_the_probabilities(small, small_texts):
    counts = Counter((tuple(split_words(r.text)), r.label) for r in small.reviews(20_000, seed=1))
    cells = [(words, label) for words in small_texts for label in (0, 1)]
    assert set(counts) <= set(cells)
    expected = [20_000 * small_texts[words][label] / 2 for words, label in cells]
    assert stats.chisquare([counts[cell] for cell in cells], expected).pvalue > 0.001


def test_log_odds_of_the_world_are_bayes_rule(grammar):
    for review in grammar.reviews(500, seed=3):
        bayes = log_prob(grammar, review.text, 1) - log_prob(grammar, review.text, 0)
        assert grammar.log_odds(review.text) == pytest.approx(bayes, abs=1e-9)


def test_reviews_are_addressed(grammar):
    state = random.getstate()
    stream = grammar.reviews(20, seed=4)
    assert stream[7:12] == [grammar.sample(4, index) for index in range(7, 12)]
    assert len({review.text for review in stream + grammar.reviews(20, seed=5)}) > 35
    assert random.getstate() == state


def test_other_texts_have_log_odds_and_no_probability(grammar):
    review = grammar.sample(0, 1).text
    for text in (review[:-1], f"{review} {review}", "superb superb", "entirely unknown", ""):
        assert log_prob(grammar, text, 1) == -math.inf
    unit = math.log(2)
    assert grammar.log_odds("Superb: superb, dull; xyz") == pytest.approx(unit)
    assert grammar.log_odds("") == 0
    assert grammar.clipped_log_odds("superb " * 9) == LOG_ODDS_CLIP
    assert grammar.clipped_log_odds("awful " * 9) == -LOG_ODDS_CLIP
    assert grammar.clipped_log_odds("awful dull") == pytest.approx(-3 * unit)


def test_the_world_has_what_the_exact_posterior_rests_on(grammar):
    """No text has two derivations, and the label depends on sentiment words alone, wherever they stand."""
    assert not any(word.startswith("<") for word in grammar.vocabulary), "every rule is defined"
    for arcs in grammar._states:
        assert len({arc.word for arc in arcs}) == len(arcs)
        for word, (negative, positive), _ in arcs:
            evidence = EVIDENCE_UNIT * grammar._strengths.get(word, 0)
            assert math.log(positive / negative) == pytest.approx(evidence, abs=1e-9)
