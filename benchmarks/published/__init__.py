"""Tables that other projects published, in small: the same questions on data that Python packages have.

``python -m benchmarks.published qpytorch`` makes one of them; ``--write`` stores it under benchmarks/results.
"""
