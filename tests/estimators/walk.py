"""Total gradient variance of enumerable models on drawn batches."""

from operator import itemgetter

import torch
from torch.nn.functional import one_hot

from lit_klrb.functional import token_stats
from lit_klrb.functional.enumeration import TabularLM, exact_objective, num_prefixes

BETA = 0.4


class Walk:
    """Batches drawn from one policy."""

    def __init__(self, policy, reference, rewards, token_values=None):
        self.rewards = rewards
        self.tokens, self.mask = tokens, _ = policy.sequences()
        logits = [model.token_logits(tokens) for model in (policy, reference)]
        values = torch.zeros(logits[0].shape[-1]) if token_values is None else token_values
        values = values[: logits[0].shape[-1]].double()
        self.stats = token_stats(*logits, tokens, token_values=values)
        # grad log p(v) = e_v - p, grad KL = p (log p - log q - KL) and grad E[a] = p (a - E[a]), all in the
        # row that the prefix reads
        row, chosen = one_hot(policy.prefixes(tokens) % len(policy.logits)), one_hot(tokens)
        logprobs, ref_logprobs = (values.log_softmax(-1) for values in logits)
        score = chosen - logprobs.exp()
        slope = logprobs.exp() * (logprobs - ref_logprobs - self.stats.kl[..., None])
        tilt = logprobs.exp() * (values - self.stats.expected_value[..., None])
        parts = (score, slope, tilt)
        self.gradients = [torch.einsum("ntc,ntv->ntcv", row.double(), part) for part in parts]
        leaf = policy.logits.clone().requires_grad_()
        value = exact_objective(TabularLM(leaf, policy.max_length), reference, rewards, BETA)
        (self.true,) = torch.autograd.grad(-value, leaf)

    def total_variance(self, estimator, batches, group_size):
        """Mean squared distance of the gradients of `batches` [M, B] from the true gradient."""
        gradients = []
        for batch in batches:
            mask = self.mask[batch]
            weights = estimator.weights(
                self.stats.map(itemgetter(batch)),
                mask,
                self.rewards[batch],
                beta=BETA,
                group_size=group_size,
            )
            gradients.append(
                sum(
                    torch.einsum("bt,btcv->cv", part, gradient[batch])
                    for part, gradient in zip(weights, self.gradients, strict=True)
                    if part is not None
                )
                / len(batch)
            )
        return (torch.stack(gradients) - self.true).square().sum((1, 2)).mean()


def worlds():
    """Models with separate or shared rows for prefixes, and smooth or rough rewards."""
    for name, (contexts, vocab, length), roughness in (
        ("tree", (num_prefixes(3, 5), 3, 5), 0.5),
        ("wide", (num_prefixes(8, 3), 8, 3), 0.2),
        ("markov", (4, 5, 4), 0.3),
    ):
        generator = torch.Generator().manual_seed(len(name))

        def draw(*shape, generator=generator):
            return torch.randn(*shape, dtype=torch.float64, generator=generator)

        reference = TabularLM(draw(contexts, vocab) - torch.eye(vocab)[0], length)
        tokens, mask = reference.sequences()
        rewards = (draw(vocab)[tokens] * mask).sum(1).tanh() + roughness * draw(len(tokens))
        yield name, reference, rewards
