"""Code that handles transformers models: loading, adapters, heads, sampling, scoring."""
