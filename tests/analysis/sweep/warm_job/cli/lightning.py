"""The heavy import, and the process that made it."""

import os

import torch

IMPORTED_BY = os.getpid()


def numbers():
    """Sums whose last digits depend on the number of threads, and on nothing else."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(700, 700, generator=generator, requires_grad=True)
    (matrix @ matrix).tanh().sum().backward()
    return {"sum": float(matrix.detach().sum()), "gradient": float(matrix.grad.norm())}
