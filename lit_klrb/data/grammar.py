"""The embedded review world: a seeded probabilistic grammar with exact probabilities of its texts."""

import math
import random
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from lit_klrb.data.world import RULES, World, read_world
from lit_klrb.seeding import derive_seed

EVIDENCE_UNIT = math.log(2)  # log odds of a sentiment word of strength 1, in nats
LOG_ODDS_CLIP = 6.0  # in nats; only few extreme reviews exceed it
END = ""  # the end of a review, a language model's EOS

Stack = tuple[str, ...]  # words and rules not yet expanded, in order


class Review(NamedTuple):
    """A review and its label: 1 positive, 0 negative."""

    text: str
    label: int


class Arc(NamedTuple):
    """A possible next word, its probabilities given label 0 and label 1, and the state it leads to."""

    word: str
    odds: tuple[float, float]
    target: int


def split_words(text: str) -> list[str]:
    """Split a text into words and punctuation marks.

    Example:
        >>> split_words("Do not miss it!")
        ['Do', 'not', 'miss', 'it', '!']
    """
    return re.findall(r"\w+|[^\w\s]", text)


def join_words(words: Iterable[str]) -> str:
    """Join words to a text, with spaces except before punctuation marks.

    Example:
        >>> join_words(["All", "in", "all", ",", "fine", "."])
        'All in all, fine.'
    """
    return re.sub(r" (?=[^\w\s])", "", " ".join(words))


class ReviewGrammar:
    """A probabilistic grammar of short film reviews with a latent sentiment.

    Both labels have probability 1/2. A sentiment word of strength s agrees with the label with probability
    σ(s·log 2); every other choice is independent of the label. No text has two derivations. With E(text) the
    sum of the strengths of its positive words minus that of its negative words,

        log P(positive | text) - log P(negative | text) = E(text)·log 2

    holds exactly for every review of the grammar and every prefix of a review.

    Args:
        rules: The sentences, in the notation of `lit_klrb.data.world`.

    Example:
        >>> grammar = ReviewGrammar()
        >>> review = grammar.sample(seed=0, index=1)
        >>> print(review.text)
        I caught this movie on television. The twists were hilarious. Even the score was lively. My husband
        enjoyed it too.
        >>> round(grammar.log_odds(review.text) / math.log(2))
        4
    """

    def __init__(self, rules: str = RULES) -> None:
        world = read_world(rules)
        self._strengths = world.strengths
        self._states = _build_states(world)
        self._cumulative = [
            [list(accumulate(arc.odds[label] for arc in arcs[:-1])) for label in (0, 1)]
            for arcs in self._states
        ]
        self.vocabulary = tuple(sorted({arc.word for arcs in self._states for arc in arcs} - {END}))

    def sample(self, seed: int, index: int) -> Review:
        """Review number `index` of the infinite stream given by `seed`."""
        rng = random.Random(derive_seed(seed, "review", index))
        label, words = int(rng.random() < 0.5), list[str]()
        state = 0
        while True:
            arc = self._states[state][bisect(self._cumulative[state][label], rng.random())]
            if arc.word == END:
                return Review(join_words(words), label)
            words.append(arc.word)
            state = arc.target

    def reviews(self, n: int, seed: int) -> list[Review]:
        """The first `n` reviews of the stream given by `seed`."""
        return [self.sample(seed, index) for index in range(n)]

    def log_odds(self, text: str) -> float:
        """Log odds that a text is positive, in nats; exact for reviews of the grammar and their prefixes.

        For any other text, such as a completion that the grammar does not generate, it is likewise the sum of
        the evidence of its words.
        """
        return EVIDENCE_UNIT * sum(self._strengths.get(word, 0) for word in split_words(text))

    def clipped_log_odds(self, text: str) -> float:
        """`log_odds` clipped to ±`LOG_ODDS_CLIP`: the reward of the review world."""
        return max(-LOG_ODDS_CLIP, min(LOG_ODDS_CLIP, self.log_odds(text)))

    def entropy_per_token(self, given: int = 0) -> float:
        """The lowest cross-entropy of a language model, in nats per token; the end of a review is one.

        The next word depends on the preceding words only through their state s and evidence E, so the entropy
        is the finite sum Σ_t Σ_{s,E} P_t(s, E)·H(next word | s, E).

        Args:
            given: Number of words at the start of each review that are not predicted: 1 for a model without a
                beginning-of-sequence token.
        """
        predict = cache(self._predict)
        nats = tokens = 0.0
        position, layer = 0, {(0, 0): 1.0}  # probabilities P_t(s, E) at one position t
        while layer:
            following: defaultdict[tuple[int, int], float] = defaultdict(float)
            for node, mass in layer.items():
                entropy, successors = predict(*node)
                if position >= given:
                    nats, tokens = nats + mass * entropy, tokens + mass
                for successor, probability in successors.items():
                    following[successor] += mass * probability
            position, layer = position + 1, following
        return nats / tokens

    def _predict(self, state: int, evidence: int) -> tuple[float, dict[tuple[int, int], float]]:
        """Entropy of the next word, and the probabilities of the following (state, evidence)."""
        positive = 1 / (1 + math.exp(-EVIDENCE_UNIT * evidence))
        entropy, successors = 0.0, defaultdict[tuple[int, int], float](float)
        for word, odds, target in self._states[state]:
            probability = (1 - positive) * odds[0] + positive * odds[1]
            entropy -= probability * math.log(probability)
            if word != END:
                successors[target, evidence + self._strengths.get(word, 0)] += probability
        return entropy, successors


def _build_states(world: World) -> list[list[Arc]]:
    """The arcs of every state, the initial state first. A state is the stack of symbols not yet expanded."""
    stacks: list[Stack] = [(next(iter(world.rules)),)]
    numbers = {stacks[0]: 0}
    states = []
    for stack in stacks:  # stacks found in the body are appended and visited in turn
        following = list(_next_words(world, stack))
        for _, _, rest in following:
            if rest not in numbers:
                numbers[rest] = len(stacks)
                stacks.append(rest)
        states.append([Arc(word, odds, numbers[rest]) for word, odds, rest in following])
    return states


def _next_words(world: World, stack: Stack) -> Iterator[tuple[str, tuple[float, float], Stack]]:
    """Each possible next word, its probabilities given label 0 and label 1, and the remaining stack."""
    if not stack:
        yield END, (1.0, 1.0), ()
    elif stack[0] not in world.rules:
        yield stack[0], (1.0, 1.0), stack[1:]
    else:
        for symbols, (negative, positive) in world.rules[stack[0]]:
            for word, odds, rest in _next_words(world, symbols + stack[1:]):
                yield word, (negative * odds[0], positive * odds[1]), rest
