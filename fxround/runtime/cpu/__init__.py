"""The CPU: shapes and layouts of operands, threads, memory, and machine code by LLVM."""
