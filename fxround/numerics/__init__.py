"""The specification of rounding and the scalar algorithms that compute it.

The package imports neither torch nor the rest of fxround.
"""
