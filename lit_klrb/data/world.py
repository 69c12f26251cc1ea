"""The sentences of the embedded review world, and their notation.

Each line is a rule, `name = alternative | alternative`. `<name>` refers to a rule of a later line, so rules
are not recursive. A number before an alternative is its weight, 1 by default. An alternative may be empty. A
rule with a strength, `name 2 = praise | praise / complaint | complaint`, expresses sentiment: it chooses the
side of the review's label with odds of 2 to the power of the strength, and the first word of the chosen
alternative is the evidence. Such a word has the same polarity and strength in all rules, and nothing is ever
negated, so the words determine the posterior of the label.
"""

import random
from typing import NamedTuple

from lit_klrb.seeding import derive_seed

FREQUENCY_SPREAD = 0.3  # standard deviation of the log of the random factors of weights

RULES = """
review     = <opening> The <body> <verdict> <stop>
opening    = 5 <seen> . | 3 This <tone> <genre> <plot> . | 2 What a <marvel> <genre> !
seen       = I <saw> this <genre> <when> <feeling>
saw        = saw | watched | caught
when       = 2 last night | at a festival | on <medium> | with my <friend>
medium     = a plane | television | Sunday
feeling    = | and <rated> it
tone       = | <pleasant>
plot       = follows <hero> | is about <hero>
hero       = 3 a <single> | two <trait> <people>
single     = <trait> <person> | <person> who <acts>
trait      = young | lonely | retired | famous | poor
person     = detective | boxer | widow | teacher | soldier | singer
people     = brothers | thieves | strangers
acts       = saves a town | finds a letter | leaves the city | solves a murder | robs a bank | hides a secret
body       = 3 <cast> <then_story> | 2 <story> <then_cast>
then_story = 3 . <more_story> | and the <story> . | while the <story> .
then_cast  = 3 . <more_cast> | and the <cast> . | while the <cast> .
more_story = | 3 The <story> . | 2 <craft> .
more_cast  = | 3 The <cast> . | 2 <craft> .
cast       = 2 <actor> was <played> | <actors> were <played>
actor      = 2 acting | cast | villain | lead actor
actors     = leads | performances | actors
played     = <rather> <decent> | <simply> <superb>
story      = 2 <theme> <seemed> <written> | <themes> were <written>
theme      = 2 plot | script | story | dialogue | ending
themes     = characters | jokes | twists
seemed     = 3 was | felt
written    = <rather> <clever> | <simply> <gripping>
craft      = 2 Even the <look> was <filmed> | As for the <look> , it was <filmed>
look       = music | photography | editing | lighting | score | scenery
filmed     = <rather> <elegant> | <simply> <stunning>
verdict    = 3 <overall> it was a <thing> | 2 <call> | One of the <best> <genres> of the <period> | 2 <aside>
call       = I would <urge> | Do not <miss>
aside      = Two hours of pure <joy> | My <friend> <rated> it too
overall    = Overall | All in all | For me
thing      = <rather> <pleasant> <genre> | real <treat> | complete <triumph>
genre      = 4 film | 4 movie | thriller | comedy | drama | western | sequel | romance
genres     = films | movies | stories
period     = 2 year | decade | summer
urge     1 = recommend it <whom> | gladly watch it again / avoid it | skip it next time
whom       = | to <audience>
audience   = everyone | my <friend>
friend     = husband | brother | sister | father | mother | friends
rated      = <liked> | <loved>
rather     = 5 | very | rather | quite | fairly
simply     = 5 | simply | truly | absolutely
stop       = 3 . | !
liked    1 = 2 enjoyed | liked / 2 disliked | regretted
loved    2 = 2 loved | adored / 2 hated | loathed
marvel   2 = 2 wonderful | marvelous | magnificent / 2 horrible | miserable | disastrous
decent   1 = convincing | solid | charming | likeable | natural / wooden | stiff | bland | shallow | awkward
superb   2 = superb | brilliant | flawless | fantastic / terrible | awful | dreadful | laughable
clever   1 = clever | witty | sharp | touching | fresh / thin | predictable | slow | muddled | silly
gripping 2 = gripping | hilarious | masterful | riveting / pointless | idiotic | incoherent | painful
elegant  1 = elegant | stylish | lively | polished / flat | noisy | cheap | clumsy
stunning 2 = stunning | gorgeous | breathtaking / ugly | hideous | unbearable
pleasant 1 = pleasant | nice | satisfying | good / tedious | mediocre | dull | bad
treat    1 = treat | pleasure | surprise / chore | letdown | bore
triumph  2 = triumph | masterpiece | success / disaster | failure | mess
best     2 = best | finest / worst | weakest
joy      2 = joy | magic | delight / boredom | agony | torture
miss     1 = miss it / bother
"""


class Alternative(NamedTuple):
    """An alternative of a rule, with its probabilities given label 0 and label 1."""

    symbols: tuple[str, ...]
    odds: tuple[float, float]


class World(NamedTuple):
    """Parsed rules."""

    # The alternatives of each symbol `<name>`; the first symbol is the start symbol
    rules: dict[str, list[Alternative]]
    strengths: dict[str, int]  # strength of each sentiment word, positive for praise


def read_world(text: str) -> World:
    """Parse rules and randomise the frequencies of their alternatives.

    Example:
        >>> world = read_world("word 1 = good / dull")
        >>> world.strengths
        {'good': 1, 'dull': -1}
    """
    rng = random.Random(derive_seed(0, "world"))
    world = World({}, {})
    for line in reversed(text.strip().splitlines()):
        header, body = line.split("=")
        name, *strength = header.split()
        praise = int(strength[0]) if strength else 0
        alternatives = []
        for side, evidence in zip(body.split("/"), (praise, -praise), strict=False):
            chance = (1 / (1 + 2.0**evidence), 1 / (1 + 2.0**-evidence)) if praise else (1.0, 1.0)
            weighted = [_read_alternative(alternative, rng) for alternative in side.split("|")]
            total = sum(weight for _, weight in weighted)
            for symbols, weight in weighted:
                if evidence:
                    world.strengths[symbols[0]] = evidence
                odds = (chance[0] * weight / total, chance[1] * weight / total)
                alternatives.append(Alternative(symbols, odds))
        world = World({f"<{name}>": alternatives, **world.rules}, world.strengths)
    return world


def _read_alternative(text: str, rng: random.Random) -> tuple[tuple[str, ...], float]:
    symbols = text.split()
    weight = int(symbols.pop(0)) if symbols and symbols[0].isdigit() else 1
    return tuple(symbols), weight * rng.lognormvariate(0, FREQUENCY_SPREAD)
