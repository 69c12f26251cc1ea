"""The smallest p-value of a design."""


def smallest_p(swaps: int) -> float:
    """The smallest two-sided p-value that an exact swap test can attain.

    Under exchangeability each unit can be swapped independently, so 2**swaps outcomes are equally likely. The
    p-value is at least the probability of the most extreme one and its mirror image.

    Args:
        swaps: Number of swap units: pairs, or whole replicates if seeds are shared across betas.

    Example:
        >>> smallest_p(5), smallest_p(6)
        (0.0625, 0.03125)
    """
    return min(1.0, 2.0 ** (1 - swaps))
