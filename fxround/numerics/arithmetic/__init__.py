"""How roundings are computed: the scalar IR, and the algorithms that are written in it.

The modules import nothing of ``specification``, directly or through others, with which the tests compare them.
"""
