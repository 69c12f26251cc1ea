"""Hundreds of wrong inputs, with the error line that each command must print."""
