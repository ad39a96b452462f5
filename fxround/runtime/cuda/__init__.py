"""Kernels on CUDA devices: texts in CUDA C++ (``cpp``), their launch (``launcher``, ``driver``), and the operators.

``launcher.runs_texts`` says whether an operation runs here. It is asked where a device is treated in another way:
``runtime.torch_ops`` and ``runtime.run`` (which kernel), ``runtime.schedule`` (which operations run together), and
``eager.blocks``.
"""
