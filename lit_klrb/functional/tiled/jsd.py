"""The Jensen-Shannon divergence on one block of logits [N, block], whose normalisers are known."""

import math

import torch
from torch import Tensor


def block_jsd(logits: Tensor, ref_logits: Tensor, parameters: Tensor) -> Tensor:
    """Overwrite the logits with p, and the reference's with p s, where s is the derivative of D_w in p.

    D_w is the divergence of `jsd_sum` and m = w p + (1 - w) q, so s = log(p / m) / (1 - w).

    Args:
        logits: Policy logits, shape [N, block].
        ref_logits: Reference logits, shape [N, block].
        parameters: Log normalisers of policy and reference, and the weight w, 0 < w < 1, shape [N, 3].

    Returns:
        The sums of p s and of q log(q / m) / w, shape [N, 2]. Their sum is the block's part of D_w.
    """
    normaliser, ref_normaliser, weight = parameters.unsqueeze(-1).unbind(1)
    log_ratio = logits.sub_(normaliser) - ref_logits.sub_(ref_normaliser)
    ref_mass = ref_logits.exp()
    lowest = logits.amin(1)
    mass = logits.exp_()
    floor = math.log(torch.finfo(mass.dtype).tiny)
    every_pass = torch.compiler.is_compiling()
    if every_pass or not bool((lowest > floor).all()):
        mass.masked_fill_(mass < torch.finfo(mass.dtype).tiny, 0)
    # log(p / m) and log(q / m), of which with r = log(p / q) the smaller is the larger minus |r|, and that is
    # -log(1 - share (1 - exp(-|r|))): precise for small r, and for any w
    share = torch.where(log_ratio > 0, 1 - weight, weight)
    larger = log_ratio.abs().neg_().expm1_().mul_(share).log1p_().neg_()
    products = torch.mul(mass, (larger + log_ratio.clamp(max=0)).div_(1 - weight), out=ref_logits)
    ref_products = larger.sub_(log_ratio.clamp_(min=0)).mul_(ref_mass)
    sums = torch.stack([products.sum(1), ref_products.sum(1) / weight[:, 0]], 1)
    if every_pass or bool(sums.isnan().any()):
        # 0 log 0 is 0
        sums = torch.stack(
            [
                products.masked_fill_(mass == 0, 0).sum(1),
                ref_products.masked_fill_(ref_mass == 0, 0).sum(1) / weight[:, 0],
            ],
            1,
        )
    return sums


def block_forward(logits: Tensor, ref_logits: Tensor, parameters: Tensor) -> Tensor:
    """`block_jsd` for w = 1, where p s is p - q; the sums are 0, as `block_sums` has the forward KL."""
    normaliser, ref_normaliser, _ = parameters.unsqueeze(-1).unbind(1)
    mass = logits.sub_(normaliser).exp_()
    torch.sub(mass, ref_logits.sub_(ref_normaliser).exp_(), out=ref_logits)
    return torch.zeros_like(parameters[:, :2])
