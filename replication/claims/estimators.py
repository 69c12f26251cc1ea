"""Claims about KL estimators in later papers."""

import numpy as np

from analysis.stats.text import number
from analysis.stats.verdict import Verdict as Tested
from replication.claims.claim import Citation, Number, PublishedClaim, Ruling, Status
from replication.claims.evidence import Evidence
from replication.claims.measure import ROUNDING, below, log_ratio, mean_text, objective_rows
from replication.claims.trained import better, objectives, worse

_IDENTITIES = "`python -m replication study --config replication/configs/studies/identities.yaml`"
_OFF_POLICY = "`python -m replication study --config replication/configs/studies/off_policy.yaml`"
_COMEDY = (
    "Shah et al. (2025), A Comedy of Estimators: On KL Regularization in RL Training of LLMs, "
    "arXiv:2512.21852"
)


def _k1_in_reward(evidence: Evidence) -> Ruling:
    ends = {name: values[:, -1] for name, values in evidence.pitfalls.to_optimum.items()}
    theirs = ("MonteCarlo", "K1Loss", "K3Reward", "K3Loss")
    shown = (*theirs, "K2Loss", "RaoBlackwell", "MonteCarloRewardToGo")
    rows = [Number(f"KL to the optimum, enumerated, {name}", "–", mean_text(ends[name])) for name in shown]
    found: dict[str, list[Tested]] = {name: [] for name in _OTHERS}
    for one in evidence.policies:
        arms = {name: one.arm(name) for name in _OTHERS}
        rows += objective_rows(one, list(arms.values()))
        for name, arm in arms.items():
            found[name] += [objectives(one)[arm]] if arm is not None else []
    means = {name: float(np.mean(ends[name])) for name in shown}
    won = {name for name, tests in found.items() if any(map(better, tests))}
    numbers = tuple(rows)
    if min(theirs, key=means.__getitem__) != "MonteCarlo" or won & set(theirs):
        return Ruling(Status.FAILS, "Another of the paper's four configurations ends better.", numbers)
    if won or any(below(log_ratio(ends[name], ends["MonteCarlo"])) for name in shown):
        others = "; ".join(
            f"that of {name} is significantly higher in {sum(map(better, tests))} and lower in "
            f"{sum(map(worse, tests))} of {len(tests)} sweeps"
            for name, tests in found.items()
            if tests
        )
        return Ruling(
            Status.ONLY_IF,
            f"compared with the other three of that paper. Of J in training, {others}.",
            numbers,
        )
    return Ruling(Status.HOLDS, "Nothing that was compared ends significantly better.", numbers)


# With what k1 in the reward is compared in training.
_OTHERS = ("K3Loss", "RaoBlackwell", "TiltedRaoBlackwell", "RaoBlackwellControlVariate")


def _k2_is_k1(evidence: Evidence) -> Ruling:
    found = evidence.identities["token_level"]
    numbers = (
        Number(
            "distance to the gradient of the KL, completions of one token", "0", mean_text(found["one_token"])
        ),
        Number("distance to the token-level part, sequences", "0", mean_text(found["to_token_level"])),
        Number("distance to the gradient of the KL, sequences", "0", mean_text(found["to_sequence"])),
    )
    one, token, sequence = (max(found[key]) for key in ("one_token", "to_token_level", "to_sequence"))
    if max(one, token) > ROUNDING:
        return Ruling(Status.FAILS, "They differ even with one token.", numbers)
    if sequence < ROUNDING:
        return Ruling(Status.HOLDS, "For sequences too.", numbers)
    return Ruling(
        Status.ONLY_IF,
        "a token is credited with its own log ratio alone. k1 in the reward of a sequence also has the "
        "effect of tokens on later KLs, which k2 as a loss omits.",
        numbers,
    )


def _deepseek(evidence: Evidence) -> Ruling:
    same = evidence.identities["names"]["ratio times k3 (unbiased KL)"]
    token = evidence.off_policy.moments["MonteCarlo"]["token"]["kl"].bias
    sequence = evidence.identities["token_level"]["to_sequence"]
    numbers = (
        Number(
            "largest difference to the gradient of k2 with the token's ratio, per sample", "–", number(same)
        ),
        Number("bias for the KL of the sequence, on-policy", "0", mean_text(sequence)),
        Number(
            f"bias of token ratios with the whole credit, after {evidence.off_policy.steps[-1]} inner steps",
            "0",
            mean_text(token[:, -1]),
        ),
    )
    if same > 1e-9:
        return Ruling(Status.FAILS, "It is not k2 with the token's ratio.", numbers)
    if max(sequence) < ROUNDING and token.max() < ROUNDING:
        return Ruling(Status.HOLDS, "For the KL of the sequence.", numbers)
    return Ruling(
        Status.ONLY_IF,
        "the KL is that of each token given its prefix, with the distribution of prefixes held fixed. It "
        "is, sample by sample, the gradient of k2 as a loss with the token's ratio.",
        numbers,
    )


def later_estimators() -> tuple[PublishedClaim, ...]:
    """The claims, oldest first."""
    enumerated = "Random enumerated models; theirs are language models of billions of parameters."
    return (
        PublishedClaim(
            "k2-loss-is-k1-reward",
            "k2 as a loss is k1 in the reward",
            "“under on-policy conditions, the ‘k2 as loss’ formulation is, in fact, gradient-equivalent to "
            "‘k1 in reward’” (abstract)",
            Citation(
                "Liu, Liu, Chen, Liu (2025), Rethinking KL Regularization in RLHF, arXiv:2510.01555",
                "The abstract was read.",
            ),
            _IDENTITIES,
            enumerated,
            _k2_is_k1,
        ),
        PublishedClaim(
            "deepseek-unbiased-kl",
            "DeepSeek-V3.2's unbiased KL",
            "Equation 7, π/π_old (π_ref/π − log(π_ref/π) − 1) of each token: “As a direct result of this "
            "adjustment, the gradient of this KL estimator becomes unbiased” (section 3.1)",
            Citation("DeepSeek-AI (2025), DeepSeek-V3.2, arXiv:2512.02556", "Section 3.1 was read."),
            f"{_IDENTITIES}; {_OFF_POLICY}",
            enumerated,
            _deepseek,
        ),
        PublishedClaim(
            "k1-in-reward-best",
            "k1 in the reward is best",
            "“using estimator configurations resulting in unbiased gradients leads to better performance” "
            "(abstract); of four configurations, k1 in the reward.",
            Citation(_COMEDY, "The abstract and a summary were read (emergentmind.com)."),
            "`python -m replication study --config replication/configs/studies/pitfalls.yaml`; the sweeps "
            "of replication/results.",
            "The paper: language models of 4 to 8 billion parameters on mathematics. Ours are toys: "
            "descent on E[reward] − β KL of random enumerated models at one rate, and RLOO with small "
            "GPT-2s on reviews. In training, all but K3Loss are unbiased. In the sweep with one rate for "
            "all arms, RaoBlackwellControlVariate is an earlier estimator of that name, with a single "
            "coefficient. From better models of reviews, the rates come from one run each, and at one rate "
            "no difference is found: unresolved.",
            _k1_in_reward,
        ),
    )
