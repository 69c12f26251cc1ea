"""Sharded models in two forked processes. Training with them: `tests/cli/test_distributed.py`."""

import socket

import pytest
import torch
from torch import distributed

from benchmarks.kills.children import Child
from lit_klrb.data.tokenizer import grammar_tokenizer
from lit_klrb.engine.generation import Sampling, generate_completions
from lit_klrb.errors import ConfigurationError
from lit_klrb.models.heads import split_model
from lit_klrb.models.loading import fresh_model
from lit_klrb.models.sharding import shard

CONFIG = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32}
SAMPLING = Sampling(completions_per_prompt=1, max_new_tokens=6)


def sample(model, prompts, ends=(), rows_before=0):
    mask = torch.ones_like(prompts)
    settings = {"seed": 0, "ends": ends, "pad_token_id": 0, "rows_before": rows_before}
    return generate_completions(model, prompts, mask, SAMPLING, **settings)


def sample_on_both(arguments):
    """The first row's completion ends at once, the second's does not: both must run every forward pass."""
    rank, port = arguments
    address = f"tcp://127.0.0.1:{port}"
    torch.set_num_threads(1)  # a forked process has no others
    distributed.init_process_group("gloo", address, rank=rank, world_size=2)
    model = fresh_model(CONFIG, grammar_tokenizer(), seed=0)
    prompts = torch.tensor([[5, 6], [7, 8]])
    whole = sample(model, prompts)
    eos = int(whole.completions[0, 0])
    whole = sample(model, prompts, [eos])
    assert whole.mask.sum(1).tolist() == [1, 6]
    mesh = distributed.init_device_mesh("cpu", (2,))
    shard(model, mesh)
    own = sample(model, prompts[rank : rank + 1], [eos], rank)
    assert torch.equal(own.tokens, whole.tokens[rank : rank + 1])
    assert torch.equal(own.mask, whole.mask[rank : rank + 1])
    short = fresh_model(CONFIG, grammar_tokenizer(), seed=0).bfloat16()
    shard(short, mesh)
    # The embeddings stay gathered after a pass, the blocks do not
    assert all(split_model(short) for _ in range(2))
    return 0


def test_completions_do_not_depend_on_when_those_of_other_processes_end(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    first, second = (Child(sample_on_both, (rank, port), log, {}) for rank, log in enumerate(logs))
    with first, second:
        codes = [child.wait(60) for child in (first, second)]
        assert codes == [0, 0], "".join(log.read_text() for log in logs)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigurationError, match="does not support Linear, which has no blocks to shard"):
        shard(torch.nn.Linear(2, 2), mesh=None)
