"""Plans: what a graph or the body of a loop computes in few calls of machine code."""
