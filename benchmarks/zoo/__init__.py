"""Architectures of the public model zoos, all judged in the same way: ``python -m benchmarks.zoo`` walks them.

``subjects`` builds a model with random weights, ``judge`` compiles it by five policies and reports misfits, ``walk``
runs one model per process under limits, ``page`` writes docs/zoo.md and docs/zoo.json from the records.
"""
