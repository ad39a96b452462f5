"""Time of contractions under a rounded accumulator, as a multiple of stock PyTorch's time in the same run.

    python -m benchmarks.contractions [--threads N] [--quick]

Kernels are called as a compiled module calls them, without PyTorch's dispatcher; stock PyTorch is called as a user
calls it. The machine's fused multiply-add peak, measured by a loop that accesses no memory, is printed above each
table; the last column is the share of it that the nearest-even accumulator reaches. benchmarks.reductions measures
sums, softmax and norms.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from benchmarks.harness import header, medians, table
from fxround.kernels.contractions import contract_kernel
from fxround.numerics.accumulation import Accumulation
from fxround.numerics.modes import Rounding
from fxround.runtime.cpu.code import current_machine
from fxround.runtime.cpu.contraction import scratch_of
from fxround.runtime.cpu.llvm.engine import compile_module
from fxround.runtime.torch_ops import KERNELS

STORE = "binary32/nearest_even/inf"
ACCUMULATORS = {
    "nearest": STORE,
    "SR": "binary32/stochastic",
    "UD": "binary32/up_down",
    "RZ": "binary32/toward_zero",
    "bfloat16": "bfloat16/nearest_even",
    "chunk=128": "bfloat16 chunk=128 combine=binary32",
}
Product = Callable[[str], Tensor]


@dataclass(frozen=True)
class Work:
    """A row: stock PyTorch's call, fxround's call by accumulator, and the number of multiply-adds."""

    name: str
    stock: Callable[[], Tensor]
    ours: Product
    steps: int


RNG: Final = torch.zeros(2, dtype=torch.int64)


def _matmul(a: Tensor, b: Tensor, accumulate: str) -> Tensor:
    result: Tensor = KERNELS[torch.ops.fxround.matmul.default](a, b, accumulate, STORE, RNG, 0)
    return result


def _product(name: str, a: Tensor, b: Tensor) -> Work:
    return Work(name, lambda: a @ b, partial(_matmul, a, b), a.numel() * b.shape[-1])


def _convolution(
    name: str, batch: int, channels: int, size: int, out: int, taps: int, stride: int, groups: int
) -> Work:
    x, w = torch.randn(batch, channels, size, size), torch.randn(out, channels // groups, taps, taps)
    pad = taps // 2 if name != "MNIST" else 0

    def ours(accumulate: str) -> Tensor:
        place = ([stride] * 2, [pad] * 2, [1] * 2, False, [0] * 2, groups)
        result: Tensor = KERNELS[torch.ops.fxround.convolution.default](x, w, *place, accumulate, STORE, RNG, 0)
        return result

    stock = partial(torch.nn.functional.conv2d, x, w, None, stride, pad, 1, groups)
    label = f"{name} {batch}x{channels}x{size}x{size}, {out} of {taps}x{taps}/{stride}"
    return Work(label, stock, ours, stock().numel() * w[0].numel())


# Channels, size, channels out, taps, stride of ResNet-50's distinct convolutions.
RESNET: Final = (
    (3, 224, 64, 7, 2),
    *((64, 56, 64, 1, 1), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1), (256, 56, 64, 1, 1)),
    *((256, 56, 128, 1, 1), (128, 56, 128, 3, 2), (256, 56, 512, 1, 2)),
    *((128, 28, 512, 1, 1), (512, 28, 128, 1, 1), (128, 28, 128, 3, 1)),
    *((512, 28, 256, 1, 1), (256, 28, 256, 3, 2), (512, 28, 1024, 1, 2)),
    *((256, 14, 1024, 1, 1), (1024, 14, 256, 1, 1), (256, 14, 256, 3, 1)),
    *((1024, 14, 512, 1, 1), (512, 14, 512, 3, 2), (1024, 14, 2048, 1, 2)),
    *((512, 7, 2048, 1, 1), (2048, 7, 512, 1, 1), (512, 7, 512, 3, 1)),
)


# Rows, length, columns of products that are too small for packing to pay.
SMALL: Final = ((1, 64, 1), (8, 8, 8), (16, 64, 16), (1, 512, 512))
# Channels, size, taps, stride: those of mobile networks, and ConvNeXt's.
DEPTHWISE: Final = ((128, 28, 3, 1), (256, 7, 3, 1), (128, 56, 3, 2), (96, 56, 7, 1))


def works(quick: bool) -> Iterator[Work]:
    """Yield the rows: products, ResNet-50's distinct convolutions, the two of an MNIST CNN, and depthwise ones."""
    for n in (512,) if quick else (512, 1024, 2048):
        yield _product(f"mm {n}x{n}x{n}", torch.randn(n, n), torch.randn(n, n))
    yield _product("bmm of 96, 128x64x128", torch.randn(96, 128, 64), torch.randn(96, 64, 128))
    yield _product("linear 8x512x2048", torch.randn(8, 512), torch.randn(2048, 512).t())
    for rows, length, columns in SMALL:
        yield _product(f"mm {rows}x{length}x{columns}", torch.randn(rows, length), torch.randn(length, columns))
    yield _product("bmm of 96, 16x16x16", torch.randn(96, 16, 16), torch.randn(96, 16, 16))
    yield _product("mv 2048x512", torch.randn(2048, 512), torch.randn(512, 1))
    for channels, size, taps, stride in DEPTHWISE:
        yield _convolution("depthwise", 8, channels, size, channels, taps, stride, channels)
    yield _convolution("MNIST", 100, 1, 28, 32, 3, 1, 1)
    yield _convolution("MNIST", 100, 32, 26, 64, 3, 1, 1)
    for channels, size, out, taps, stride in RESNET[1:4] if quick else RESNET:
        yield _convolution("ResNet-50", 8, channels, size, out, taps, stride, 1)


def fma_peak() -> float:
    """Return 10^9 binary32 multiply-adds per second of one thread: independent chains of full registers.

    Four registers stay free; chains in memory would measure the memory. Twelve chains fill two units of latency 4 to 5.
    """
    machine = current_machine()
    lanes, chains, rounds = machine.vector_bytes // 4, min(24, machine.registers - 4), 20_000
    vector = f"<{lanes} x float>"
    phis = "\n".join(f"  %a{i} = phi {vector} [ zeroinitializer, %entry ], [ %b{i}, %loop ]" for i in range(chains))
    call = f"call {vector} @llvm.fma.v{lanes}f32({vector} %x, {vector} %x, {vector}"
    steps = "\n".join(f"  %b{i} = {call} %a{i})" for i in range(chains))
    stores = "\n".join(f"  store volatile {vector} %b{i}, ptr %p, align 4" for i in range(chains))
    text = f"""
declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})
define void @peak(i64 %n, ptr %p) {{
entry:
  %x = load {vector}, ptr %p, align 4
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %j, %loop ]
{phis}
{steps}
  %j = add i64 %i, 1
  %more = icmp slt i64 %j, %n
  br i1 %more, label %loop, label %done
done:
{stores}
  ret void
}}"""
    run = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(compile_module(text, ("peak",))["peak"])
    memory = (ctypes.c_float * lanes)()
    times = []
    for _ in range(15):
        began = time.perf_counter()
        run(rounds, memory)
        times.append(time.perf_counter() - began)
    return lanes * chains * rounds / statistics.median(times) / 1e9


def scratch_megabytes(accumulate: str) -> float:
    """Return the size of one thread's packing buffers for a long contraction."""
    kernel = contract_kernel(Accumulation.parse(accumulate), Rounding.parse(STORE), ("f32", "f32"), "f32")
    big = torch.empty(1).expand(4096, 4096)
    return scratch_of(kernel, big, big) / 1e6


def measure(threads: int, quick: bool) -> None:
    """Print the table for a number of threads."""
    torch.set_num_threads(threads)
    peak = fma_peak()
    print(f"{header(('torch', 'numpy', 'llvmlite', 'fxround'))}\npeak of one thread: {peak:.0f} G multiply-adds/s\n")
    print(table(["work", "stock, ms", *ACCUMULATORS, "nearest / peak"], []))
    for work in works(quick):
        names = [
            n for n in ACCUMULATORS if work.name.startswith(("mm", "bmm", "depthwise")) or n in ("nearest", "SR", "UD")
        ]
        calls: dict[str, Callable[[], object]] = {"stock": work.stock}
        calls |= {name: partial(work.ours, ACCUMULATORS[name]) for name in names}
        # On one thread, the thread's processor time, which other processes do not change.
        times = medians(calls, time.thread_time if threads == 1 else time.perf_counter, passes=3)
        ratios = [f"{times[n] / times['stock']:.2f}x" if n in names else "" for n in ACCUMULATORS]
        reached = work.steps / times["nearest"] / 1e9 / peak / threads
        cells = [work.name, f"{times['stock'] * 1e3:.3f}", *ratios, f"{reached:.0%}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="of one table; default: a table with 1, one with 2")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rows")
    options, _ = parser.parse_known_args()
    torch.manual_seed(0)
    if options.threads:
        measure(options.threads, options.quick)
        return
    measure(1, options.quick)
    print()
    measure(2, options.quick)
    print("\nscratch a thread for 4096x4096x4096, in MB; beside it, a padded image")
    for name, text in ACCUMULATORS.items():
        print(f"  {name:10} {scratch_megabytes(text):5.2f}")


if __name__ == "__main__":
    main()
