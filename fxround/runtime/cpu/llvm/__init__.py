"""Kernels as machine code through llvmlite: one table (render), one loop nest a kernel shape."""
