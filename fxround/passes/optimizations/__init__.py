"""Passes that change no bit: fewer nodes, and fewer reads and writes of memory.

``passes.optimize`` calls them for a lowered graph, or a part of one, and for the bodies of its loops: ``choose``, then
``hoist``, then ``fuse``. ``compiler.pipeline`` calls ``optimize``, after ``lower`` and ``partition``.
"""
