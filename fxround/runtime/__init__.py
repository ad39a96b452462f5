"""Execution of kernels: LLVM on the CPU, CUDA C++ as text, a NumPy reference, and the torch operators over them."""
