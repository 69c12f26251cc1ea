"""Bias and noise of distillation losses with a teacher's likely tokens: TRL's, the Tinker cookbook's, ours.

`python replication/notes/teacher_losses.py` prints a table. Both models are enumerable: six tokens, at most
three in a completion. For a loss whose gradient on one completion has mean m and covariance C, and the exact
gradient G of KL(student‖teacher), the entry for N completions is the root mean square error of their mean
gradient relative to |G|, at the learning rate that makes it least:
sqrt(1 - (G·m)² / (|G|² (|m|² + tr C / N))). For infinitely many it is the bias. m and C are those of 4,000
groups of four completions. Losses are those that TRL ships and, where it is installed, tinker-cookbook.
"""

import asyncio
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_klrb.estimators import MonteCarloRewardToGo, RaoBlackwellTopK
from lit_klrb.estimators.enumerated_loss import policy_at_kl
from lit_klrb.functional import served_stats
from lit_klrb.functional.enumeration import TabularLM, exact_kl_gradient, num_prefixes
from lit_klrb.integrations.tinker import TRACED_RANKS, loss_inputs, traced_loss

V, LENGTH, GROUP, GROUPS = 6, 3, 4, 4000
KLS, SIZES = (0.3, 3.0), (16, 256)


class Sampled(NamedTuple):
    """Completions of the student, [B, T], and the logits from which they and the teacher's heads are."""

    tokens: Tensor
    mask: Tensor
    logits: Tensor
    ref_logits: Tensor


Loss = Callable[[Sampled], Tensor]


def of_estimator(estimator: Any, k: int) -> Loss:
    """The loss of an estimator, as `custom_loss` uses it."""

    def loss(sampled: Sampled) -> Tensor:
        asked = with_head(sampled, k)
        own, ref = (
            logits.log_softmax(-1).gather(-1, asked) for logits in (sampled.logits, sampled.ref_logits)
        )
        stats, mask = served_stats(own, ref, asked), sampled.mask
        weights = estimator.weights(stats.detach(), mask, group_size=GROUP)
        mean: Tensor = estimator.loss(stats, mask, weights)
        return mean * len(mask)

    return loss


def with_head(sampled: Sampled, k: int) -> Tensor:
    """The sampled token and the teacher's k most likely ones, shape [B, T, 1 + k]."""
    return torch.cat([sampled.tokens[..., None], sampled.ref_logits.topk(k).indices], -1)


def traced(k: int) -> Loss:
    """`traced_loss`, datum by datum."""

    def loss(sampled: Sampled) -> Tensor:
        asked = with_head(sampled, k)
        own, ref = (
            logits.log_softmax(-1).gather(-1, asked) for logits in (sampled.logits, sampled.ref_logits)
        )
        total = torch.zeros(())
        for start in range(0, len(asked), GROUP):
            rows = range(start, start + GROUP)
            lengths = [int(sampled.mask[row].sum()) for row in rows]
            samples = [
                SimpleNamespace(tokens=sampled.tokens[row, :n].tolist(), logprobs=own[row, :n, 0].tolist())
                for row, n in zip(rows, lengths, strict=True)
            ]
            answers = [
                SimpleNamespace(
                    prompt_logprobs_np=ref[row, :n, 0].numpy(),
                    topk_prompt_logprobs_np=SimpleNamespace(
                        token_ids=asked[row, :n, 1:].numpy(), logprobs=ref[row, :n, 1:].numpy()
                    ),
                )
                for row, n in zip(rows, lengths, strict=True)
            ]
            inputs = loss_inputs([0], samples, answers)
            for row, n, fields in zip(rows, lengths, inputs, strict=True):
                total = total + traced_loss(own[row, :n], *(fields[name] for name in [*TRACED_RANKS][1:]))[0]
        return total

    return loss


def trl_losses() -> dict[str, Loss]:
    """The losses of TRL's `DistillationTrainer` and of its served teacher, both with the reverse KL."""
    from trl.experimental.server_distillation import ServerDistillationTrainer
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    def full(sampled: Sampled) -> Tensor:
        eye = torch.eye(V, dtype=sampled.logits.dtype)
        one = torch.tensor(1.0)  # by which it divides the sum
        loss, *_ = _chunked_divergence_loss(
            sampled.logits, sampled.ref_logits, eye, eye, sampled.mask, 1.0, num_items_in_batch=one
        )
        return loss

    def of_server(sampled: Sampled) -> Tensor:
        own, ref = sampled.logits.log_softmax(-1), sampled.ref_logits.log_softmax(-1)
        trainer: Any = SimpleNamespace(beta=1.0, loss_add_tail=True, reverse_kl_top_1_mode="sampled")
        for name in ("_get_reverse_kl_top_1_tokens", "_compute_sparse_top_1_divergence_loss"):
            setattr(trainer, name, getattr(ServerDistillationTrainer, name).__get__(trainer))
        trainer._reduce_divergence_loss = ServerDistillationTrainer._reduce_divergence_loss
        head = ref.topk(1)
        sent = {
            "actual_logprobs": ref.gather(-1, sampled.tokens[..., None])[..., 0],
            "topk_logprobs": head.values,
            "topk_token_ids": head.indices,
        }
        labels = sampled.tokens.masked_fill(~sampled.mask, -100)
        loss = ServerDistillationTrainer._compute_server_sparse_top_1_divergence_loss(
            trainer, sent, own, sampled.tokens, labels
        )
        return loss * sampled.mask.sum()

    return {"TRL, local teacher": full, "TRL, served teacher (sampled token and tail)": of_server}


def cookbook_losses() -> dict[str, Loss]:
    """Those of tinker-cookbook: sampled log ratios as advantages, and a renormalised top k."""
    import tinker
    from tinker_cookbook.distillation.sdft import reverse_kl_custom_loss
    from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty

    def sampled_ratio(discount: float) -> Loss:
        def loss(sampled: Sampled) -> Tensor:
            own, ref = (
                logits.log_softmax(-1).gather(-1, sampled.tokens[..., None])[..., 0].float()
                for logits in (sampled.logits, sampled.ref_logits)
            )
            data, clients = [], []
            for row in range(len(own)):
                zeros = torch.zeros(LENGTH)
                inputs = {
                    "advantages": zeros,
                    "logprobs": own[row].detach(),
                    "mask": sampled.mask[row].float(),
                }
                inputs["target_tokens"] = sampled.tokens[row]
                tensors = {name: tinker.TensorData.from_torch(field) for name, field in inputs.items()}
                data.append(tinker.Datum(tinker.ModelInput.from_ints([0] * LENGTH), tensors))

                async def answer(row: int = row) -> list[float]:
                    return [0.0, *ref[row].tolist()]

                clients.append(
                    SimpleNamespace(compute_logprobs=lambda _, a=answer: SimpleNamespace(coroutine=a))
                )
            asyncio.run(incorporate_kl_penalty(data, clients, [0] * len(data), 1.0, discount))
            advantages = torch.stack([datum.loss_fn_inputs["advantages"].to_torch() for datum in data])
            return -(advantages * sampled.mask * own).sum()

        return loss

    def renormalised(k: int) -> Loss:
        def loss(sampled: Sampled) -> Tensor:
            head = sampled.ref_logits.log_softmax(-1).topk(k)
            weights = head.values.softmax(-1).float() * sampled.mask[..., None]
            own = sampled.logits.log_softmax(-1).gather(-1, head.indices).float()
            data = [
                SimpleNamespace(loss_fn_inputs={"weights": SimpleNamespace(to_torch=lambda row=row: row)})
                for row in weights
            ]
            total: Tensor = reverse_kl_custom_loss(data, [*own])[0]
            return total

        return loss

    return {
        "cookbook, kl_discount_factor 0 (its default)": sampled_ratio(0.0),
        "cookbook, kl_discount_factor 1": sampled_ratio(1.0),
        "cookbook, reverse KL of the top 2": renormalised(2),
    }


def our_losses() -> dict[str, Loss]:
    """Unbiased, and without credit for later tokens."""
    topk: dict[str, Any] = {"support": "reference"}
    own: dict[str, Any] = {**topk, "baseline": None, "discount": 0.0, "allow_biased": True}
    return {
        "ours, local teacher": of_estimator(RaoBlackwellTopK(k=V, **topk), V),
        "ours, top 2": of_estimator(RaoBlackwellTopK(k=2, **topk), 2),
        "ours, top 4": of_estimator(RaoBlackwellTopK(k=4, **topk), 4),
        "ours, top 2, discount 0": of_estimator(RaoBlackwellTopK(k=2, **own), 2),
        "ours, top 2, traced": traced(2),
        "ours, sampled (MonteCarloRewardToGo)": of_estimator(MonteCarloRewardToGo(), 1),
    }


def errors(loss: Loss, policy: TabularLM, reference: TabularLM, exact: Tensor) -> list[float]:
    """Its errors with `SIZES` completions and with infinitely many, from groups of completions."""
    every, mask = policy.sequences()
    generator = torch.Generator().manual_seed(0)
    rows = (
        policy.logprobs(every, mask).exp().multinomial(GROUPS * GROUP, replacement=True, generator=generator)
    )
    tokens, kept = every[rows], mask[rows]
    logits = policy.token_logits(tokens).clone().requires_grad_()
    total = loss(Sampled(tokens, kept, logits, reference.token_logits(tokens)))
    (by_token,) = torch.autograd.grad(total.double(), logits)
    places = (policy.prefixes(tokens) % len(exact))[..., None].expand_as(by_token)
    by_completion = torch.zeros(len(rows), *exact.shape, dtype=torch.float64)
    by_completion.scatter_add_(1, places, by_token * kept[..., None])
    means = by_completion.view(GROUPS, GROUP, -1).mean(1)
    mean, variance = means.mean(0), means.var(0).sum().item() * GROUP  # of one completion of a group
    along = (mean @ exact.flatten()).item() ** 2 / exact.square().sum().item()
    # The square of the mean's own error is in |mean|² and, along the exact gradient, in the product
    size = mean.square().sum().item() - variance / (GROUPS * GROUP)
    return [
        math.sqrt(max(0.0, 1 - along / (size + noise))) for noise in [variance / n for n in SIZES] + [0.0]
    ]


def main() -> None:
    """Print the table."""
    warnings.simplefilter("ignore")
    losses = {**trl_losses()}
    try:
        losses |= cookbook_losses()
    except ImportError as error:
        print(f"without tinker-cookbook: {error}")
    losses |= our_losses()
    generator = torch.Generator().manual_seed(0)
    shape = 2, num_prefixes(V, LENGTH), V
    table, direction = torch.randn(shape, dtype=torch.float64, generator=generator)
    reference = TabularLM(table, LENGTH)
    sizes = [*map(str, SIZES), "infinitely many"]
    header = [f"KL {kl:g}, {size}" for kl in KLS for size in sizes]
    print(f"| loss | {' | '.join(header)} |\n|{' --- |' * (1 + len(header))}")
    for name, loss in losses.items():
        cells = []
        for kl in KLS:
            policy = policy_at_kl(reference, direction, kl)
            exact = exact_kl_gradient(policy, reference)
            cells += [f"{error:.2f}" for error in errors(loss, policy, reference, exact)]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
