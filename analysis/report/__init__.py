"""One HTML page and `results.json` from a sweep's directory, and the check that they say what it holds."""
