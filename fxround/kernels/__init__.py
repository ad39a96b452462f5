"""A kernel as data: which scalar function runs in which loops, and how a rounding becomes one."""
