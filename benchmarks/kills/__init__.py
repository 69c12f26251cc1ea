"""Kills training runs and sweeps at random times and compares their results."""
