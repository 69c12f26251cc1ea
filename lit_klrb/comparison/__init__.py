"""The KL of two given models, with its error: `lit-klrb kl`."""
