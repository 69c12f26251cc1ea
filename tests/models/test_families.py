"""Scores and samples of tiny models of every family, padded, against plain forward passes in float64."""

from pathlib import Path

import pytest
import torch

from benchmarks.families import examine
from lit_klrb.models.roles import POLICY

USED = [
    *("bart", "bert", "deepseek_v3", "deepseek_v4", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2"),
    *("gpt_neox", "gpt_oss", "granite", "llama", "mamba", "mistral", "mixtral", "moshi", "olmo2", "opt"),
    *("phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "recurrent_gemma", "rwkv", "smollm3"),
]
REFUSED = {"bart", "bert", "deepseek_v4", "recurrent_gemma", "rwkv"}
DOCUMENT = (Path(__file__).parents[2] / "replication" / "evidence" / "families.md").read_text()


def supported():
    """The families that the document names as supported."""
    (line,) = [line for line in DOCUMENT.splitlines() if line.startswith("Supported (")]
    return set(line.partition(": ")[2].rstrip(".").split(", "))


def check(kind, refused):
    trial = examine(kind)
    assert (trial.refused is not None) == refused, trial
    assert trial.scored < 1e-4
    assert trial.sampled < 1e-5
    if kind in USED and trial.dtype == torch.float64 and kind != "mamba":  # which scans in float32
        assert trial.scored < 1e-12


@pytest.mark.parametrize("kind", USED)
def test_a_family_that_people_use(kind):
    check(kind, kind in REFUSED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*POLICY.architectures} - {*USED}))
def test_every_other_family(kind):
    check(kind, kind not in supported())
