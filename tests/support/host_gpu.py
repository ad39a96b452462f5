"""A GPU without a GPU: ``python host_gpu.py FOLDER CASE...`` runs ``host_gpu_cases`` on a device in the host's memory.

``host_gpu.cpp`` gives a build of PyTorch without CUDA the device "cuda", so that models are captured, moved and run as
on a GPU, and fxround's kernels are the texts of the GPU, compiled for the host (``cuda_host``). PyTorch keeps what is
registered in it, so that the cases have a process of their own. It prints a line of JSON for each case,
``[case, ""]`` or ``[case, traceback]``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which("g++") or shutil.which("clang++") or ""


def install(folder: Path) -> None:
    """Make the device. PyTorch must not be imported yet."""
    found = importlib.util.find_spec("torch")
    assert found and found.origin and "torch" not in sys.modules
    home = Path(found.origin).parent
    include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    made = folder / "host_gpu.so"
    # One header for each operator: all of them take twice as long.
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-DAT_PER_OPERATOR_HEADERS"]
    subprocess.run([COMPILER, *flags, *include, str(SOURCE), "-o", str(made), *libraries], check=True)
    ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    import_module("host_gpu_cases").main(Path(sys.argv[1]), sys.argv[2:])
