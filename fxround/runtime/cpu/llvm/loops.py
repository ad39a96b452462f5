"""Loops, functions and memory accesses over an llvmlite builder, shared by all kernel shapes.

``count`` is the one loop and ``define`` the one way to make a kernel's function. Pointers are opaque, and offsets count
elements. Nothing here computes with values: every arithmetic operator of a kernel comes from ``render``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

from llvmlite import ir

from fxround.numerics.arithmetic.forms.truncation import Direction
from fxround.numerics.formats.storage import BYTES_OF, ELEMENT_OF, Storage
from fxround.runtime.cpu.llvm import environment
from fxround.runtime.cpu.llvm.render import SCALARS, llvm_type

I8: Final = ir.IntType(8)
I16: Final = ir.IntType(16)
I32: Final = ir.IntType(32)
I64: Final = ir.IntType(64)
PTR: Final = ir.PointerType()
CACHE_LINE: Final = 64
MEMORY: Final[dict[Storage, Any]] = {
    storage: SCALARS[ELEMENT_OF[storage]] if size > 2 else ir.IntType(8 * size) for storage, size in BYTES_OF.items()
}


def define(
    module: ir.Module,
    name: str,
    args: Sequence[tuple[str, Any]],
    direction: Direction = "nearest",
    watched: bool = False,
) -> tuple[ir.IRBuilder, dict[str, Any]]:
    """A void function of the module: its builder at the entry block, and its arguments by name.

    The function exported as ``name`` calls it in the floating-point environment that IEEE 754 starts with and then
    restores the caller's, so neither flushing of subnormals nor a rounding direction set outside can change a result.
    ``direction`` is the rounding direction while it runs. A ``watched`` function flushes subnormal results to zero and
    has an argument ``flags`` (a pointer to an i32), which is set to nonzero if anything overflowed or was subnormal.
    On processors other than x86-64 and AArch64 the caller's environment stays as it is.
    """
    kind = ir.FunctionType(ir.VoidType(), [t for _, t in args])
    function = ir.Function(module, kind, f"{name}.body")
    # Not inlined: the optimizer could otherwise move operations across the change of the environment.
    function.linkage = "internal"
    function.attributes.add("noinline")
    for argument, (label, type_) in zip(function.args, args, strict=True):
        argument.name = label
        # ``out`` may be an operand, for rounding in place: ``noalias`` would let LLVM move its loads after its stores.
        if isinstance(type_, ir.PointerType) and label != "out":
            argument.add_attribute("noalias")
    labels = [label for label, _ in args]
    _export(module, name, function, direction, labels.index("flags") if watched else None)
    return ir.IRBuilder(function.append_basic_block("entry")), dict(zip(labels, function.args, strict=True))


def _export(module: ir.Module, name: str, function: ir.Function, direction: Direction, flags: int | None) -> None:
    """Export ``name``: set the environment, call the function, collect its flags, restore the environment.

    ``flags`` is the index of the argument of a watched function that takes them.
    """
    outer = ir.Function(module, function.function_type, name)
    b = ir.IRBuilder(outer.append_basic_block("entry"))
    theirs, ours = scratch(b, I32, environment.WORDS), scratch(b, I32, environment.WORDS)
    environment.enter(b, theirs, ours, direction, flags is not None)
    b.call(function, outer.args)
    environment.leave(b, theirs, ours, None if flags is None else outer.args[flags])
    b.ret_void()


def with_sizes(b: ir.IRBuilder, a: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The arguments, and the numbers of the array ``layout`` (int64) by their names."""
    return a | {name: b.load(at(b, a["layout"], I64(i), I64), typ=I64) for i, name in enumerate(names)}


def least(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    """The smaller of two signed numbers."""
    return b.select(b.icmp_signed("<", x, y), x, y)


@contextmanager
def count(b: ir.IRBuilder, start: Any, stop: Any, step: Any = 1) -> Iterator[Any]:
    """Loop ``for (i = start; i < stop; i += step)`` over signed 64-bit i; the body is emitted inside the block."""
    before = b.block
    head = b.append_basic_block("head")
    body = b.append_basic_block("body")
    done = b.append_basic_block("done")
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(I64)
    i.add_incoming(start, before)
    b.cbranch(b.icmp_signed("<", i, stop), body, done)
    b.position_at_end(body)
    yield i
    i.add_incoming(b.add(i, I64(step) if isinstance(step, int) else step), b.block)
    b.branch(head)
    b.position_at_end(done)


class Carried:
    """Values that a loop carries, in stack slots that the optimizer turns into registers."""

    def __init__(self, b: ir.IRBuilder, values: Sequence[Any]) -> None:
        self._b = b
        with b.goto_entry_block():
            self._slots = [b.alloca(v.type) for v in values]
        self._types = [v.type for v in values]
        self.store(values)

    def store(self, values: Sequence[Any]) -> None:
        """Replace every value."""
        for slot, value in zip(self._slots, values, strict=True):
            self._b.store(value, slot)

    def load(self) -> list[Any]:
        """The present values."""
        return [self._b.load(s, typ=t) for s, t in zip(self._slots, self._types, strict=True)]


def at(b: ir.IRBuilder, base: Any, index: Any, type_: Any) -> Any:
    """The address of element ``index`` of an array of ``type_``."""
    return b.gep(base, [index], source_etype=type_)


def scratch(b: ir.IRBuilder, type_: Any, length: int) -> Any:
    """An array on the stack, allocated once in a call and aligned for any vector."""
    with b.goto_entry_block():
        # In the entry block: an alloca inside a loop would grow the stack with every pass.
        slot = b.alloca(ir.ArrayType(type_, length))
        slot.align = 64
        slot.type = PTR
        return slot


def load_vector(b: ir.IRBuilder, address: Any, storage: Storage, lanes: int) -> Any:
    """Load ``lanes`` stored elements as the IR's element type (16-bit codes and masks as u32)."""
    memory = MEMORY[storage] if lanes == 1 else ir.VectorType(MEMORY[storage], lanes)
    value = b.load(address, typ=memory, align=BYTES_OF[storage])
    return b.zext(value, llvm_type("u32", lanes)) if ELEMENT_OF[storage] == "u32" else value


def store_vector(b: ir.IRBuilder, value: Any, address: Any, storage: Storage, lanes: int) -> None:
    """Store ``lanes`` elements: the inverse of ``load_vector``, masks excepted."""
    if ELEMENT_OF[storage] == "u32":
        value = b.trunc(value, MEMORY[storage] if lanes == 1 else ir.VectorType(MEMORY[storage], lanes))
    b.store(value, address, align=BYTES_OF[storage])


def copy_elements(b: ir.IRBuilder, target: Any, source: Any, number: Any, type_: Any) -> None:
    """Copy ``number`` elements one by one, for the short ends of arrays."""
    with count(b, I64(0), number) as i:
        b.store(b.load(at(b, source, i, type_), typ=type_), at(b, target, i, type_))


def iota(lanes: int, type_: Any = I64) -> ir.Constant:
    """0, 1, 2, ... over the lanes."""
    return type_(0) if lanes == 1 else ir.Constant(ir.VectorType(type_, lanes), [type_(i) for i in range(lanes)])


def transpose(b: ir.IRBuilder, rows: list[Any]) -> list[Any]:
    """The columns of a square matrix given by its rows (a power of two of them), in log2(n) rounds of interleaving.

    Interleaving row i with row i + n/2 moves the highest bit of the row number to the lowest of the column number; n
    rounds of one bit each exchange the two numbers.
    """
    n = len(rows)
    low = ir.Constant(ir.VectorType(I32, n), [I32(i // 2 + n * (i % 2)) for i in range(n)])
    high = ir.Constant(ir.VectorType(I32, n), [I32((n + i) // 2 + n * (i % 2)) for i in range(n)])
    for _ in range(n.bit_length() - 1):
        pairs = [(rows[i], rows[i + n // 2]) for i in range(n // 2)]
        rows = [b.shuffle_vector(x, y, mask) for x, y in pairs for mask in (low, high)]
    return rows


def masked_load(b: ir.IRBuilder, address: Any, memory: Any, mask: Any, lanes: int, others: Any = None) -> Any:
    """Load the elements under the mask; the other lanes are not read, and are zero or ``others``."""
    kind = ir.VectorType(memory, lanes)
    others = ir.Constant(kind, [memory(0)] * lanes) if others is None else others
    name = f"llvm.masked.load.v{lanes}{name_of(memory)}.p0"
    signature = ir.FunctionType(kind, [address.type, I32, mask.type, kind])
    return b.call(declared(b, name, signature), [address, I32(bytes_in(memory)), mask, others])


def masked_store(b: ir.IRBuilder, value: Any, address: Any, memory: Any, mask: Any, lanes: int) -> None:
    """Store the elements under the mask; other memory is not touched."""
    kind = ir.VectorType(memory, lanes)
    name = f"llvm.masked.store.v{lanes}{name_of(memory)}.p0"
    signature = ir.FunctionType(ir.VoidType(), [kind, address.type, I32, mask.type])
    b.call(declared(b, name, signature), [value, address, I32(bytes_in(memory)), mask])


def prefetch(
    b: ir.IRBuilder, address: Any, memory: Any, number: int, level: Literal[1, 2] = 1, written: bool = False
) -> None:
    """Prefetch ``number`` elements that are needed soon; they may be beyond memory's end, which a prefetch permits.

    level: the cache to which they are brought. written: whether they will be written.
    """
    callee = declared(b, "llvm.prefetch.p0", ir.FunctionType(ir.VoidType(), [PTR, I32, I32, I32]))
    # The elements may cover several cache lines.
    for element in range(0, number, max(1, CACHE_LINE // bytes_in(memory))):
        # The arguments: for reading or writing, the cache (3 for the first level), data.
        b.call(callee, [at(b, address, I64(element), memory), I32(int(written)), I32(4 - level), I32(1)])


def declared(b: ir.IRBuilder, name: str, signature: ir.FunctionType) -> Any:
    """The module's function of this name, declared at its first use."""
    return b.module.globals.get(name) or ir.Function(b.module, signature, name)


def call_address(b: ir.IRBuilder, address: Any, arguments: Sequence[Any]) -> None:
    """Call the void function at an address (i64) with 64-bit integers; pointers are passed as addresses."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
    b.call(b.inttoptr(address, kind.as_pointer()), arguments)


def name_of(memory: Any) -> str:
    """A memory type as the names of LLVM's intrinsics spell it."""
    return {"float": "f32", "double": "f64"}.get(str(memory), str(memory))


def bytes_in(memory: Any) -> int:
    """The size of an element in memory, in bytes."""
    return 8 if memory == I64 else next(BYTES_OF[s] for s, m in MEMORY.items() if m == memory)
