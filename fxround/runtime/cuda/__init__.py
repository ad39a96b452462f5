"""Kernels on CUDA devices: texts in CUDA C++ (``cpp``), their launch (``launcher``, ``driver``), and the operators.

``launcher.runs_texts`` says whether an operation runs here; ``runtime.target`` asks it.
"""
