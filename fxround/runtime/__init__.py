"""How kernels are run: LLVM on the CPU, CUDA C++ text, a NumPy reference, and the torch operators over them."""
