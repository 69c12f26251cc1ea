"""A command line with a heavy import."""
