"""Models in few bits: weights on the grid of a format, rounded to nearest or by methods that learn from data."""
