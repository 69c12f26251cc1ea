"""Benchmarks, run by `make bench`: ratios of variants side by side, written to docs/benchmarks.md."""
