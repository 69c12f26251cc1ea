"""Language models small enough for exact computation, against which every estimator is tested: `tabular`
enumerates all completions of bounded length.
"""

from .tabular import (
    TabularLM as TabularLM,
    exact_kl as exact_kl,
    exact_kl_gradient as exact_kl_gradient,
    exact_objective as exact_objective,
    num_prefixes as num_prefixes,
    optimal_policy as optimal_policy,
)

# What `help` lists
__all__ = [name for name, value in globals().items() if callable(value) and not name.startswith("_")]
