"""Benchmarks, run by `make bench`: ratios of variants measured in one run, written to replication/evidence."""
