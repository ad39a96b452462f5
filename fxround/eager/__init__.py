"""``fxround.round``: tensors rounded at once, without a graph."""
