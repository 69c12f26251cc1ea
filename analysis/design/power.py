"""What a design can show at all, before anything is run."""


def smallest_p(swaps: int) -> float:
    """The smallest two-sided p that an exact swap test can reach.

    Under exchangeability each of `swaps` pairs (or blocks) may be swapped on its own, so 2**swaps outcomes
    are equally likely; the most extreme one and its mirror image are the least that must be counted.

    Args:
        swaps: Pairs that are exchangeable one by one; whole replicates where seeds are shared over beta.

    Example:
        >>> smallest_p(5), smallest_p(6)
        (0.0625, 0.03125)
    """
    return min(1.0, 2.0 ** (1 - swaps))
