"""Rollouts with vLLM: an optional replacement for `generate_completions`, for large models on GPUs."""

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lit_klrb.distributed import whole
from lit_klrb.engine.generation import Sampling
from lit_klrb.errors import ConfigurationError, refusing
from lit_klrb.models.adapters import merged_weights, separates
from lit_klrb.models.rollout import Rollout, completion_mask
from lit_klrb.seeding import derive_seed, forked_rng

# vLLM's seeds are signed 32-bit integers.
_SEEDS = 2**31
# Options by which an engine starts others, to which weights in this process's memory cannot be sent.
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class VLLMBackend:
    """Samples completions with vLLM, updating its weights from the policy before every rollout.

    Each completion has its own seed, but vLLM's rounding depends on how requests are batched: runs are
    reproducible in distribution, not bit for bit. `Scorer` computes the statistics of the KL; vLLM's own
    log-probabilities say from which distribution the completions are.

    Args:
        options: Arguments of `vllm.LLM`, such as {gpu_memory_utilization: 0.4}.

    Raises:
        ConfigurationError: If an engine would have several processes, or vLLM is not installed.
    """

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        for name in _PARALLEL:
            if (size := (options or {}).get(name, 1)) not in (1, None):
                problem = f"{name} must be 1, as each process has an engine of its own, got {size}"
                raise ConfigurationError(problem, key="vllm_options")
        if importlib.util.find_spec("vllm") is None:
            raise ConfigurationError(
                "vllm is not installed; pip install 'lit-klrb[vllm]', or choose transformers",
                key="rollout_backend",
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
        """Sample completions; arguments and result are those of `generate_completions`."""
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

    def start(self, policy: PreTrainedModel, dtype: torch.dtype | None = None) -> Any:
        """Start the engine, unless it runs: with memory for the policy's weights, but not the weights.

        Args:
            policy: The policy.
            dtype: In which it is computed; that of its weights by default.
        """
        if self._engine is not None:
            return self._engine
        # Run the engine in this process, so that weights are passed without a copy between processes
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        config = deepcopy(policy.config)
        # FSDP2 puts a class of its own before that of transformers
        config.architectures = [next(k.__name__ for k in type(policy).__mro__ if _is_known(k))]
        if separates(policy):
            config.tie_word_embeddings = False
        options = {
            "dtype": str(dtype or policy.dtype).removeprefix("torch."),
            # Log-probabilities after division by the temperature, as the completions are sampled
            "logprobs_mode": "processed_logprobs",
            "seed": 0,
            **self.options,
        }
        with tempfile.TemporaryDirectory() as folder, refusing("vLLM does not start", key="vllm_options"):
            from vllm import LLM

            config.save_pretrained(folder)
            with forked_rng(0):  # vLLM seeds the generators of its process
                self._engine = LLM(model=folder, skip_tokenizer_init=True, load_format="dummy", **options)
        return self._engine

    def _updated_engine(self, policy: PreTrainedModel) -> Any:
        """The engine with the policy's current weights."""
        engine = self.start(policy)
        weights = ((name, whole(weight)) for name, weight in merged_weights(policy))
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        engine.reset_prefix_cache()
        return engine


def _is_known(model_class: type) -> bool:
    return model_class.__module__.startswith("transformers.")


def _padded(rows: list[list[Any]], value: float, like: Tensor) -> Tensor:
    """Rows of different lengths as one tensor on the device of another."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], device=like.device)
