"""What the Python of a model sees while it is compiled: methods, outside state, contexts of calls."""
