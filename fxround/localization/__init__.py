"""Which roundings make a result wrong: searches, and what one run shows of cancellations and NaNs."""
