"""How many bits of a result are real: samples of a perturbed model, their statistics and reports."""
