"""Transformers models: their files (loading, checkpoints, tokenizers) and surgery (heads, adapters)."""
