"""Text, tables and drawings of a graph."""
