"""Shorter forms of an operation and its rounding, each of them equal to the general one where its file says so."""
