"""A run's directory: its files, loggers and what is kept between runs."""
