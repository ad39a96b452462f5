"""The significant bits of results: samples of a perturbed model, their statistics and reports."""
