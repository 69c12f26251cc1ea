"""Kills training runs and sweeps at random moments, and compares what they end with."""
