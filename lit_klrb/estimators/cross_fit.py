"""Coefficients of directions, fitted for each prompt on the other prompts and on earlier rollouts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.errors import ConfigurationError

# Those of this package; sums are over them and then over an estimator's own
DIRECTIONS = ("kl", "token_values", "leave_one_out", "constant", "prefix_rewards")
# Directions whose squared norm is below about this share of that of the score weights are suppressed.
_NEGLIGIBLE = 1e-3
# Directions from one estimator to another; the penalty, in effective groups, of coefficients beyond [0, 1].
_BOUNDED = ("kl", "token_values")
_BEYOND = 32


class FitSums(NamedTuple):
    """Sufficient statistics for least squares: sums over groups for all D directions, in float64."""

    products: Tensor  # inner products of the directions, shape [..., D, D]; 0 for directions that are absent
    target: Tensor  # inner products of the directions and the score weights at g = 0, shape [..., D]
    squares: Tensor  # squared norm of the score weights at g = 0, shape [...]
    groups: Tensor  # number of groups, shape [...]
    fourth_powers: Tensor  # sum of the groups' squared `squares`, shape [...]

    @staticmethod
    def of(
        origin: Tensor,
        directions: Mapping[str, Tensor],
        group_size: int,
        names: Sequence[str] = DIRECTIONS,
    ) -> "FitSums":
        """The sums of each group of a rollout, shape [G, ...], on the CPU; arguments as in the fit."""
        if unknown := [name for name in directions if name not in names]:
            raise ConfigurationError(
                f"the direction {unknown[0]} is not among direction_names: {', '.join(names)}"
            )
        absent = torch.zeros_like(origin)
        slopes, start = (
            values.double().reshape(len(values), len(origin) // group_size, group_size * origin.shape[1])
            for values in (torch.stack([directions.get(name, absent) for name in names]), origin[None])
        )
        # What follows is small, and on a GPU each step of it would take longer to start than to compute
        products = torch.einsum("dgn,egn->gde", slopes, slopes).cpu()
        target = torch.einsum("dgn,cgn->gd", slopes, start).cpu()
        squares = start[0].square().sum(1).cpu()
        return FitSums(products, target, squares, torch.ones_like(squares), squares.square())

    @property
    def effective_groups(self) -> Tensor:
        """Geometric mean of the number of groups and of Kish's effective number, shape [...].

        Kish's number is squares^2 / fourth_powers. A coefficient's squared error is inversely proportional to
        the number of groups if the size of a group's score weights is unrelated to that of its directions,
        and to Kish's number if they are proportional.
        """
        # At least one group is effective; if all score weights are 0, all are
        # Kish's number is fraction · groups, and the geometric mean of both groups · sqrt(fraction)
        fraction = self.squares.square() / (self.groups * self.fourth_powers)
        fraction = torch.where(self.fourth_powers > 0, fraction, 1).clamp(max=1)
        return (self.groups * fraction.sqrt()).clamp(min=1)

    def of_others(self) -> "FitSums":
        """The leave-one-out sums: for each group, those of all other groups.

        Not the total minus the own group, which would cancel for a dominant group.
        """
        others = 1 - torch.eye(len(self.groups), dtype=self.groups.dtype)
        return FitSums(*(torch.einsum("gh,h...->g...", others, field) for field in self))

    def total(self) -> "FitSums":
        """The sums over all groups."""
        return FitSums(*(field.sum(0) for field in self))

    def plus(self, other: "FitSums", weight: float = 1.0) -> "FitSums":
        """The sum with the weighted `other`."""
        pairs = zip(self, other, strict=True)
        return FitSums(*(own + weight * another for own, another in pairs))


def cross_fitted_coefficients(
    origin: Tensor,
    directions: Mapping[str, Tensor],
    group_size: int,
    earlier: FitSums | None = None,
    names: Sequence[str] = DIRECTIONS,
) -> dict[str, Tensor]:
    """Coefficients g that minimise `origin + sum_d g_d directions_d`, for each group fitted on others.

    Least squares of the score weights, a proxy of the gradient that contains the noise of all terms, over the
    other groups of the rollout and the groups of earlier ones. The penalty corresponds to one additional
    effective group (`FitSums.effective_groups`) in which every direction is uncorrelated with the rest, so
    coefficients from few groups are shrunk more, and most if few of them have large score weights, as with
    rare rewards. Negligible directions get coefficients near 0. What those of "kl" and "token_values" have
    beyond [0, 1], where they leave the range between two estimators, has a penalty of 32 groups: from few
    groups it is mostly noise.

    Args:
        origin: Score weights at g = 0, shape [B, T].
        directions: Increment per unit of each direction, shape [B, T].
        group_size: Completions per prompt.
        earlier: Sums over groups of earlier rollouts; None for none.
        names: See `FitSums.of`.

    Returns:
        Coefficients of each direction and sequence, shape [B, 1]; 0 if fewer than two groups are left to fit
        them on.
    """
    if not directions:
        return {}
    sums = FitSums.of(origin, directions, group_size, names).of_others()
    if earlier is not None:
        sums = sums.plus(earlier)
    kept = [index for index, name in enumerate(names) if name in directions]
    names = [names[index] for index in kept]
    products, target = sums.products[:, kept][:, :, kept], sums.target[:, kept]
    diagonal = products.diagonal(dim1=1, dim2=2)
    # The constant direction is dimensionless and cannot be compared with score weights
    compared = torch.tensor([name != "constant" for name in names])
    enough = sums.groups[:, None] >= 2
    groups = sums.effective_groups[:, None]
    penalty = (diagonal + _NEGLIGIBLE * sums.squares[:, None] * compared) / groups
    best = _least_squares(products, target, penalty)
    inside = best.clamp(0, 1)
    bounded = torch.tensor([name in _BOUNDED for name in names])
    fixed = torch.where(bounded, inside + (best - inside) * groups / (groups + _BEYOND), 0)
    # The bounded ones are fixed, and the best of the others are those of what is left
    left = torch.where(bounded, 0, target + torch.einsum("gde,ge->gd", products, fixed))
    coefficients = fixed + _least_squares(torch.where(bounded[:, None], 0, products), left, penalty)
    coefficients = torch.where(enough, coefficients, 0)
    spread = coefficients.to(origin).repeat_interleave(group_size, 0)
    return {name: spread[:, index, None] for index, name in enumerate(names)}


def _least_squares(products: Tensor, target: Tensor, penalty: Tensor) -> Tensor:
    """The minimum of g' products g + 2 target' g + sum_d penalty_d g_d^2, shape [G, D]; 0 for absent g_d."""
    # Scale to a unit diagonal; 1 on the diagonal keeps the system solvable if a direction is zero everywhere
    diagonal = products.diagonal(dim1=1, dim2=2) + penalty
    scale = torch.where(diagonal > 0, diagonal, 1).rsqrt()
    matrix = scale[:, :, None] * products * scale[:, None, :]
    matrix.diagonal(dim1=1, dim2=2).fill_(1.0)
    solved: Tensor = torch.linalg.solve(matrix, scale * target)
    return -scale * solved


class EarlierRollouts:
    """Decayed sums over the groups of earlier rollouts, for the fit of the next one's coefficients.

    Few prompts, or rewards that most batches lack, leave a rollout's other prompts too little to fit
    coefficients on. The weights of a rollout must use the sums before it: compute the weights with `sums`,
    then call `observe`. Processes that observe the same completions have the same sums.

    Args:
        decay: Factor of the sums of earlier rollouts with each new one.
        size: Number of directions, D.
    """

    def __init__(self, decay: float = 0.8, size: int = len(DIRECTIONS)) -> None:
        self.decay, self.size = decay, size
        self.sums: FitSums | None = None

    def observe(self, sums: FitSums) -> None:
        """Add the sums of a rollout; those of one that is not finite are ignored."""
        if not all(bool(field.isfinite().all()) for field in sums):
            return
        self.sums = sums if self.sums is None else sums.plus(self.sums, self.decay)

    def state_dict(self) -> dict[str, Any]:
        """The sums, as plain tensors."""
        return {} if self.sums is None else self.sums._asdict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`.

        Raises:
            ConfigurationError: If the sums are of another number of directions.
        """
        sums = FitSums(**{name: value.cpu() for name, value in state.items()}) if state else None
        if sums is not None and len(sums.target) != self.size:
            problem = f"has sums of {len(sums.target)} directions, where the estimator has {self.size}"
            raise ConfigurationError(problem, key="ckpt_path")
        self.sums = sums
