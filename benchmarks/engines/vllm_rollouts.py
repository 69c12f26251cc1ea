"""Rollouts of vLLM beside the policy that is trained: KL(vLLM‖policy) per sequence, around an update.

`python -m benchmarks.engines.vllm_rollouts`, or with torchrun in several processes, each with an engine of
its own; `--shard` divides the policy among them by FSDP2.
"""

import os
import sys
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
from torch import Tensor, distributed
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from lit_klrb.engine.generation import Sampling
from lit_klrb.engine.vllm import VLLMBackend
from lit_klrb.functional import kl_k3_per_token
from lit_klrb.models.adapters import add_adapter
from lit_klrb.models.rollout import Rollout
from lit_klrb.models.sharding import shard
from lit_klrb.rollouts.scoring import Scorer

SIZES: dict[str, Any] = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    # Larger than usual, so that distributions are far from uniform
    **{"initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 0},
}
SAMPLING = Sampling(8, 32, temperature=0.7)
PROMPTS = 4
# KL in float32, nats per sequence, of engines that sample from the same distribution.
LIMIT = 1e-8


def policy_of(dtype: torch.dtype) -> PreTrainedModel:
    """A random Llama, the same in all processes."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    return model.to(dtype).eval()


def changed(policy: PreTrainedModel) -> None:
    """Change all weights that are trained."""
    with torch.no_grad():
        for weight in policy.parameters():
            if weight.requires_grad:
                weight.mul_(1.05).add_(0.01 if weight.ndim == 2 else 0.1)


def sampler_kl(backend: VLLMBackend, policy: PreTrainedModel) -> tuple[float, float]:
    """KL(vLLM‖policy) in nats per sequence, and the largest difference of log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, SIZES["vocab_size"], (PROMPTS, 12), generator=generator)
    mask = torch.ones_like(prompts)
    mask[0, :5] = 0
    rollout = backend(policy, prompts, mask, SAMPLING, seed=0, ends=[0], pad_token_id=0)
    return divergence(policy, rollout, SAMPLING.temperature)


def divergence(policy: PreTrainedModel, rollout: Rollout, temperature: float) -> tuple[float, float]:
    """KL(sampler‖policy) in nats per sequence, and the largest difference of log-probabilities."""
    with torch.no_grad():
        own: Tensor = Scorer(policy, policy, temperature=temperature).logprobs(rollout)
    assert rollout.logprobs is not None
    difference = (rollout.logprobs - own).where(rollout.mask, 0).abs().max()
    kl = kl_k3_per_token(rollout.logprobs, own).where(rollout.mask, 0).sum(1).mean()
    return float(kl), float(difference)


def main() -> int:
    """Print a line for each kind of policy; 1 if the KL of one in float32 is too large."""
    code = 0
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        distributed.init_process_group("gloo")
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16), ("LoRA", torch.float32)):
        policy = policy_of(dtype)
        if name == "LoRA":
            add_adapter(policy, {"r": 4, "init_lora_weights": False}, seed=0)
        if "--shard" in sys.argv:
            if name == "LoRA":
                continue
            shard(policy, distributed.init_device_mesh("cpu", (processes,)))
        backend, lines = VLLMBackend({"max_model_len": 64, "enforce_eager": True}), []
        for moment in ("before", "after"):
            kl, difference = sampler_kl(backend, policy)
            lines.append(f"{moment} an update {kl:.1e} nats (log-probabilities within {difference:.1e})")
            code |= dtype == torch.float32 and kl >= LIMIT
            changed(policy)
        rank = int(os.environ.get("RANK", "0"))
        print(f"vLLM, {name}, process {rank + 1} of {processes}: {'; '.join(lines)}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
