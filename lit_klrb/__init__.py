"""KL-regularised fine-tuning whose KL estimates, and KL gradients, are right."""

__version__ = "0.1.0"
