"""KL-regularised fine-tuning of language models, with tested estimates and gradients of the KL."""

__version__ = "0.2.0"
