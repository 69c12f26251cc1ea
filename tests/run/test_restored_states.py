"""Numbers of a checkpoint that a trainer would restore without a word."""

import copy

import pytest
import torch
from transformers import get_scheduler

from lit_klrb.errors import ConfigurationError
from lit_klrb.run.resumable import STEPS, check_states

DONE = {"ready": 3, "completed": 3}
LOOP = {STEPS: {"optimizer": {"step": {"total": DONE}}}, "state_dict": {}, "is_last_batch": False}


def built():
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, optimizer, get_scheduler("linear", optimizer, 1, 10)


@pytest.fixture(scope="module")
def whole():
    """What a checkpoint holds after three steps."""
    model, optimizer, scheduler = built()
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "state_dict": {},
        "loops": {"fit_loop": LOOP},
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "global_step": 3,
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
    }


def check(checkpoint):
    _, optimizer, scheduler = built()
    fresh = {STEPS: {"optimizer": {"step": {"total": dict.fromkeys(DONE, 0)}}}}
    check_states("a.ckpt", checkpoint, optimizer, scheduler, {**LOOP, **fresh}, 10)


def test_what_a_run_wrote_passes(whole):
    check(whole)
    other = copy.deepcopy(whole)  # of a machine with another accelerator
    other["optimizer_states"][0]["param_groups"][0] |= {"fused": True, "foreach": False}
    check(other)


MOMENT = ("optimizer_states", 0, "state", 0)
GROUP = ("optimizer_states", 0, "param_groups", 0)
WRONG = {
    "no moments: Adam would silently start again": (("optimizer_states", 0, "state"), {}),
    "none of one parameter": (MOMENT, {}),
    "a parameter that there is not": (("optimizer_states", 0, "state", 7), {}),
    "another shape": ((*MOMENT, "exp_avg"), torch.zeros(2)),
    "another type": ((*MOMENT, "exp_avg"), torch.zeros(3, 2).half()),
    "a number": ((*MOMENT, "exp_avg"), 1.0),
    "not finite": ((*MOMENT, "exp_avg"), torch.full((3, 2), float("inf"))),
    "a negative square": ((*MOMENT, "exp_avg_sq"), -torch.ones(3, 2)),
    "too many steps": ((*MOMENT, "step"), torch.tensor(1e9)),
    "no steps": ((*MOMENT, "step"), torch.tensor(0.0)),
    "upwards": ((*GROUP, "maximize"), True),
    "another rate": ((*GROUP, "lr"), 1e6),
    "another first rate": ((*GROUP, "initial_lr"), 1.0),
    "other betas": ((*GROUP, "betas"), (0.0, 0.0)),
    "other parameters": ((*GROUP, "params"), [1, 0]),
    "another setting": ((*GROUP, "momentum"), 1),
    "no groups": (("optimizer_states", 0, "param_groups"), []),
    "no optimizer": (("optimizer_states",), []),
    "two optimizers": (("optimizer_states",), [{}, {}]),
    "another place in the schedule": (("lr_schedulers", 0, "last_epoch"), 10**9),
    "another count of it": (("lr_schedulers", 0, "_step_count"), 1),
    "another base": (("lr_schedulers", 0, "base_lrs"), [5.0]),
    "no schedule": (("lr_schedulers",), []),
    "a billion steps": (("global_step",), 10**9),
    "negative steps": (("global_step",), -1),
    "a step between": (("global_step",), 2),
    "text in a loop": (("loops", "fit_loop", "is_last_batch"), "text"),
    "a negative count": (("loops", "fit_loop", STEPS, "optimizer", "step", "total", "ready"), -1),
    "half a loop": (("loops", "fit_loop", STEPS), {}),
    "no mapping": (("loops", "fit_loop", STEPS, "optimizer"), 5),
}


@pytest.mark.parametrize("place", WRONG)
def test_what_no_run_wrote_is_refused(whole, place):
    path, value = WRONG[place]
    changed = copy.deepcopy(whole)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    with pytest.raises(ConfigurationError, match=r"^ckpt_path: a\.ckpt cannot be resumed: its "):
        check(changed)
