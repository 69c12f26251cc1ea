"""Claims of Tang and Munos (2025), and worked numbers of the third source."""

import numpy as np

from analysis.stats.text import number
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import Evidence
from replication.claims.measure import (
    ROUNDING,
    above,
    below,
    difference_text,
    distilled,
    log_ratio,
    mean_text,
    objective_rows,
    p_text,
    ratio_text,
    with_level,
)
from replication.claims.trained import better, compared, decidable, designs_of, kl_finding

_PAPER = "Tang, Munos (2025), On a few pitfalls in KL divergence gradient estimation for RL, arXiv:2506.09477"
_READ = Citation(_PAPER, "The abstract and the beginning of the introduction were read.")
_BLOG = Citation(
    "Post-Training (3/8): KL Divergence in RLHF, songjunxi.com/language/post-training-3-kl-divergence",
    "The page was read.",
)
_STUDY = "`python -m replication study --config replication/configs/studies/pitfalls.yaml`"
_MODELS = (
    "100 random pairs of models with three tokens and at most three positions, a row of logits per prefix; "
    "two completions with leave-one-out; all completions enumerated."
)


def _zero_mean(evidence: Evidence) -> Ruling:
    k1 = evidence.pitfalls.gradients["K1Loss"]
    start, end = (evidence.pitfalls.forward["K1Loss"][:, place] for place in (0, -1))
    numbers = (
        Number(
            "distance of its expectation from the exact gradient, over the latter's norm",
            "1",
            mean_text(k1.bias),
        ),
        Number("KL after descent along it, over the KL before", "above 1", mean_text(end / start)),
    )
    if np.abs(k1.bias - 1).max() < ROUNDING and np.isnan(k1.cosine).all():
        return Ruling(Status.HOLDS, "Its expectation is zero in every model.", numbers)
    return Ruling(Status.FAILS, "Its expectation is not zero.", numbers)


def _k3_direction(evidence: Evidence) -> Ruling:
    whole, token = (evidence.pitfalls.gradients[name] for name in ("K3LossSequence", "K3Loss"))
    numbers = (
        Number("k3 of the sequence: cosine with ∇KL(reference‖policy)", "1", mean_text(whole.reverse_cosine)),
        Number("the same with ∇KL(policy‖reference)", "not 1", mean_text(whole.cosine)),
        Number(
            "k3 per token (GRPO): cosine with ∇KL(reference‖policy)", "1", mean_text(token.reverse_cosine)
        ),
        *_trained_k3(evidence),
    )
    exact = np.abs(whole.reverse_cosine - 1).max() < ROUNDING
    if not exact:
        return Ruling(Status.FAILS, "Not even k3 of the whole sequence has that direction.", numbers)
    if np.abs(token.reverse_cosine - 1).max() < ROUNDING:
        return Ruling(Status.HOLDS, "For k3 of the sequence and per token.", numbers)
    return Ruling(
        Status.ONLY_IF,
        "k3 is of the whole sequence, or completions have one token. GRPO's sum of k3 per token has the "
        "token-level part of that gradient.",
        numbers,
    )


def _trained_k3(evidence: Evidence) -> list[Number]:
    """What training with k3 in the loss, as GRPO has it, ends at."""
    rows = []
    for one in evidence.policies:
        arm, control = one.arm("K3Loss"), one.sweep.plan.primary.control
        if arm is not None:
            (ratio,) = compared([(one, arm, control)], kl_finding)
            rows.append(
                Number(f"KL of {arm} over that of {control}, {one.title}", "–", difference_text(ratio))
            )
            rows += objective_rows(one, [arm])
    return rows


def _partial(evidence: Evidence) -> Ruling:
    names = ("K2Loss", "RaoBlackwellLoss")
    biases = {name: evidence.pitfalls.gradients[name].bias for name in names}
    numbers = tuple(
        Number(f"bias of {name}, over the norm of the exact gradient", "not 0", mean_text(bias))
        for name, bias in biases.items()
    )
    if min(bias.min() for bias in biases.values()) > ROUNDING:
        return Ruling(Status.HOLDS, "In every model.", numbers)
    return Ruling(Status.FAILS, "A token-level loss has the exact gradient.", numbers)


def _mean_squared_error(evidence: Evidence) -> Ruling:
    found = evidence.pitfalls.gradients
    errors = {name: one.bias**2 + one.noise**2 for name, one in found.items()}
    numbers = tuple(
        Number(f"mean squared error of {name}, over the squared norm", "–", mean_text(errors[name]))
        for name in ("MonteCarlo", "RaoBlackwell", "K1Loss", "K2Loss", "K3Loss", "K3LossSequence")
    )
    unbiased = max(float(found[name].bias.max()) for name in ("MonteCarlo", "RaoBlackwell"))
    if unbiased < ROUNDING < min(float(found[name].bias.min()) for name in ("K1Loss", "K3Loss")):
        return Ruling(
            Status.HOLDS,
            "Only the correct estimators approach the gradient with many samples; with two, a biased one "
            "can have the smaller error.",
            numbers,
        )
    return Ruling(Status.FAILS, "Correct and incorrect estimators do not differ in bias.", numbers)


def _descent(evidence: Evidence) -> Ruling:
    paths = {name: values.mean(axis=1) for name, values in evidence.pitfalls.forward.items()}
    k1 = evidence.pitfalls.forward["K1Loss"]
    sampled, slower = (log_ratio(paths[a], paths[b]) for a, b in (("MonteCarlo", "analytic"), _SLOWER))
    lowered = log_ratio(k1[:, -1], k1[:, 0])
    numbers = (
        Number("mean KL over the descent: MonteCarlo over analytic gradient", "1", ratio_text(sampled)),
        Number("the same: K3Loss over MonteCarlo", "above 1", ratio_text(slower)),
        Number("K1Loss: last KL over first", "not below 1", ratio_text(lowered)),
    )
    if below(lowered):
        return Ruling(Status.FAILS, "k1 as a loss lowers the KL.", numbers)
    if above(slower):
        return Ruling(Status.HOLDS, "All three of it.", numbers)
    return Ruling(
        Status.ONLY_IF,
        "it is about k1, which does not lower the KL. k3 as a loss is not slower here, though it descends "
        "along another gradient.",
        numbers,
    )


_SLOWER = ("K3Loss", "MonteCarlo")


def _distillation(evidence: Evidence) -> Ruling:
    token, sequence = "own token, sampled", "whole future, sampled"
    arms = distilled(evidence, token)
    numbers = []
    outcomes = {"full": set[bool](), "limited": set[bool]()}
    for cell, own, other in zip(evidence.distillation.cells, arms[token], arms[sequence], strict=True):
        published = "0.39 (3.0 / 7.7)"
        text = f"{with_level(other.log_ratio.value, other.interval)}, {p_text(other.p_adjusted)}"
        numbers.append(Number(f"KL, sequence over token level, enumerated, {cell}", published, text))
        numbers.append(
            Number(
                f"the same, KLs, enumerated, {cell}",
                "3.0, 7.7",
                f"{number(other.mean.value)}, {number(own.mean.value)}",
            )
        )
        outcomes[cell.capacity].add(other.log_ratio.value < 0 and other.p_adjusted < 0.05)
    neural = [
        (capacity, design)
        for capacity, one in evidence.students
        for design in designs_of(one, ("future-sampled", "own-sampled"))
    ]
    tests = compared((design for _, design in neural), kl_finding)
    for (capacity, (one, _, _)), found in zip(neural, tests, strict=True):
        text = difference_text(found)
        numbers.append(Number(f"KL, sequence over token level, {one.title}", "0.39 (3.0 / 7.7)", text))
        if decidable(found):
            outcomes[capacity].add(better(found))
    everywhere = outcomes["full"] | outcomes["limited"]
    if everywhere == {True}:
        return Ruling(Status.HOLDS, "At every point of the map.", tuple(numbers))
    if everywhere == {False}:
        return Ruling(
            Status.FAILS, "The token-level gradient ends as low or lower everywhere.", tuple(numbers)
        )
    if outcomes["full"] == {False}:
        condition = "the student cannot match the teacher"
        if outcomes["limited"] == {True, False}:
            condition += ", and not at every distance and batch"
    else:
        condition = "distance and batch are among those below with a ratio under 1"
    return Ruling(Status.ONLY_IF, f"{condition}.", tuple(numbers))


def _coins(evidence: Evidence) -> Ruling:
    return _worked(evidence, "coins", "0.082", "KL of a 0.7 coin to a fair one, in nats")


def _token(evidence: Evidence) -> Ruling:
    return _worked(evidence, "log_ratio", "1.61", "log(0.25 / 0.05), in nats")


def _worked(evidence: Evidence, key: str, published: str, what: str) -> Ruling:
    found = float(evidence.identities["worked_examples"][key])
    numbers = (Number(what, published, f"{found:.4f}"),)
    if f"{found:.{len(published.partition('.')[2])}f}" == published:
        return Ruling(Status.HOLDS, "To the digits given.", numbers)
    return Ruling(Status.FAILS, "The number is another.", numbers)


def second_source() -> tuple[PublishedClaim, ...]:
    """The claims of the second and third sources."""
    worked = "`python -m replication study --config replication/configs/studies/identities.yaml`"
    return (
        PublishedClaim(
            "k1-loss-zero-mean",
            "k1 as a loss has a gradient of mean zero",
            "“differentiate through the KL estimate as loss functions … such implementations are generally "
            "incorrect and do not produce the desired KL gradient”; for k1 the expected gradient is zero "
            "and the KL is not enforced.",
            _READ,
            _STUDY,
            _MODELS,
            _zero_mean,
        ),
        PublishedClaim(
            "k3-loss-direction",
            "k3 as a loss has the gradient of the reverse KL",
            "k3 as a loss minimises KL(reference‖policy) instead of KL(policy‖reference).",
            Citation(_PAPER, "The abstract and a summary of the paper were read (yaaang.notion.site)."),
            _STUDY,
            _MODELS,
            _k3_direction,
        ),
        PublishedClaim(
            "token-level-partial",
            "Token-level losses have a partial gradient",
            "“some implementations do not account for the sequential nature of the estimation problem and "
            "produce a partial gradient at best” (abstract)",
            _READ,
            _STUDY,
            _MODELS,
            _partial,
        ),
        PublishedClaim(
            "tabular-mean-squared-error",
            "Mean squared error over 100 random policies",
            "Experiment 1: gradient estimates against the analytic gradient over 100 random policies; only "
            "the correct ones converge to it.",
            Citation(_PAPER, "The abstract was read; the experiment is quoted second-hand."),
            _STUDY,
            f"Ours has sequences, exact expectations, and more estimators. {_MODELS}",
            _mean_squared_error,
        ),
        PublishedClaim(
            "descent-by-estimate",
            "Minimising the KL along each estimate",
            "Experiment 2: along the correct estimate, k1 as a score, descent follows the analytic curve; "
            "k1 as a loss does not lower the KL, and k3 as a loss lowers it more slowly.",
            Citation(_PAPER, "The abstract was read; the experiment is quoted second-hand."),
            _STUDY,
            "Random enumerated models with three tokens and at most three positions; 200 steps of gradient "
            "descent on each of 20 pairs, with 16 completions per step and one rate.",
            _descent,
        ),
        PublishedClaim(
            "distillation-sequence-level",
            "Distillation with the sequence-level gradient ends lower: 7.7 → 3.0",
            "Experiment 3: distilling a larger model on the student's samples, the sequence-level gradient "
            "ends at a KL of 3.0, the token-level one at 7.7.",
            Citation(_PAPER, "The abstract was read; the numbers are quoted second-hand."),
            "`python -m replication study --config replication/configs/studies/distillation_tabular.yaml`; "
            "the sweeps replication/results/distillation_full, distillation_limited and imdb_distill.",
            "The paper: one pair of language models, one rate, no replicates. Ours are toys: random "
            "enumerated models with 30 replicates, and small GPT-2s on the embedded world and on reviews "
            "with the replicates of its plan; each arm at the best rate tried for it, on other runs. k1 with "
            "reward-to-go against k2 in the loss.",
            _distillation,
        ),
        PublishedClaim(
            "worked-coins",
            "Two coins: 0.082 nats",
            "“KL(A || B) = 0.7 × log(0.7/0.5) + 0.3 × log(0.3/0.5) = 0.235 - 0.153 = 0.082”",
            _BLOG,
            worked,
            "None.",
            _coins,
        ),
        PublishedClaim(
            "worked-token",
            "A token of 0.25 against 0.05: 1.61",
            "A token with probability 0.25 under the policy and 0.05 under the reference has a log ratio "
            "of 1.61.",
            Citation(_BLOG.reference, "The page was read up to the policy's probability of 0.25."),
            worked,
            "None.",
            _token,
        ),
        PublishedClaim(
            "full-kl-cost",
            "The full KL costs 50,000 evaluations per token",
            "“Full KL: 50,000 evaluations × sequence_length × 2 models. Simplified: 1 evaluation × "
            "sequence_length × 2 models”",
            _BLOG,
            "Nothing: the claim counts evaluations. Times are on the page about zero overhead, and in "
            "replication/evidence/benchmarks.md with their commands.",
            "The log-probability of the sampled token needs the logits of the whole vocabulary too, for its "
            "normaliser: evaluations of tokens are not what the two differ in.",
            lambda evidence: Ruling(
                Status.NOT_TESTABLE, "The artifacts have times, but no counts of evaluations.", ()
            ),
        ),
    )
