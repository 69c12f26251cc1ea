"""Exact tests, intervals and verdicts for paired seed sweeps. Reads no files."""

from analysis.stats.comparison import Comparison as Comparison, Rules as Rules, compare as compare
from analysis.stats.pairs import Pairs as Pairs
from analysis.stats.verdict import (
    Claim as Claim,
    Decision as Decision,
    Outcome as Outcome,
    Verdict as Verdict,
)
