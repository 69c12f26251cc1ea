"""On-policy distillation on Tinker, from a teacher's most likely tokens; made for tinker 0.38.

Tinker samples, and computes log-probabilities of given tokens; datums and losses are from here::

    loss = custom_loss(RaoBlackwellTopK(k=20, support="reference"), group_size=8)
    data = datums(prompt, response.sequences, answers)  # with the teacher's answers, see there
    training_client.forward_backward_custom(data, loss)

Both losses estimate the gradient of KL(student‖teacher), for every k without bias, with credit for the KLs of
later tokens. As Tinker's own they are sums over completions, which must be samples at a temperature of 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lit_klrb.errors import ConfigurationError
from lit_klrb.estimators import KLEstimator
from lit_klrb.estimators.checked import check_served
from lit_klrb.functional import leave_one_out_baseline, reward_to_go, served_stats
from lit_klrb.functional.credit import MAX_EXPONENT

Metrics = dict[str, Any]
# What `traced_loss` reads of a datum, with the number of dimensions of each, for `create_custom_loss`.
TRACED_RANKS = {"logprobs": 2, "ref_logprobs": 2, "tail": 1, "sampler_logprobs": 1, "score": 1, "mask": 1}
# Log-probabilities below are not of tokens: Tinker fills a head of fewer than k tokens with -99999.
_FILLED = -9e4


def datums(
    prompt: Sequence[int],
    sequences: Sequence[Any],
    answers: Sequence[Any],
    rewards: Sequence[float] | None = None,
) -> list[Any]:
    """The completions of one prompt as `tinker.Datum`s, for both losses.

    Args:
        prompt: Token ids of the prompt.
        sequences: The completions, Tinker's `SampledSequence`s with the log-probabilities of their sampler.
        answers: The teacher's `SampleResponse` for each, of `sample` with prompt and completion,
            `max_tokens=1`, `include_prompt_logprobs=True` and `topk_prompt_logprobs=k`. The teacher's prompt
            may be another than the student's.
        rewards: A reward for each, divided by the weight of the KL; None for the KL alone.

    Raises:
        ConfigurationError: If a log-probability is missing.
    """
    import tinker

    inputs = loss_inputs(prompt, sequences, answers, rewards)
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([*prompt, *sequence.tokens[:-1]]),
            loss_fn_inputs={name: tinker.TensorData.from_torch(value) for name, value in of_datum.items()},
        )
        for sequence, of_datum in zip(sequences, inputs, strict=True)
    ]


def loss_inputs(
    prompt: Sequence[int],
    sequences: Sequence[Any],
    answers: Sequence[Any],
    rewards: Sequence[float] | None = None,
) -> list[dict[str, Tensor]]:
    """The tensors of `datums`, of N = prompt + completion - 1 rows each, 0 for tokens of the prompt.

    Returns:
        For each completion `target_tokens` [N, 1 + k], the sampled token and the teacher's head, and the
        teacher's `ref_logprobs` of them; `sampler_logprobs` [N]; `tail` [N], 1 where the sampled token is
        outside the head; `mask` [N]; `score` [N], the baseline less the reward; and the `reward` [1].
    """
    heads = [_head(*pair) for pair in zip(sequences, answers, strict=True)]
    sampler = [torch.tensor(sequence.logprobs) for sequence in sequences]
    total = torch.zeros(len(heads)) if rewards is None else torch.tensor(rewards, dtype=torch.float32)
    log_ratios = [own - ref[:, 0] for own, (_, ref) in zip(sampler, heads, strict=True)]
    # The others' KL to come is estimated by sampled log ratios: datums are made before the student reads them
    to_come = reward_to_go(pad_sequence(log_ratios, batch_first=True), strict=True)
    score = -total[:, None].expand_as(to_come)
    if len(heads) > 1:
        score = score + leave_one_out_baseline(total[:, None] - to_come, len(heads))
    before = len(prompt) - 1
    results = []
    for row, (tokens, ref_logprobs) in enumerate(heads):
        of_completion = {
            "target_tokens": tokens,
            "ref_logprobs": ref_logprobs,
            "sampler_logprobs": sampler[row],
            "tail": (tokens[:, 1:] != tokens[:, :1]).all(1).float(),
            "mask": torch.ones(len(tokens)),
            "score": score[row, : len(tokens)],
        }
        rows = {
            name: torch.cat([field.new_zeros(before, *field.shape[1:]), field])
            for name, field in of_completion.items()
        }
        results.append({**rows, "reward": total[row : row + 1]})
    return results


def _head(sequence: Any, answer: Any) -> tuple[Tensor, Tensor]:
    """The sampled token and the teacher's head at each position, and their log-probabilities, [T, 1 + k]."""
    length = len(sequence.tokens)
    head = answer.topk_prompt_logprobs_np
    if sequence.logprobs is None or answer.prompt_logprobs_np is None or head is None:
        problem = "the completion's, and the teacher's of the prompt and of its k most likely tokens"
        raise ConfigurationError(f"log-probabilities are missing: {problem} are needed", key="answers")
    tokens = torch.tensor([*zip(sequence.tokens, *head.token_ids[-length:].T.tolist(), strict=True)])
    sampled, others = answer.prompt_logprobs_np[-length:], head.logprobs[-length:]
    logprobs = torch.cat([torch.as_tensor(sampled)[:, None], torch.as_tensor(others)], 1).float()
    if not (logprobs > _FILLED).all():
        raise ConfigurationError("the teacher sends fewer than k tokens at a position", key="answers")
    return tokens, logprobs


def custom_loss(
    estimator: KLEstimator, group_size: int
) -> Callable[[list[Any], list[Tensor]], tuple[Tensor, Metrics]]:
    """A loss for `TrainingClient.forward_backward_custom`, of an estimator.

    Args:
        estimator: One for a served teacher, such as `RaoBlackwellTopK(k=20, support="reference")`, whose head
            is that of the data. With `off_policy="prefix"` completions may be of an earlier student.
        group_size: Completions per prompt, which are adjacent in the data (K).

    Raises:
        ConfigurationError: If the estimator needs more, or its gradient is known to be biased.
    """
    check_served(estimator)
    estimator.check_trainable()

    def loss(data: list[Any], logprobs: list[Tensor]) -> tuple[Tensor, Metrics]:
        inputs = [{name: field.to_torch() for name, field in datum.loss_fn_inputs.items()} for datum in data]
        kept = [fields["mask"] > 0 for fields in inputs]

        def padded(values: list[Tensor]) -> Tensor:
            return pad_sequence([v[rows] for v, rows in zip(values, kept, strict=True)], batch_first=True)

        def field(name: str) -> Tensor:
            return padded([fields[name] for fields in inputs])

        mask, rewards = field("mask") > 0, torch.cat([fields["reward"] for fields in inputs])
        stats = served_stats(padded(logprobs), field("ref_logprobs"), field("target_tokens"))
        weights = estimator.weights(stats.detach(), mask, rewards, group_size=group_size)
        mean = estimator.loss(stats, mask, weights, behaviour_logprobs=field("sampler_logprobs"))
        return mean * len(data), {"kl_per_sequence": estimator.value(stats.detach(), mask).mean().item()}

    return loss


def traced_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    tail: Tensor,
    sampler_logprobs: Tensor,
    score: Tensor,
    mask: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of one datum for `ServiceClient.create_custom_loss(traced_loss, TRACED_RANKS)`.

    That of `RaoBlackwellTopK(support="reference", off_policy="prefix")`, as `torch.fx` can trace it: the KLs
    of the head and of a sampled token outside it, with the importance weights of their prefixes.

    Args:
        logprobs: The student's, of `target_tokens`, shape [N, 1 + k].
        ref_logprobs: As all that follow of `loss_inputs`.
        tail: See there.
        sampler_logprobs: See there.
        score: See there.
        mask: See there.
    """
    sampled = logprobs[:, 0]
    log_ratio = (sampled - sampler_logprobs).detach() * mask
    summed = log_ratio.cumsum(0)
    through = summed.clamp(max=MAX_EXPONENT).exp()
    before = (summed - log_ratio).clamp(max=MAX_EXPONENT).exp()
    # The sum over the head of p r - p + q, and k3(r) of a sampled token outside it, r being log(p / q)
    student, apart = logprobs[:, 1:].exp(), logprobs - ref_logprobs
    head = (student * apart[:, 1:] - student + ref_logprobs[:, 1:].exp()).sum(1) * mask * before
    outside = tail * mask * through
    slope = apart[:, 0].detach()
    kl = head.detach() + outside * (slope.clamp(min=-MAX_EXPONENT).neg().exp() - 1 + slope)
    to_come = kl.sum() - kl.cumsum(0)
    weights = to_come + log_ratio.sum().clamp(max=MAX_EXPONENT).exp() * score + outside * slope
    loss = head.sum() + (weights * mask * sampled).sum()
    return loss, {"custom/kl:mean": kl.sum()}
