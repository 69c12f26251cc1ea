"""The directory of a run: its files and loggers, and the cache shared by runs."""
