"""How completions are sampled: decoding, key-value caches, packed weights, vLLM, served teachers."""
