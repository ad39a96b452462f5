"""Architectures of the public model zoos, each asked the same questions: ``python -m benchmarks.zoo`` walks them all.

``subjects`` builds a model with random weights, ``judge`` compiles it by five policies and says what misfits, ``walk``
runs one model a process under limits, ``page`` writes docs/zoo.md and docs/zoo.json from what was found.
"""
