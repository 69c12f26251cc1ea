"""Real engines on one machine: vLLM, Ray, SLURM and loggers. See `python -m benchmarks.engines`."""
