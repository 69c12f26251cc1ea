"""Rollouts by vLLM, where it is installed: a drop-in for `generate_completions` on large models and GPUs."""

import importlib.util
import os
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_klrb.errors import ConfigurationError
from lit_klrb.models.adapters import has_adapter
from lit_klrb.models.generation import Rollout, Sampling, completion_mask
from lit_klrb.seeding import derive_seed

# vLLM takes seeds of 32 bits, signed.
_SEEDS = 2**31


class VLLMBackend:
    """Samples with vLLM, which is handed the policy's weights before every rollout.

    Each completion has a seed of its own, but vLLM's sums depend on how requests are batched: a run is
    repeatable in distribution, not bit for bit. Log-probabilities are never taken from vLLM; policy and
    reference are read by `Scorer` as always.

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
        eos_token_id: int | None,
        pad_token_id: int,
        rows_before: int = 0,
    ) -> Rollout:
        """Sample completions; arguments and result are those of `generate_completions`.

        Raises:
            ConfigurationError: If the policy has an adapter: its weights have other names.
        """
        from vllm import SamplingParams

        engine = self._with_weights_of(policy)
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
                stop_token_ids=None if eos_token_id is None else [eos_token_id],
                # Its own notion of an end: the only one is the tokenizer's, if at all.
                ignore_eos=True,
                detokenize=False,
            )
            for row in range(len(requests))
        ]
        outputs = engine.generate(requests, settings, use_tqdm=False)
        drawn = [list(output.outputs[0].token_ids) for output in outputs]
        width = max(map(len, drawn))
        completions = torch.tensor([[*ids, *[pad_token_id] * (width - len(ids))] for ids in drawn])
        completions = completions.to(prompts.device)
        mask = completion_mask(completions, eos_token_id)
        return Rollout(torch.cat([prompts, completions], 1), torch.cat([prompt_mask.bool(), mask], 1), mask)

    def _with_weights_of(self, policy: PreTrainedModel) -> Any:
        """The engine, started at first use from the policy's own files, with its weights of now."""
        if has_adapter(policy):
            raise ConfigurationError(
                "vllm samples from whole models, and the policy has an adapter; choose transformers",
                key="rollout_backend",
            )
        if self._engine is None:
            # In this process, where the weights are: they are handed over, not sent.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            from vllm import LLM

            with tempfile.TemporaryDirectory() as folder:
                policy.save_pretrained(folder)
                self._engine = LLM(model=folder, skip_tokenizer_init=True, **self.options)
        weights = list(policy.state_dict().items())
        self._engine.apply_model(lambda model: model.load_weights(iter(weights)))
        self._engine.reset_prefix_cache()
        return self._engine
