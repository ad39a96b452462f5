"""Measurements of fxround and of its peers, in one run: ``python -m benchmarks`` runs all of them."""
