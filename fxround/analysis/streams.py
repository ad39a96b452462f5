"""Streams: the values of one run, name by name, as they are computed.

What is true here. ``sample_stream`` yields the watched nodes' values in the order of the graph, then every
floating-point tensor of the result, and at last ``(WHOLE, result)``. A ``Key`` is a kind and a name: a layer may be
called "output" too. ``Runs`` holds a model's three selves: perturbed, unperturbed (the identity policy on the same
graph) and in binary64.

Why it is safe. Every stream is a function of (seed, sample) and the call; nothing of the model is changed, and the
model in binary64 is a copy.

    before   three models, and hooks on each
    after    for name, value in runs.unperturbed(call, watch): ...
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.analysis.inputs import Call
from fxround.analysis.sites import OUTPUT, RESULT, counterparts, results, value_of
from fxround.compiler import RoundedModule, compile
from fxround.graph import float_values
from fxround.policy import IDENTITY, Policy

Key = tuple[str, str]
WHOLE: Final[Key] = ("whole", "")
# A batch has its own samples: sample i of batch j is number j * 2^16 + i of the seed.
BATCH: Final = 1 << 16

Sample = Iterable[tuple[Key, Any]]
Watch = Mapping[str, Key]


def sample_number(batch: int, sample: int) -> int:
    """What ``reseed`` takes for a sample of a batch; the noise of batches repeats after 65,536 of them."""
    return (batch % BATCH) * BATCH + sample


def compiled_for(model: nn.Module, policy: Policy, seed: int, fuse: bool) -> RoundedModule:
    """The model compiled; ``fuse=False`` where every node is to be seen."""
    return compile(model, policy, seed=seed, fuse=fuse)


def sample_stream(compiled: RoundedModule, call: Call, number: int, watch: Watch) -> Iterator[tuple[Key, Any]]:
    """Watched values (node to key), the result's tensors, the whole result, of one sample."""
    compiled.reseed(int(compiled.rng[0]), sample=number)
    return _stream(compiled, call, watch)


def _stream(compiled: RoundedModule, call: Call, watch: Watch) -> Iterator[tuple[Key, Any]]:
    if not watch:
        result = compiled.evaluate(*call.args, **call.kwargs)
    for node, value in compiled.observe(*call.args, **call.kwargs) if watch else ():
        if node == RESULT:
            result = value
        elif node in watch and (tensor := value_of(value)) is not None:
            yield watch[node], tensor
    yield from (((OUTPUT, name), tensor) for name, tensor in results(result))
    yield WHOLE, result


class Runs:
    """A model under a policy, and the two runs that it is compared with."""

    def __init__(self, model: nn.Module, policy: Policy, seed: int, *, fuse: bool, binary64: bool) -> None:
        self.perturbed = compiled_for(model, policy, seed, fuse)
        self._plain: RoundedModule | None = None
        self._double: RoundedModule | None = None
        self._fuse, self._binary64 = fuse, binary64
        self.notes: list[str] = []

    def unperturbed(self, call: Call, watch: Watch) -> Iterator[tuple[Key, Any]]:
        """The same graph under the identity policy."""
        if self._plain is None:
            self._plain = self.perturbed.with_policy(IDENTITY)
        return _stream(self._plain, call, watch)

    def binary64(self, call: Call, watch: Watch) -> Iterator[tuple[Key, Any]]:
        """The model in binary64, its nodes under the names that their counterparts have here; empty where it cannot
        be."""
        if not self._binary64:
            return
        try:
            double = self._doubled()
            wide = Call(*pytree.tree_map_only(Tensor, _widened, (call.args, call.kwargs)))
            double.prepare(*wide.args, **wide.kwargs)
            self._say_what_is_narrow(double)
            twins = counterparts(self.perturbed.graph, double.graph) if watch else {}
            theirs = {twins[node]: name for node, name in watch.items() if node in twins}
            yield from _stream(double, wide, theirs)
        except Exception as error:  # whatever a model's code raises at another dtype: told in the report
            self._binary64 = False
            self.notes.append(f"no binary64 reference: {type(error).__name__}: {_first_line(error)}")

    def _doubled(self) -> RoundedModule:
        if self._double is None:
            wide = copy.deepcopy(self.perturbed.source).double()
            self._double = compiled_for(wide, Policy.parse(IDENTITY), 0, self._fuse)
        return self._double

    def _say_what_is_narrow(self, double: RoundedModule) -> None:
        nodes = [n for n in double.graph.graph.nodes if n.op == "call_function"]
        narrow = [n.name for n in nodes if any(v.dtype != torch.float64 for v in float_values(n))]
        note = f"the binary64 reference computes {len(narrow)} operations in a narrower dtype, which the model asks for"
        if narrow and note not in self.notes:
            self.notes.append(note)


def _widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
