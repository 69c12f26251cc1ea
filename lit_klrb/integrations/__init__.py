"""This package's estimators in the trainers of other software."""
