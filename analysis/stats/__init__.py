"""Tests, intervals and verdicts for paired seed sweeps: arrays in, numbers out."""

from analysis.stats.claims import Claim as Claim
from analysis.stats.comparison import Comparison as Comparison, Rules as Rules, compare as compare
from analysis.stats.pairs import Pairs as Pairs
from analysis.stats.verdict import Outcome as Outcome, Verdict as Verdict
