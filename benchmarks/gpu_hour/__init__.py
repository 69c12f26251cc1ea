"""What is measured where a GPU is at hand, in order and within a budget: `python -m benchmarks.gpu_hour`."""
