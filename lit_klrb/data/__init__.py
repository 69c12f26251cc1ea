"""Reviews, prompts and preferences: text in, token batches out."""
