"""Kernels on CUDA devices: CUDA C++ texts (``cpp``), what launches them (``launcher``, ``driver``), and the operators."""
