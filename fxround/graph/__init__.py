"""The vocabulary of a captured graph: where a node comes from, its values, and groups of nodes."""
