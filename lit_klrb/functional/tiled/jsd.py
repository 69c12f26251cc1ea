"""The Jensen-Shannon divergence on one block of logits [N, block], whose normalisers are known."""

import math

import torch
from torch import Tensor

from lit_klrb.functional.tiled.blocks import scratch


def block_jsd(
    logits: Tensor, ref_logits: Tensor, first: Tensor, second: Tensor, third: Tensor, parameters: Tensor
) -> Tensor:
    """Overwrite the logits with p, and the reference's with p s, where s is the derivative of D_w in p.

    D_w is the divergence of `jsd_sum` and m = w p + (1 - w) q, so s = log(p / m) / (1 - w).

    Args:
        logits: Policy logits, shape [N, block].
        ref_logits: Reference logits, shape [N, block].
        first: Scratch space, shape [N, block].
        second: The same.
        third: The same.
        parameters: Log normalisers of policy and reference, and the weight w, 0 < w < 1, shape [N, 3].

    Returns:
        The sums of p s and of q log(q / m) / w, shape [N, 2]. Their sum is the block's part of D_w.
    """
    normaliser, ref_normaliser, weight = parameters.unsqueeze(-1).unbind(1)
    log_ratio, larger, other = map(scratch, (first, second, third))
    torch.sub(logits.sub_(normaliser), ref_logits.sub_(ref_normaliser), out=log_ratio)
    lowest, least = logits.amin(1), torch.finfo(logits.dtype).tiny
    mass, ref_mass = logits.exp_(), ref_logits.exp_()
    every_pass = torch.compiler.is_compiling()  # as in `block_sums`
    if every_pass or not bool((lowest > math.log(least)).all()):
        mass.masked_fill_(mass < least, 0)
    # With r = log(p / q), the smaller of log(p / m) and log(q / m) is the larger minus |r|, and the larger is
    # -log(1 + share (exp(-|r|) - 1)) with the share 1 - w if r > 0, else w: precise for small r, and any w
    torch.abs(log_ratio, out=larger).neg_().expm1_()
    torch.gt(log_ratio, 0, out=other).mul_(larger)
    larger.sub_(other).mul_(weight).addcmul_(other, 1 - weight).log1p_().neg_()
    slopes = torch.clamp(log_ratio, max=0, out=other).add_(larger).div_(1 - weight)
    ref_products = larger.sub_(log_ratio.clamp_(min=0)).mul_(ref_mass)
    if every_pass or bool(ref_products.sum(1).isnan().any()):
        ref_products.masked_fill_(ref_mass == 0, 0)  # 0 log 0 is 0
    products = torch.mul(mass, slopes, out=ref_logits)
    if every_pass or bool(products.sum(1).isnan().any()):
        products.masked_fill_(mass == 0, 0)
    return torch.stack([products.sum(1), ref_products.sum(1) / weight[:, 0]], 1)


def block_forward(
    logits: Tensor, ref_logits: Tensor, first: Tensor, second: Tensor, third: Tensor, parameters: Tensor
) -> Tensor:
    """`block_jsd` for w = 1, where p s is p - q; the sums are 0, as `block_sums` has the forward KL."""
    normaliser, ref_normaliser, _ = parameters.unsqueeze(-1).unbind(1)
    mass = logits.sub_(normaliser).exp_()
    torch.sub(mass, ref_logits.sub_(ref_normaliser).exp_(), out=ref_logits)
    return torch.zeros_like(parameters[:, :2])
