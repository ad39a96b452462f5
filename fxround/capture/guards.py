"""What a captured graph depends on besides its tensors: Dynamo's guards, compiled, and what Dynamo does not guard.

Dynamo notes a guard for every Python value that its trace depends on: attributes, globals, closures, items of lists and
dicts, types, modes. ``Noted.compiled`` compiles them, and every call evaluates them before it uses the graph. A few
kinds are left to other checks of a call (``_ELSEWHERE`` says which). Dynamo takes the methods of classes for constant,
and reads the environment and some flags without a guard: they are compared here.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, call, itemgetter, methodcaller
from types import CodeType, MappingProxyType
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from fxround.capture.class_guards import Row, all_names, constructors, methods_of, special_names
from fxround.capture.fully_sharded import standing_in
from fxround.capture.leftovers import Installed
from fxround.capture.memory_reads import MemoryReads
from fxround.capture.numbers import Number, is_number
from fxround.capture.readings import TRACING, Readings
from fxround.capture.unset_names import classes_without, has_any
from fxround.errors import CaptureError
from fxround.numerics.lazy import cached_property

# The kinds of guards that another check of a call covers, and which.
_ELSEWHERE: Final = MappingProxyType(
    {
        "TENSOR_MATCH": "the key of a call has state and arguments; _metadata is compared of other tensors",
        "SHAPE_ENV": "Sizes",
        "GLOBAL_STATE": "the key has the grad mode, autocast and the default dtype; Readings what else is read",
        "GRAD_MODE": "the key",
        "DETERMINISTIC_ALGORITHMS": "Readings",
        "AUTOGRAD_SAVED_TENSORS_HOOKS": "hooks see what a graph saves, and change no value that it computes",
    }
)
# The kinds of guards on an argument, or on an item of one, that the key covers: it has the structure and every leaf.
_OF_ARGUMENTS: Final = frozenset(
    ("TYPE_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "SEQUENCE_LENGTH", "DICT_KEYS_MATCH")
)
# The kind of guards on the hooks of a module, which the key covers for the modules of the model.
_HOOKS: Final = "EMPTY_NN_MODULE_HOOKS_DICT"
# The kinds of guards that compare values by ==, and the types of values that may be equal and differ.
_EQUAL: Final = frozenset(("CONSTANT_MATCH", "EQUALS_MATCH"))
# The kind of guards on the keys of a dict. Those on the order of keys, too, do not notice that of an OrderedDict after
# move_to_end.
_KEYS: Final = "DICT_KEYS_MATCH"
# Dynamo's settings for guards on what is in a dict that is as it was: evaluated. torch 2.11 evaluates none on a module
# or a tensor there, which may have changed in place.
EVERY_GUARD: Final[dict[str, Any]] = {
    "use_recursive_dict_tags_for_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
}
_MISSING: Final = object()
# What Dynamo says of an object that has an attribute which it lacked.
_UNSET: Final = re.compile(r"not ___dict_contains\('(\w+)', .*\.__dict__\)")
# The types of constants, whose identity says no more than their value.
_BY_VALUE: Final = (type(None), str, bytes, int, float, complex)
_INEXACT: Final = float | np.floating | complex | list | tuple | set | frozenset
_LIBRARIES: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Guards:
    """The compiled guards of one graph, and what is compared besides.

    check       Dynamo's guards, for the names of a scope
    explain     the same, with the guard that failed
    scope       the model by the name that its forward has for it, and the default values of arguments
    sources     what the guards read, longest first, and how the model's author spells it
    bind        the names that mean something else in every call; None if no guard reads them
    rows        the methods of classes, and the attributes of the model itself, that no guard names
    flags       functions of PyTorch with arguments and results
    environment the environment, if the trace read it
    layouts     the strides of the arguments, if the trace read some
    memory      how the trace reads memory
    places      the layouts of the arguments, as far as it does
    grad_mode   whether the trace read the grad mode
    kept        what is compared by identity, and what has to live as long
    members     the names of the attributes of arguments that the trace read
    """

    check: Callable[[dict[str, Any]], bool] | None = None
    explain: Callable[[dict[str, Any]], Any] | None = field(default=None, repr=False)
    scope: dict[str, Any] = field(default_factory=dict, repr=False)
    sources: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    bind: Callable[[Any, Any], dict[str, Any]] | None = field(default=None, repr=False)
    rows: tuple[Row, ...] = field(default=(), repr=False)
    flags: tuple[tuple[Callable[..., Any], tuple[Any, ...], Any], ...] = field(default=(), repr=False)
    environment: Mapping[Any, Any] | None = field(default=None, repr=False)
    layouts: tuple[Any, ...] | None = field(default=None, repr=False)
    memory: MemoryReads = field(default_factory=MemoryReads)
    places: tuple[Any, ...] = field(default=(), repr=False)
    grad_mode: bool = False
    kept: tuple[Any, ...] = field(default=(), repr=False)
    members: frozenset[str] = frozenset()

    def hold(self, args: Any, kwargs: Any) -> bool:
        """Whether everything that the trace depended on is as it was."""
        if self.check is None:
            return True
        if not self.check(self.scope if self.bind is None else {**self.scope, **self.bind(args, kwargs)}):
            return False
        owners, reads, values = self._columns
        try:
            # One comparison, which takes half the time of one for each row.
            if list(map(call, reads, owners)) != values and not (TRACING and self._are_replaced()):
                return False
        except (AttributeError, KeyError):
            return False
        if self.flags and any(flag(*given) != value for flag, given, value in self.flags):
            return False
        if self.layouts is not None and self.layouts != layouts_of((args, kwargs)):
            return False
        if self.memory.order and self.memory.layouts((args, kwargs)) != self.places:
            return False
        return self.environment is None or environment() == self.environment

    @cached_property
    def _columns(self) -> tuple[tuple[Any, ...], tuple[Callable[[Any], Any], ...], list[Any]]:
        """The objects of the rows, what reads them, and what was read."""
        owners, reads, values = zip(*self.rows, strict=True) if self.rows else ((), (), ())
        return owners, reads, list(values)

    def _are_replaced(self) -> bool:
        """Whether all rows that differ are those of classes whose methods a trace replaces."""
        return all(is_replaced(owner) for owner, read, values in self.rows if read(owner) != values)

    def changed(self, args: Any, kwargs: Any) -> list[str]:
        """Return what is not as it was, as the model's author spells it."""
        if self.check is None or self.explain is None or self.hold(args, kwargs):
            return []
        scope = self.scope if self.bind is None else {**self.scope, **self.bind(args, kwargs)}
        if not self.check(scope):
            parts = [str(part) for part in self.explain(scope).verbose_code_parts]
            return [self._spelled(part) for part in parts[:1]] or ["a value that the model reads"]
        changes = [f"torch.{flag.__name__}()" for flag, given, value in self.flags if flag(*given) != value]
        if self.layouts is not None and self.layouts != layouts_of((args, kwargs)):
            changes.append("the order of an argument in memory")
        if self.memory.order and self.memory.layouts((args, kwargs)) != self.places:
            changes.append("the memory of an argument (by as_strided)")
        if any(read is _layouts_of_state and read(owner) != values for owner, read, values in self.rows):
            changes.append("the order of a parameter or buffer in memory")
        if self.environment is not None and environment() != self.environment:
            changes.append("os.environ")
        return changes or ["a method or an attribute of a class"]

    def _spelled(self, part: str) -> str:
        """Return the source that a failed guard reads."""
        told = part.partition("  # ")[0]
        spelled = next((spelled for source, spelled in self.sources if source in told), told.strip())
        unset = _UNSET.search(told)
        return f"{spelled}.{unset[1]}" if unset else spelled


def is_replaced(owner: Any) -> bool:
    """Whether a class is PyTorch's, some methods of which are replaced while any thread traces a model."""
    return isinstance(owner, type) and owner.__module__.startswith("torch.")


def layouts_of(values: Any) -> tuple[Any, ...]:
    """Return the strides of tensors, where they do not follow from the sizes."""
    tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
    return tuple(None if t.is_contiguous() else t.stride() for t in tensors)


def environment() -> Any:
    """Return the dict of the environment's variables."""
    return getattr(os.environ, "_data", os.environ)


@dataclass(frozen=True)
class Noted:
    """The guards that Dynamo noted in a trace, before they are compiled.

    output: what ``fullgraph_capture`` returned about the trace. model: the user's model, which may be another object
    than the traced one. args, kwargs: those of the trace. readings: what it read. installed: the names of globals that
    guards read, too.
    """

    output: Any = field(repr=False)
    model: nn.Module
    traced: nn.Module = field(repr=False)
    args: Any = field(repr=False)
    kwargs: Any = field(repr=False)
    readings: Readings = field(repr=False)
    installed: Installed = field(repr=False)

    def guard(self, number: Number) -> bool:
        """Whether the trace noted the value of a number, under the name that it has here."""
        graph = self.output.output_graph
        roots = [name for name, value in graph.local_scope.items() if value is self.traced]
        values = {guard.name for guard in graph.guards if guard.create_fn_name() in _EQUAL}
        return any(number.source(root) in values for root in roots)

    def reads(self, model: nn.Module, numbers: Collection[Number]) -> bool:
        """Whether the trace may have read one of these numbers from this model, which is not the traced one."""
        graph = self.output.output_graph
        scope = {"L": graph.local_scope, "G": graph.global_scope}
        read = [*(guard.originating_source for guard in graph.guards), *self.readings.sources.values()]
        named = {(number.name, id(number.holder(model))) for number in numbers}
        names = {number.name for number in numbers}
        parts = {p.name: p for source in read for p in _chain(source) if isinstance(_key(p), str) and _key(p) in names}
        for part in parts.values():
            holder = value_of(part.base, scope)
            if (
                holder is _MISSING
                or {(_key(part), id(holder)), (_key(part), id(getattr(holder, "__dict__", None)))} & named
            ):
                return True
        return False

    def compiled(self, numbers: Collection[Number] = ()) -> Guards:
        """Return the guards for the values as they are now, outside of the switches of a trace.

        numbers: those whose values do not matter, as long as they are numbers.
        """
        from torch._dynamo.convert_frame import get_traced_fn

        graph = self.output.output_graph
        function, owner = get_traced_fn(self.traced)
        signature = inspect.signature(function, follow_wrapped=False)
        given = signature.bind(*([] if owner is None else [owner]), *self.args, **self.kwargs).arguments.keys()
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        models = {name for name, value in graph.local_scope.items() if value is self.traced}
        fixed = models | (graph.local_scope.keys() - given - cells.keys())
        names = fixed | cells.keys()
        free = {number.source(root) for number in numbers for root in models}
        values = [guard for guard in graph.guards if guard.name in free and guard.create_fn_name() in _EQUAL]
        scope = {"L": graph.local_scope, "G": graph.global_scope}
        covered = {id(module) for module in (self.traced, *self.model.modules())}
        stand_ins = standing_in()
        kept = [
            guard
            for guard in graph.guards
            if guard not in values and _is_evaluated(guard, names)
            if guard.create_fn_name() != _HOOKS or id(value_of(guard.originating_source.base, scope)) not in covered
            if not _is_below(guard.originating_source, stand_ins, scope)
        ]
        tensors = [source for source in self._other_tensors(scope) if not _is_below(source, stand_ins, scope)]
        known = {guard.name for guard in graph.guards}
        identities = self._identities(scope)
        unguarded = {
            name: source
            for name, source in self.readings.sources.items()
            if _is_compared(source, names)
            and not _is_below(source, stand_ins, scope)
            and (name not in known or (identities and id(value_of(source, scope)) in identities))
        }
        orders = [(source, value) for source, value in ordered(kept, scope) if _is_compared(source, names)]
        unguarded.update((source.name, source) for source, _ in orders)
        checker = _checker(
            self.output.bytecode,
            graph,
            kept,
            list(unguarded.values()),
            tensors,
            _metadata(self.readings.memory.offset),
        )
        read = [
            *(guard.originating_source for guard in kept),
            *unguarded.values(),
            *tensors,
        ]
        root, varying = checker.guard_manager.root, {_root(source) for source in read} - fixed - {""}
        classes = [guard.guarded_class_weakref() for guard in kept if guard.guarded_class_weakref is not None]
        values_read = [value for value in (value_of(source, scope) for source in read) if value is not _MISSING]
        classes.extend(value if isinstance(value, type) else type(value) for value in values_read)
        codes = frozenset(self.output.traced_code)
        parts = [part for source in read if _root(source) in varying - cells.keys() for part in _chain(source)]
        told = sorted({source.name for source in read if source.name}, key=len, reverse=True)
        return Guards(
            check=root.check,
            explain=root.check_verbose,
            scope={name: graph.local_scope[name] for name in fixed},
            sources=tuple((name, _said(name, self.model)) for name in told),
            bind=_binding(signature, owner is not None, cells, varying) if varying else None,
            rows=(
                *_found_in(function, self.traced, classes, codes),
                *_own(self.model),
                *self._copied(),
                *_memory_of(self.model, self.readings.memory),
                *([(self.model, _layouts_of_state, _layouts_of_state(self.model))] if self.readings.strides else []),
                *((value, list, list(value)) for _, value in orders),
                *constructors(classes, codes),
                *special_names(classes),
                *all_names(values_read),
                *inherited([guard.originating_source for guard in graph.guards], scope),
                *unset(graph.guards, scope),
                *(_numbers_of(self.model, number) for number in numbers),
            ),
            flags=self.readings.lasting_flags(),
            environment=dict(environment()) if self.readings.environ else None,
            layouts=layouts_of((self.args, self.kwargs)) if self.readings.strides else None,
            memory=self.readings.memory,
            places=self.readings.memory.layouts((self.args, self.kwargs)),
            grad_mode=self.readings.grad_mode,
            kept=(*checker.__dict__.get("kept", ()), function.__defaults__, function.__kwdefaults__, self.installed),
            members=frozenset(part.member for part in parts if type(part).__name__ == "AttrSource"),
        )

    def _identities(self, scope: dict[str, Any]) -> set[int]:
        """Return the identities of the objects that the trace compared by identity."""
        compared = [value_of(source, scope) for source in self.readings.identities]
        equal = [value_of(source, scope) for source in self.readings.equalities]
        compared.extend(value for value in equal if getattr(type(value), "__eq__", None) is object.__eq__)
        return {id(value) for value in compared if not isinstance(value, _BY_VALUE)}

    def _other_tensors(self, scope: dict[str, Any]) -> list[Any]:
        """Return the sources of the tensors that are neither parameters, nor buffers, nor arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        known = {id(t) for t in (*self.model.parameters(), *self.model.buffers(), *leaves)}
        sources = [
            g.originating_source for g in self.output.output_graph.guards if g.create_fn_name() == "TENSOR_MATCH"
        ]
        values = [(source, value_of(source, scope)) for source in sources]
        return [source for source, value in values if isinstance(value, Tensor) and id(value) not in known]

    def _copied(self) -> tuple[Row, ...]:
        """Return the attributes of the model that the traced one has copies of."""
        if self.traced is self.model:
            return ()
        own = vars(self.model)
        read = itemgetter(*(name for name in vars(self.traced) if name in own))
        return ((own, read, read(own)),)


def _is_evaluated(guard: Any, names: set[str]) -> bool:
    """Whether no other check of a call covers the guard. names: the variables that are no arguments."""
    kind, root = guard.create_fn_name(), _root(guard.originating_source)
    if kind in _ELSEWHERE:
        return False
    if kind == "DUPLICATE_INPUT":  # of two names of one library, each of which has a guard of its own
        return not guard.name.startswith("G['__import_")
    if not root or root in names:
        return True
    return kind not in _OF_ARGUMENTS or not all(_is_item(source) for source in _chain(guard.originating_source)[1:])


def sources_of_keys(guards: Iterable[Any]) -> set[Any]:
    """Return the sources of dicts of which these guards compare the keys.

    Dynamo adds their order for some of the uses that depend on it: not for ``f(**d)``, ``{**d}`` and ``d | e``.
    """
    return {guard.originating_source for guard in guards if guard.create_fn_name() == _KEYS}


def ordered(guards: Iterable[Any], scope: dict[str, Any]) -> Iterator[tuple[Any, OrderedDict[Any, Any]]]:
    """Yield the ``OrderedDict`` objects of which these guards compare the keys, with their sources."""
    for source in {source.name: source for source in sources_of_keys(guards)}.values():
        value = value_of(source, scope)
        if isinstance(value, OrderedDict) and len(value) > 1:
            yield source, value


def value_of(source: Any, scope: dict[str, Any]) -> Any:
    """Return what a source gives now; _MISSING for a name of the trace alone."""
    try:
        return eval(source.name, scope)  # as Dynamo's guards do
    except Exception:  # whatever an attribute or a key may raise that is no longer, or not yet, there
        return _MISSING


def _is_compared(source: Any, names: set[str]) -> bool:
    """Whether a value that the trace read without a guard may be another one later.

    names: the variables that are no arguments.
    """
    chain = _chain(source)
    if any(type(part).__name__ == "SkipGuardSource" for part in chain):  # what PyTorch itself takes for constant
        return False
    return _root(source) in names or bool(re.match(r"G\['(?!__(import|builtins_dict)_+\w+'\]$)", source.name))


def _is_below(source: Any, stand_ins: Collection[int], scope: dict[str, Any]) -> bool:
    """Whether a value is one of these objects, by their ids, or is found by way of one.

    They stand in the trace for parts of parameters and hooks of ``fully_shard``, which are looked at before each call.
    """
    return bool(stand_ins) and any(id(value_of(part, scope)) in stand_ins for part in _chain(source))


def _chain(source: Any) -> list[Any]:
    """Return the sources by which a value is found, from the variable to the value itself."""
    chain = []
    while source is not None:
        chain.append(source)
        source = getattr(source, "base", None)
    return chain[::-1]


def _key(source: Any) -> Any:
    """Return the attribute or the key by which a value is found in its holder."""
    return getattr(source, "member", getattr(source, "index", None))


def _root(source: Any) -> str:
    """Return the name of the local variable by which a value is found; "" for a global and for a flag."""
    first = _chain(source)[0]
    return str(first.local_name) if hasattr(first, "local_name") else ""


def _is_item(source: Any) -> bool:
    return type(source).__name__ in ("DictGetItemSource", "GetItemSource", "ListGetItemSource", "ConstDictKeySource")


def _checker(
    code: Any,
    graph: Any,
    guards: Sequence[Any],
    unguarded: Sequence[Any],
    tensors: Sequence[Any],
    metadata: Callable[[Any], Any],
) -> Any:
    """Return Dynamo's manager of these guards; it keeps the objects that the guards compare by identity.

    unguarded: what the trace read besides, which is compared by identity.
    tensors: those whose metadata no key has, as ``metadata`` reads them.
    """
    from torch._dynamo import config
    from torch._dynamo import guards as dynamo_guards
    from torch._dynamo.guards import CheckFunctionManager
    from torch._guards import GuardsSet
    from torch.utils._ordered_set import OrderedSet

    class Checker(CheckFunctionManager):
        def id_ref(self, obj: object, obj_str: str) -> int:
            self.__dict__.setdefault("kept", []).append(obj)
            return id(obj)

        def compile_check_fn(self, builder: Any, guards_out: list[Any], guard_fail_fn: Any) -> None:
            require_digits(builder, guards_out)
            for source in unguarded:
                told, value = [f"{source.name} is another object"], builder.get(source)
                manager = builder.get_guard_manager_from_source(source)
                manager.add_id_match_guard(self.id_ref(value, source.name), told, None)
            for source in tensors:
                told, value = [f"{source.name} is another kind of tensor"], metadata(builder.get(source))
                builder.get_guard_manager_from_source(source).add_lambda_guard(_has(metadata, value), told, None)
            super().compile_check_fn(builder, guards_out, guard_fail_fn)

    noted = copy.copy(graph)
    noted._guards = GuardsSet(OrderedSet(guards))
    noted._aotautograd_guards = []
    noted.guard_on_key_order = graph.guard_on_key_order | sources_of_keys(guards)
    # Dynamo notes the modes of a frame that it runs itself.
    noted.torch_function_mode_stack = _get_current_function_mode_stack()
    noted.skip_guards_check = True
    with config.patch(
        guard_nn_modules=True,
        skip_nnmodule_hook_guards=False,
        use_lamba_guard_for_object_aliasing=False,
        **EVERY_GUARD,
    ):
        try:
            return Checker(code, noted)
        except CaptureError:
            raise
        except Exception as error:  # what a source raises that names a value of another moment or another module
            raise CaptureError(
                f"what the model read in the trace cannot be read again ({type(error).__name__}: {error}): the globals "
                "of a function must be those of the module that its __name__ says, and what it reads must stay there."
            ) from error
        finally:
            # A cache of the names in code, which would keep the code of every trace.
            names_in_code = getattr(dynamo_guards, "code_framelocals_names_reversed_cached", None)
            if names_in_code is not None:
                names_in_code.cache_clear()


def _metadata(offset: bool) -> Callable[[Any], Any]:
    """Return the function that reads what a model may read of a tensor besides its numbers. offset: of its storage."""

    def metadata(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return type(x)
        place = (x.stride(), x.storage_offset() if offset else 0) if x.layout == torch.strided else None
        return type(x), x.dtype, x.shape, x.layout, x.device, x.requires_grad, place

    return metadata


def require_digits(builder: Any, guards: Iterable[Any]) -> None:
    """Let guards tell values apart that are equal: 0.0 and -0.0. builder: Dynamo's, of these guards."""
    for guard in guards:
        value = builder.get(guard) if guard.create_fn_name() in _EQUAL else None
        if isinstance(value, _INEXACT) and _may_equal_another(value):
            told, digits = [f"{guard.name} has other digits"], _digits_of(value)
            builder.get_guard_manager(guard).add_lambda_guard(_of_digits(digits), told, guard.user_stack)


def _has(read: Callable[[Any], Any], value: Any) -> Callable[[Any], bool]:
    return lambda holder: bool(read(holder) == value)


def _may_equal_another(value: Any) -> bool:
    """Whether another value than this one may be equal to it and of the same type."""
    if isinstance(value, float | np.floating):
        return bool(value == 0)
    return not isinstance(value, complex) or value.real == 0 or value.imag == 0


def _of_digits(digits: Any) -> Callable[[Any], bool]:
    return lambda value: bool(_digits_of(value) == digits)


def _digits_of(value: Any) -> Any:
    """Return a key that tells values apart that are equal: 0.0 and -0.0, 1 and True in a tuple."""
    if isinstance(value, list | tuple):
        return type(value), *map(_digits_of, value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(_digits_of, value))
    return type(value), repr(value)


def _binding(
    signature: inspect.Signature, bound: bool, cells: Mapping[str, Any], names: Iterable[str]
) -> Callable[[Any, Any], dict[str, Any]]:
    """Return the function that reads arguments and variables of a closure by name.

    bound: whether the first parameter is the model.
    """
    wanted = {name: cells[name] for name in names if name in cells}
    rest = [name for name in names if name not in cells]

    def bind(args: Any, kwargs: Any) -> dict[str, Any]:
        bound_values = {name: cell.cell_contents for name, cell in wanted.items()}
        if rest:
            given = signature.bind(*([None] if bound else []), *args, **kwargs)
            given.apply_defaults()
            bound_values |= {name: given.arguments[name] for name in rest}
        return bound_values

    return bind


def _found_in(function: Any, model: nn.Module, values: Iterable[Any], codes: Collection[CodeType]) -> Iterator[Row]:
    """Yield the function that was traced, and the methods and properties whose code was traced, by their classes."""
    yield function, _defaults, _defaults(function)
    yield from (_read(cls, names) for cls, names in methods_of((*model.modules(), *values), codes))


def _own(model: nn.Module) -> Iterator[Row]:
    """Yield the type of the model, and a forward of its own: the trace began with what they are."""
    yield model, type, type(model)
    yield vars(model), methodcaller("get", "forward"), vars(model).get("forward")


def _numbers_of(model: nn.Module, number: Number) -> Row:
    """Return the row of a number whose value does not matter."""
    return number.holder(model), lambda held: is_number(held.get(number.name)), True


def _memory_of(model: nn.Module, reads: MemoryReads) -> Iterator[Row]:
    """Yield the row of the layouts of parameters and buffers, if the trace reads memory."""
    if reads.order:

        def layouts(held: nn.Module) -> tuple[Any, ...]:
            return reads.layouts([*held.parameters(), *held.buffers()])

        yield model, layouts, layouts(model)


def _layouts_of_state(model: nn.Module) -> tuple[Any, ...]:
    """Return the strides of parameters and buffers."""
    return layouts_of([*model.parameters(), *model.buffers()])


def inherited(sources: Iterable[Any], scope: dict[str, Any]) -> Iterator[Row]:
    """Yield, for each attribute that was read from a base class, whether the classes before that one have it, too."""
    depths: dict[type, dict[Any, int]] = {}
    for part in (part for source in sources for part in _chain(source)):
        base: Any = getattr(part, "base", None)
        place: Any = base.base if type(base).__name__ == "TypeDictSource" else base
        order: Any = getattr(place, "base", None)
        if type(order).__name__ != "TypeMROSource" or not isinstance(_key(part), str):
            continue
        cls = value_of(order.base, scope)
        if isinstance(cls, type):
            known = depths.setdefault(cls, {})
            known[_key(part)] = max(_key(place), known.get(_key(part), 0))
    for cls, names in depths.items():
        inherited = tuple((name, depth) for name, depth in names.items() if depth)
        if inherited:
            read = _earlier(inherited)
            yield cls, read, read(cls)


def unset(guards: Iterable[Any], scope: dict[str, Any]) -> Iterator[Row]:
    """Yield that classes have none of the names that the trace did not find in them, apart for those of PyTorch."""
    found = list(classes_without(guards, lambda source: value_of(source, scope)))
    for replaced in (False, True):
        named = [(cls, names) for cls, names in found if is_replaced(cls) is replaced]
        if named:
            yield named[0][0], has_any(named), False


def _earlier(depths: Sequence[tuple[Any, int]]) -> Callable[[type], list[bool]]:
    """Return the function that says which classes have attributes. depths: how many classes, by the attributes."""
    return lambda cls: [name in vars(base) for name, depth in depths for base in cls.__mro__[:depth]]


def _defaults(function: Any) -> tuple[Any, ...]:
    """Return the code of a function and the objects of its defaults, which the guards keep alive."""
    return function.__code__, *map(id, function.__defaults__ or ()), *map(id, (function.__kwdefaults__ or {}).values())


def _read(owner: Any, names: Sequence[str]) -> Row:
    read = attrgetter(*names)
    return owner, read, read(owner)


def spelled(source: str) -> str:
    """Return a source as the model's author spells it: self.cache for ``L['self'].cache``."""
    array = re.fullmatch(r"___from_numpy\((.*)\)", source)
    named = re.sub(r"^([LG]\['(\w+)'\])", r"\2", array[1] if array else source)
    named = re.sub(r"^__import_(\w+?)\.", "", named)
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", named)


def _said(source: str, model: nn.Module) -> str:
    """Return a source as the model's author spells it; of a compiled function, the variables of its closure by name."""
    inside = re.sub(r"^L\['self'\]\.function\.__self__", "self", source)
    inside = re.sub(r"\bdict\(type\((.*?)\)\.__dict__\)\['(\w+)'\]", r"\1.\2", inside)
    inside = re.sub(r"^dict\(type\((.*)\)\.__dict__\)$", r"the class of \1", inside)  # torch 2.15 reads it by its dict
    inside = re.sub(r"^the class of L\['(\w+)'\]", r"the class of \1", inside)
    code = getattr(getattr(model, "function", None), "__code__", None)
    if code is not None:
        cell = r"^L\['self'\]\.function\.__closure__\[(\d+)\]\.cell_contents"
        inside = re.sub(cell, lambda match: str(code.co_freevars[int(match[1])]), inside)
    return spelled(inside)


def is_installed(names: Mapping[str, Any]) -> bool:
    """Whether the globals are those of a file of a library."""
    file = str(names.get("__file__") or "")
    return file.startswith(_LIBRARIES)
