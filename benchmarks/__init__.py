"""Benchmarks, run by `make bench`: ratios measured in one run, written to replication/evidence."""
