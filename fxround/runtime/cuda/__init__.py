"""Kernels as CUDA C++ text: one table of operators (``source``) and one loop nest for each kernel shape (``loops``)."""
