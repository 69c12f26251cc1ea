"""The ledger: claims of the literature, each with a verdict computed from committed artifacts."""
