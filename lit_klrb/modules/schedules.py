"""The learning rate as a function of the step.

Those of transformers are the same, but importing them imports peft, which need not be there or fit.
"""

import math


def rate_factor(step: int, schedule: str, warmup_steps: int, max_steps: int) -> float:
    """The learning rate at a step, as a fraction of the highest.

    Example:
        >>> [rate_factor(step, "linear", warmup_steps=2, max_steps=6) for step in range(7)]
        [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    if schedule == "constant":
        return 1.0
    done = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return max(0.0, 1 - done if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))
