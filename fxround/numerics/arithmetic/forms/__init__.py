"""Shorter forms of an operation and its rounding, in place of the general ones where their files say so."""
