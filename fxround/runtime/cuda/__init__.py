"""Kernels as CUDA C++ text: one table (source), one loop nest a kernel shape (loops)."""
