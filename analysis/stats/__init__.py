"""Exact tests, intervals and verdicts for paired seed sweeps. No files are read."""

from analysis.stats.claims import Claim as Claim
from analysis.stats.comparison import Comparison as Comparison, compare as compare
from analysis.stats.pairs import Pairs as Pairs
from analysis.stats.primary import Rules as Rules
from analysis.stats.verdict import Outcome as Outcome, Verdict as Verdict
