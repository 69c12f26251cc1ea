"""RLOO: REINFORCE with a leave-one-out baseline and a KL penalty whose estimator is plugged in."""

from dataclasses import dataclass
from typing import final

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_klrb.models import loading
from lit_klrb.modules.on_policy import OnPolicyModule


@final
@dataclass(kw_only=True, eq=False, repr=False)
class RLOOModule(OnPolicyModule):
    """Maximises E[reward] − beta · KL(policy‖reference) on completions sampled from the policy.

    Reference: Kool et al. (2019), "Buy 4 REINFORCE samples, get a baseline for free!"; Ahmadian et al.
    (2024), arXiv:2402.14740.
    """

    reward_path: str | dict[str, float] = loading.GRAMMAR

    def build_policy(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The policy of policy_path, or the reference."""
        return self.load_policy()
