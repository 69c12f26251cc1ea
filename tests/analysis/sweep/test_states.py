"""Cells by their state, against a look at all of them."""

import random

from analysis.sweep import State
from analysis.sweep.states import States


def test_cells_in_a_state_are_those_that_a_look_at_all_finds_in_their_order():
    drawn = random.Random(0)
    cells = [f"cell {place}" for place in drawn.sample(range(30), 30)]
    plain = {cell: drawn.choice([*State]) for cell in cells}
    states = States(plain)
    for _ in range(200):
        cell, state = drawn.choice(cells), drawn.choice([*State])
        states[cell] = plain[cell] = state
        wanted = drawn.sample([*State], drawn.randrange(4))
        assert states.of(*wanted) == [cell for cell in cells if plain[cell] in wanted]
    assert states == plain
