"""Kernels on CUDA devices: texts in CUDA C++ (``cpp``), their launch (``launcher``, ``driver``), and the operators."""
