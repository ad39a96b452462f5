"""What is known of a lowered graph's values: read from the programs in it. No analysis changes a graph."""
