"""Randomness that is addressed, not consumed.

Every draw runs under `forked_rng(derive_seed(seed, "purpose", coordinates...))`: what it returns depends on
its address alone, not on what was drawn before. A resumed run, a validation loop or another estimator
therefore never shifts the draws of the rest.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *address: int | str) -> int:
    """A seed in [0, 2**63) that is a hash of `seed` and the address of the draw.

    Args:
        seed: The run's seed.
        address: What the draw is for and where it stands, such as `"completions", rollout_index`.

    Returns:
        The first 63 bits of SHA-256 over the address, types included: 1 and "1" differ.

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
    """Seed torch inside the block and leave the surrounding random state as it was.

    Args:
        seed: The seed inside the block.
        device: The device whose generator is forked beside the CPU's.

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
        torch.manual_seed(seed)
        yield
