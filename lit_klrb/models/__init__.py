"""Everything that touches a transformers model: loading, adapters, heads, sampling, scoring."""
