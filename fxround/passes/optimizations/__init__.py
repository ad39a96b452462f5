"""Passes that change no bit: fewer nodes, and fewer reads and writes of memory."""
