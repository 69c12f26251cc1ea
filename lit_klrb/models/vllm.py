"""Rollouts with vLLM: an optional replacement for `generate_completions`, for large models on GPUs."""

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_klrb.errors import ConfigurationError
from lit_klrb.models.adapters import has_adapter
from lit_klrb.models.generation import Rollout, Sampling, completion_mask
from lit_klrb.seeding import derive_seed

# vLLM's seeds are signed 32-bit integers.
_SEEDS = 2**31


class VLLMBackend:
    """Samples completions with vLLM, updating its weights from the policy before every rollout.

    Each completion has its own seed, but vLLM's rounding depends on how requests are batched: runs are
    reproducible in distribution, not bit for bit. `Scorer` computes the statistics of the KL; vLLM's own
    log-probabilities say from which distribution the completions are.

    Args:
        options: Arguments of `vllm.LLM`, such as {gpu_memory_utilization: 0.4}.

    Raises:
        ConfigurationError: If vLLM is not installed.
    """

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigurationError(
                "vllm is not installed; pip install vllm, or choose transformers", key="rollout_backend"
            )
        self.options = options or {}
        self._engine: Any = None

    def __call__(
        self,
        policy: PreTrainedModel,
        prompts: Tensor,
        prompt_mask: Tensor,
        sampling: Sampling,
        *,
        seed: int,
        ends: Sequence[int],
        pad_token_id: int,
        rows_before: int = 0,
    ) -> Rollout:
        """Sample completions; arguments and result are those of `generate_completions`.

        Raises:
            ConfigurationError: If the policy has an adapter, which renames its weights.
        """
        from vllm import SamplingParams

        engine = self._updated_engine(policy)
        count = sampling.completions_per_prompt
        prompts, prompt_mask = prompts.repeat_interleave(count, 0), prompt_mask.repeat_interleave(count, 0)
        requests = [
            {"prompt_token_ids": row[mask.bool()].tolist()}
            for row, mask in zip(prompts, prompt_mask, strict=True)
        ]
        settings = [
            SamplingParams(
                temperature=sampling.temperature,
                max_tokens=sampling.max_new_tokens,
                seed=derive_seed(seed, rows_before + row) % _SEEDS,
                stop_token_ids=list(ends),
                # Only stop_token_ids end a completion, not the EOS of the model's configuration
                ignore_eos=True,
                detokenize=False,
                logprobs=0,  # of the sampled tokens alone
            )
            for row in range(len(requests))
        ]
        outputs = engine.generate(requests, settings, use_tqdm=False)
        sampled = [output.outputs[0] for output in outputs]
        completions = _padded([list(each.token_ids) for each in sampled], pad_token_id, like=prompts)
        logprobs = _padded(
            [
                [entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs, strict=True)]
                for each in sampled
            ],
            0.0,
            like=prompts,
        )
        mask = completion_mask(completions, ends)
        attention = torch.cat([prompt_mask.bool(), mask], 1)
        return Rollout(torch.cat([prompts, completions], 1), attention, mask, logprobs)

    def _updated_engine(self, policy: PreTrainedModel) -> Any:
        """The engine with the policy's current weights; the first call starts it."""
        if has_adapter(policy):
            raise ConfigurationError(
                "vllm is not supported for a policy with an adapter; choose transformers",
                key="rollout_backend",
            )
        if self._engine is None:
            # Run the engine in this process, so that weights are passed without a copy between processes
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            from vllm import LLM

            with tempfile.TemporaryDirectory() as folder:
                policy.save_pretrained(folder)
                # Log-probabilities after division by the temperature, as the completions are sampled
                options = {"logprobs_mode": "processed_logprobs", **self.options}
                self._engine = LLM(model=folder, skip_tokenizer_init=True, **options)
        weights = list(policy.state_dict().items())
        self._engine.apply_model(lambda model: model.load_weights(iter(weights)))
        self._engine.reset_prefix_cache()
        return self._engine


def _padded(rows: list[list[Any]], value: float, like: Tensor) -> Tensor:
    """Rows of different lengths as one tensor on the device of another."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], device=like.device)
