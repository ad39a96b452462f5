"""Exported programs: what ``RoundedModule.export`` traces, and what ``load`` returns.

A file that ``RoundedModule.export`` wrote holds the graph with every rounding, (seed, sample) as a named buffer, the
version of fxround, and a digest of everything else (``exported.files``). A file that is truncated, changed or of
another version is refused.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fxround.capture.caches import CACHES
from fxround.capture.dynamo import aside
from fxround.capture.packed import as_tuples
from fxround.capture.result_sizes import has_sizes, with_sizes
from fxround.compiler.executable import Entry
from fxround.compiler.samples_of_calls import CHANGING
from fxround.compiler.signature import flattened, packed_kinds, signature_of, with_keywords
from fxround.errors import FxroundError, shown, type_of
from fxround.exported.caches import CacheArgument, Cached, given, returned
from fxround.exported.files import nested, program_of, read
from fxround.exported.gradients import Gradients, LoadedGradients
from fxround.exported.types import module_of, register
from fxround.float_state import require_ieee_arithmetic
from fxround.graph.dtypes import DEVICES
from fxround.graph.generated_code import forgotten_sources
from fxround.python_model.call_context import check_context, refuse_tangents
from fxround.runtime.random_state import state_of, write

RNG_BUFFER: Final = "fxround_rng"
_DENSE: Final = torch.strided
_NOT_ONE: Final = re.compile(r"Guard failed: (\w+)\.size\(\)\[(\d+)\] != 1")


class Exportable(nn.Module):
    """The lowered graph of a model with the model's own state, and (seed, sample) as one more buffer.

    keywords: those of the example, which become parameters of ``forward`` in place of the model's ``**kwargs``.
    """

    def __init__(self, source: nn.Module, rng: Tensor, entry: Entry, keywords: Collection[str] = ()) -> None:
        super().__init__()
        self.__dict__.update(_parameters=source._parameters, _modules=source._modules)
        self._buffers = {**source._buffers, RNG_BUFFER: rng.clone()}
        self._non_persistent_buffers_set = set(source._non_persistent_buffers_set)
        root = source.get_submodule("")
        owners = tuple((self if o[0] is root else o[0], o[1]) if o else None for o in entry.owners)
        entry = replace(entry, running=entry.fused, owners=owners)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return entry.run(pytree.tree_leaves((args, kwargs)), self.get_buffer(RNG_BUFFER))

        model = source.source if isinstance(source, Cached) else source
        forward.__signature__ = with_keywords(signature_of(model.forward), keywords)  # type: ignore[attr-defined]
        self.__dict__["forward"] = forward


@forgotten_sources()
def load(path: str | Path, *, any_version: bool = False, imports: Collection[str] = ()) -> LoadedModule:
    """Load a program that ``RoundedModule.export`` wrote; it gives the same bits without the model's source.

    The digest of a file covers all that is read of it, and detects accidents. It does not stop an attacker, who can
    compute it: PyTorch unpickles and evaluates what the file says. Never load a file from an untrusted source.

    Args:
        path: the file.
        any_version: whether to load a file of another version of fxround, which may give other bits.
        imports: the names of modules that may be imported if the file needs them. Those that have been imported, and
            transformers' own, need no permission.

    Returns:
        A ``LoadedModule``.

    Raises:
        OSError: if the file cannot be read.
        ImportError: if a module whose types the arguments or results have cannot be imported, or may not be.
        ValueError: for a file that is truncated, changed or not a program of fxround.
        FxroundError: for a file of another version, unless ``any_version``.

    Example::

        compiled.export("model.pt2", x)
        y = fxround.load("model.pt2").reseed(0, sample=9)(x)
    """
    with open(path, "rb") as file:
        record, gradients = read(file, path, any_version)
        for name in dict.fromkeys((*record.imports, *map(module_of, record.named))):
            _require_imported(name, path, imports)
        for name in record.named:
            register(name)
        if record.caches:
            importlib.import_module(CACHES)
        program, structures = program_of(file, path)
    try:
        second = None
        if gradients is not None and record.gradients is not None:
            second = program_of(nested(gradients), path)[0], record.gradients
        return LoadedModule(program, structures, record.training, record.sequences, second, record.caches)
    except ValueError as error:
        raise ValueError(f"{shown(str(path))} holds no program of fxround: {error}; export the module again") from error


def _require_imported(name: str, path: str | Path, allowed: Collection[str]) -> None:
    """Import a module that a file names, if it is one of transformers, or the caller allows it."""
    said = (
        f"{shown(str(path))} holds a program whose arguments or results have types of the module {shown(name)}, which"
    )
    if sys.modules.get(name) is None and name.partition(".")[0] != "transformers" and name not in allowed:
        raise ImportError(f"{said} is not imported: import it first, or pass imports=[{shown(name)}] if you trust it")
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{said} cannot be imported: {error}") from error


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items)) or "no"


def _inputs(program: nn.Module) -> Iterable[fx.Node]:
    graph: Any = program.graph
    placeholders: Iterable[fx.Node] = graph.find_nodes(op="placeholder")
    return placeholders


def _taken(node: fx.Node) -> tuple[torch.dtype, int] | None:
    """Return the dtype and rank of the tensor that an input of a program takes; None if it takes another value."""
    value = node.meta.get("val")
    return (value.dtype, value.dim()) if isinstance(value, Tensor) else None


def _free(node: fx.Node) -> tuple[int, ...]:
    """Return the dimensions of an input of a program that may have other sizes, none of which is 0."""
    shape = getattr(node.meta.get("val"), "shape", ())
    return tuple(d for d, size in enumerate(shape) if not isinstance(size, int))


def _of_caches(caches: Sequence[CacheArgument], spec: pytree.TreeSpec, names: list[str]) -> Iterator[str]:
    """Yield those of the names of inputs that are tensors of caches."""
    args, kwargs = pytree.tree_unflatten(names, spec)
    for cache in caches:
        yield from pytree.tree_leaves(args[cache.place] if isinstance(cache.place, int) else kwargs[cache.place])


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type_of(value)
    traits = "nested" if value.is_nested else str(value.layout)
    if not value.is_nested and value.layout == _DENSE:
        traits = f"rank {value.dim()}, on {value.device}"
    return f"a {value.dtype} tensor ({traits})"


class LoadedModule(nn.Module):
    """An exported program, loaded by ``fxround.load``: callable and reseedable, without the model's source.

    It takes the arguments of the exported module, of any batch size but 0: caches of keys and values, which it changes,
    and packed sequences of as many sequences as the example (ValueError for others). A program that was exported with
    ``gradients=True`` can be trained; any other one computes without gradients. Parameters and buffers are those of
    ``program``, under the model's own names. After ``.to("cuda")`` kernels read seed and sample on the device, so that
    a CUDA graph replays with those of the latest ``reseed``. Raises ValueError for a program without (seed, sample).
    Example::

        y = fxround.load("model.pt2").reseed(0, sample=9)(x)
    """

    def __init__(
        self,
        program: nn.Module,
        structures: Any,
        training: bool,
        sequences: Sequence[int] = (),
        gradients: tuple[nn.Module, Gradients] | None = None,
        caches: Sequence[CacheArgument] = (),
    ) -> None:
        super().__init__()
        if RNG_BUFFER not in dict(program.named_buffers()):
            raise ValueError(f"the file holds no program of fxround: it has no buffer {RNG_BUFFER!r}")
        state_of(program.get_buffer(RNG_BUFFER), RNG_BUFFER)
        self.program, self.training = program, training
        self._sequences, self._caches = tuple(sequences), tuple(caches)
        if gradients:
            gradients[1].require_fit(program, structures.in_spec.num_leaves)
        self._gradients = LoadedGradients(*gradients, program, RNG_BUFFER) if gradients else None
        # The leaves of the arguments in the order of the program: the names, and dtype and rank of tensors.
        spec: pytree.TreeSpec = structures.in_spec
        self._returned: pytree.TreeSpec | None = structures.out_spec if has_sizes(structures.out_spec) else None
        self._spec, self._entering = spec, {str(node.target): _taken(node) for node in _inputs(program)}
        self._free = {str(node.target): _free(node) for node in _inputs(program)}
        # A cache without a token is one before the prompt.
        self._free |= dict.fromkeys(_of_caches(self._caches, spec, list(self._free)), ())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the exported module computes, bit for bit, for the same (seed, sample).

        A call of a program exported in training mode that records gradients advances the sample.
        """
        require_ieee_arithmetic()
        check_context(recorded=False)
        sequences = tuple(kind.sequences for kind in packed_kinds((args, kwargs)))
        if sequences != self._sequences:
            raise ValueError(
                f"the packed arguments have {_listed(sequences)} sequences, and the program was exported for "
                f"{_listed(self._sequences)}: export one for each number, or one that packs a padded tensor"
            )
        if self._caches:
            args, kwargs, caches = given(self._caches, args, kwargs)
            return returned(self._computed(args, kwargs), caches)
        return self._computed(*as_tuples((args, kwargs)))

    def _computed(self, args: Any, kwargs: Any) -> Any:
        leaves, given = flattened(args, kwargs)
        if given != self._spec:
            try:
                leaves = self._spec.flatten_up_to((args, kwargs))
            except ValueError:
                raise self._refusal(args, kwargs) from None
            args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        self._require(leaves)
        refuse_tangents(chain(leaves, self.parameters(), self.buffers()))
        if self._gradients is None or not self._gradients.wanted(leaves):
            return self._results(args, kwargs)
        spec: list[Any] = []

        def compute() -> list[Any]:
            results, spec_of_results = pytree.tree_flatten(self._results(args, kwargs))
            spec.append(spec_of_results)
            return results

        rng = self.program.get_buffer(RNG_BUFFER)
        outputs = self._gradients.differentiable(compute, leaves, rng)
        return with_sizes(pytree.tree_unflatten(outputs, spec[0]), spec[0])

    def train(self, mode: bool = True) -> LoadedModule:
        """Return the module itself. Raises FxroundError if the model was exported in the other mode."""
        if mode != self.training:
            exported, asked = (f"model.{'train' if m else 'eval'}()" for m in (self.training, mode))
            raise FxroundError(
                f"this program was exported after {exported}, and a program has one mode: call {asked} on the model, "
                "export it to another file, and load both"
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoadedModule:
        for tensor in (*self.parameters(), *self.buffers()):
            if fn(tensor.new_empty(0)).dtype != tensor.dtype:
                raise FxroundError(
                    f"a loaded program has the dtypes with which it was exported, here {tensor.dtype}: convert the "
                    "model, and export it again"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _require(self, leaves: Sequence[Any]) -> None:
        """Raise TypeError for an argument of another kind, dtype or rank than in the export's example."""
        for (name, wanted), leaf in zip(self._entering.items(), leaves, strict=True):
            if not isinstance(leaf, Tensor):
                fits = wanted is None and pytree.tree_structure(leaf).is_leaf()
            else:
                fits = not leaf.is_nested and leaf.layout == _DENSE and leaf.device.type in DEVICES
                fits = fits and wanted == (leaf.dtype, leaf.dim())
            if not fits:
                kind = "a value that is no tensor"
                if wanted is not None:
                    kind = f"a dense {wanted[0]} tensor of rank {wanted[1]} on {' or '.join(DEVICES)}"
                raise TypeError(
                    f"argument {name!r} is {_described(leaf)}, and the program was exported for {kind}: convert the "
                    "argument, or export another program with an example of this kind"
                )
            if isinstance(leaf, Tensor) and not leaf.numel() and any(leaf.shape[d] == 0 for d in self._free[name]):
                raise ValueError(
                    f"argument {name!r} has the shape {tuple(leaf.shape)}, and the program was exported for sizes that "
                    "are not 0, which a model may treat differently: export another one with an example of this shape"
                )

    def _refusal(self, args: Any, kwargs: Mapping[str, Any]) -> TypeError:
        return TypeError(
            f"the program takes the values {_listed(self._entering)}, given as in the example of the export; got "
            f"{len(args)} positional arguments, and these keywords: {_listed(kwargs)}"
        )

    def _results(self, args: Any, kwargs: Any) -> Any:
        with aside(), torch.no_grad():
            try:
                result = self.program(*args, **kwargs)
                return result if self._returned is None else with_sizes(result, self._returned)
            except AssertionError as error:
                if not str(error).startswith("Guard failed"):
                    raise
                one = _NOT_ONE.fullmatch(str(error).strip())
                if one:
                    raise ValueError(
                        f"dimension {one[2]} of argument {one[1]!r} has the size 1, and the program was exported for "
                        "other sizes: something in the model asks for the size 1, as torch.einsum does, and may do "
                        "something else then. Export a second program with an example of the size 1, for these calls"
                    ) from error
                raise ValueError(
                    f"the program was not exported for these sizes or numbers ({str(error).lower()}): export another "
                    "one with an example of them"
                ) from error

    def __copy__(self) -> LoadedModule:
        return self._with(self.__dict__.copy())

    def __deepcopy__(self, memo: dict[int, Any]) -> LoadedModule:
        made = memo[id(self)] = self._with({})
        for spec in (self._spec, self._returned):  # never change, and PyTorch warns where one is copied
            memo[id(spec)] = spec
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _with(self, attributes: dict[str, Any]) -> LoadedModule:
        made = type(self).__new__(type(self))
        made.__dict__.update(attributes)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise TypeError: PyTorch pickles no program. ``copy.deepcopy`` copies a loaded one."""
        raise TypeError(
            "a loaded program cannot be pickled: send the path of its file, and call "
            "fxround.load(path) there; copy.deepcopy copies it, and its state_dict() can be saved"
        )

    def reseed(self, seed: int, sample: int = 0) -> LoadedModule:
        """Set the seed (0 to 2^63 - 1) and sample (0 to 2^32 - 1); returns the module itself."""
        with CHANGING:
            write(self.program.get_buffer(RNG_BUFFER), seed, sample)
        return self
