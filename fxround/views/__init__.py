"""What a person sees of a graph: text, tables, drawings."""
