"""What all operators of the dialect share: a class for the calls of each, from which its schema is made.

A subclass of ``Call`` declares one operator ``fxround::name``. Its fields are the operator's arguments, in order; a
field's type gives the argument's type in the schema. ``operator`` defines the operator for PyTorch with its fake
counterpart. A pass writes a node from a call; ``read`` gives the call of a node; and a kernel receives the call with
tensors in place of nodes. An argument is therefore named in one place, and its position is written nowhere.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, fx

from fxround.graph.dtypes import STORAGES, stored_as
from fxround.graph.geometry import Geometry, Sizes
from fxround.numerics.arithmetic.randomness import Part
from fxround.numerics.formats.storage import Storage

NAMESPACE: Final = "fxround"
LIBRARY: Final = torch.library.Library(NAMESPACE, "DEF")

# The fake results that calls share, by thread.
_SHARED: Final = threading.local()

# fx.Node in a graph, Tensor where the operator runs.
T = TypeVar("T")
C = TypeVar("C", bound="type[Call[Any]]")
_TYPES: Final[dict[Any, str]] = {
    T: "Tensor",
    Sequence[T]: "Tensor[]",  # type: ignore[valid-type]
    Sequence[T | None]: "Tensor?[]",  # type: ignore[valid-type]
    Sequence[int]: "int[]",
    Sizes: "SymInt[]",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}
# A convolution's geometry is one field of a call and six arguments of its operator.
_GEOMETRY: Final = {
    **dict.fromkeys(("stride", "padding", "dilation", "output_padding"), "SymInt[]"),
    "transposed": "bool",
    "groups": "SymInt",
}


@dataclass(frozen=True)
class Call(ABC, Generic[T]):
    """A call of an operator: its arguments by name.

    name        the operator's name in the namespace ``fxround``
    returns     the type of its result in the schema
    overload    the operator itself, the target of a node
    aten        ATen's overloads that it computes on floating point; their rules and lowering are made of them
    kind        of an operator with ``aten``: the kind of these rules
    rounds      whether it rounds; an operator that does not selects among values
    """

    name: ClassVar[str]
    returns: ClassVar[str] = "Tensor"
    overload: ClassVar[Any]
    aten: ClassVar[tuple[str, ...]]
    kind: ClassVar[Literal["contraction", "reduction"]]
    rounds: ClassVar[bool] = True
    _nested: ClassVar[int | None]
    _tensors: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, arguments: Sequence[Any]) -> Self:
        """Return the call with these arguments, in the order of the schema."""
        at = cls._nested
        if at is not None:
            end = at + len(fields(Geometry))
            arguments = (*arguments[:at], Geometry.of(*arguments[at:end]), *arguments[end:])
        return cls(*arguments)

    @classmethod
    def unnumbered(cls, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return the arguments with zeros for the numbers of nodes, from which random bits are drawn."""
        if fields(cls)[-1].name not in ("node", "nodes"):
            return tuple(arguments)
        *others, numbers = arguments
        return (*others, [0] * len(numbers) if isinstance(numbers, list | tuple) else 0)

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments in the order of the schema."""
        flat: list[Any] = []
        for field in fields(self):
            value = getattr(self, field.name)
            flat += [_plain(getattr(value, f.name)) for f in fields(value)] if field.name == "geometry" else [value]
        return tuple(flat)

    @property
    def operands(self) -> Sequence[T]:
        """The tensors that the kernel computes with."""
        return [getattr(self, name) for name in self._tensors]

    def loads(self) -> tuple[Storage, ...]:
        """Return how the operands are stored. Raises TypeError for a dtype that kernels do not store."""
        return tuple(stored_as(value_of(x).dtype, f"{self.name}'s operand", STORAGES) for x in self.operands)

    @abstractmethod
    def kernel(self, loads: tuple[Storage, ...]) -> Any:
        """Return the kernel for operands that are stored so; None for an operator without one.

        Raises ValueError for a rounding that the storages cannot have, or a text that is no rounding.
        """

    @abstractmethod
    def fake(self) -> Any:
        """Return a result without memory for operands without memory; raises what the operator raises for them."""


# The class of each operator's calls.
CALLS: Final[dict[Any, type[Call[Any]]]] = {}


def operator(name: str, returns: str = "Tensor", aten: tuple[str, ...] = ()) -> Callable[[C], C]:
    """Declare ``fxround::name`` by the class of its calls; a decorator."""

    def declare(cls: C) -> C:
        hints = get_type_hints(cls)
        names = [field.name for field in fields(cls)]
        cls.name, cls.returns, cls.aten = name, returns, aten
        cls._nested = names.index("geometry") if "geometry" in names else None
        cls._tensors = tuple(name for name in names if hints[name] is T and name != "rng")
        schema = ", ".join(_declared(name, hints[name]) for name in names)
        LIBRARY.define(f"{name}({schema}) -> {returns}", tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: cls.of(args).fake(), lib=LIBRARY)
        cls.overload = getattr(torch.ops.fxround, name).default
        CALLS[cls.overload] = cls
        return cls

    return declare


def _declared(name: str, hint: Any) -> str:
    """Return a field as arguments of a schema."""
    if hint is not Geometry:
        return f"{_TYPES[hint]} {name}"
    return ", ".join(f"{_GEOMETRY[field.name]} {field.name}" for field in fields(Geometry))


def _plain(value: Any) -> Any:
    """Return a tuple as the list that a graph's arguments have."""
    return list(value) if isinstance(value, tuple) else value


def read(node: fx.Node) -> Call[fx.Node] | None:
    """Return the call that a node makes, None if the node calls no operator of the dialect."""
    cls = CALLS.get(node.target) if node.op == "call_function" else None
    return None if cls is None else cls.of(node.args)


def value_of(x: Any) -> Tensor:
    """Return the fake value of a node; a tensor is its own."""
    return cast(Tensor, x.meta["val"]) if isinstance(x, fx.Node) else cast(Tensor, x)


def empty(like: Tensor, size: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of this size for ``Call.fake``; dtype: None for that of ``like``."""
    known: dict[Any, Tensor] | None = getattr(_SHARED, "known", None)
    if known is None:
        return like.new_empty(size, dtype=dtype)
    # The hash of a symbolic size itself would make its present number a condition of the graph.
    sizes = [s.node.expr if isinstance(s, torch.SymInt) else s for s in size]
    key = (dtype or like.dtype, like.device, *sizes)
    if key not in known:
        known[key] = like.new_empty(size, dtype=dtype)
    return known[key]


@contextmanager
def shared(known: dict[Any, Tensor]) -> Iterator[None]:
    """Let calls of equal dtypes and sizes have one fake result in this block. known: those of a fake mode so far."""
    _SHARED.known = known
    try:
        yield
    finally:
        _SHARED.known = None


# The numbers of a random state: seed and sample, and those of a part of a result (``dialect.processes.StateOfPart``).
STATE: Final = 2
STATE_OF_PART: Final = STATE + len(Part._fields)


def require_state(rng: Tensor, parts: bool = True) -> None:
    """Raise ValueError unless ``rng`` is a run-time tensor (seed, sample). parts: or that of a part of a result."""
    if rng.dtype != torch.int64 or not (rng.shape == (STATE,) or (parts and rng.shape == (STATE_OF_PART,))):
        raise ValueError(
            f"the random state is a {rng.dtype} tensor of shape {tuple(rng.shape)}; expected int64 (seed, sample)"
        )
