"""Addressed randomness.

All random numbers are drawn under `forked_rng(derive_seed(seed, "purpose", coordinates...))`: they depend on
this address only, not on earlier random numbers. Resuming, validation or another estimator therefore never
change the random numbers of the rest.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *address: int | str) -> int:
    """A seed in [0, 2**63), computed as a hash of `seed` and an address.

    Args:
        seed: The run's seed.
        address: Purpose and position of the random numbers, such as `"completions", rollout_index`.

    Returns:
        The first 63 bits of the SHA-256 of the address, types included: 1 and "1" differ.

    Example:
        >>> derive_seed(0, "completions", 3) == derive_seed(0, "completions", 3)
        True
        >>> derive_seed(0, "completions", 3) == derive_seed(0, "completions", "3")
        False
    """
    digest = hashlib.sha256(repr((seed, *address)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def forked_rng(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed torch inside the block and restore its random state afterwards.

    Example:
        >>> before = torch.get_rng_state()
        >>> with forked_rng(7):
        ...     a = torch.rand(())
        >>> with forked_rng(7):
        ...     b = torch.rand(())
        >>> bool(a == b), bool((torch.get_rng_state() == before).all())
        (True, True)
    """
    device = torch.device(device)
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cuda"):
        # torch.manual_seed seeds all devices, and spends a millisecond on those that are not there
        torch.manual_seed(seed) if devices else torch.default_generator.manual_seed(seed)
        yield
