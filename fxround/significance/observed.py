"""Streams: the values of one run, name by name, as they are computed.

``sample_stream`` yields the watched nodes' values in the order of the graph, then every floating-point tensor of the
result, then ``(WHOLE, result)``. A ``Key`` is a kind and a name, because a layer may also be named "output". ``Runs``
holds a model perturbed, unperturbed (the identity policy on the same graph) and in binary64. Every stream is a function
of (seed, sample) and the call; the model is not changed, and the model in binary64 is a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.graph.site import float_values
from fxround.module import compile
from fxround.module.rounded_module import RoundedModule
from fxround.policy import IDENTITY, Policy
from fxround.significance.inputs import ModelCall
from fxround.significance.places import OUTPUT, RESULT, counterparts, results, value_of

Key = tuple[str, str]
WHOLE: Final[Key] = ("whole", "")
# Each batch has its own samples: sample i of batch j is sample j * 2^16 + i of the seed.
BATCH: Final = 1 << 16

Sample = Iterable[tuple[Key, Any]]
Watch = Mapping[str, Key]


def sample_number(batch: int, sample: int) -> int:
    """Return the sample number of a sample of a batch; batches draw the same bits again after 65,536 of them."""
    return (batch % BATCH) * BATCH + sample


def compiled_for(model: nn.Module, policy: Policy, seed: int, fuse: bool, unroll: bool) -> RoundedModule:
    """Return the compiled model; ``fuse=False`` keeps every node visible, ``unroll`` those of loops."""
    return compile(model, policy, seed=seed, fuse=fuse, unroll_loops=unroll)


def sample_stream(compiled: RoundedModule, call: ModelCall, number: int, watch: Watch) -> Iterator[tuple[Key, Any]]:
    """Yield watched values (node to key), the result's tensors and the whole result, of one sample."""
    compiled.reseed(int(compiled.rng[0]), sample=number)
    return _stream(compiled, call, watch)


def _stream(compiled: RoundedModule, call: ModelCall, watch: Watch) -> Iterator[tuple[Key, Any]]:
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
    """A model under a policy, and the two runs with which it is compared."""

    def __init__(
        self, model: nn.Module, policy: Policy, seed: int, *, fuse: bool, unroll: bool, binary64: bool
    ) -> None:
        self.perturbed = compiled_for(model, policy, seed, fuse, unroll)
        self._plain: RoundedModule | None = None
        self._double: RoundedModule | None = None
        self._fuse, self._unroll, self._binary64 = fuse, unroll, binary64
        self.notes: list[str] = []

    def unperturbed(self, call: ModelCall, watch: Watch) -> Iterator[tuple[Key, Any]]:
        """Yield the values of the same graph under the identity policy."""
        if self._plain is None:
            self._plain = self.perturbed.with_policy(IDENTITY)
        return _stream(self._plain, call, watch)

    def binary64(self, call: ModelCall, watch: Watch) -> Iterator[tuple[Key, Any]]:
        """Yield the values of the model in binary64 under the names of this model's nodes; nothing if it fails."""
        if not self._binary64:
            return
        try:
            double = self._doubled()
            wide = ModelCall(*pytree.tree_map_only(Tensor, _widened, (call.args, call.kwargs)))
            double.prepare(*wide.args, **wide.kwargs)
            self._say_what_is_narrow(double)
            twins = counterparts(self.perturbed.graph, double.graph) if watch else {}
            theirs = {twins[node]: name for node, name in watch.items() if node in twins}
            yield from _stream(double, wide, theirs)
        except Exception as error:  # a model may raise anything at another dtype: the report's notes say what
            self._binary64 = False
            self.notes.append(f"no binary64 reference: {type(error).__name__}: {_first_line(error)}")

    def _doubled(self) -> RoundedModule:
        if self._double is None:
            # Not .double(), which leaves complex parameters alone.
            wide = copy.deepcopy(self.perturbed.source)._apply(_widened)
            self._double = compiled_for(wide, Policy.parse(IDENTITY), 0, self._fuse, self._unroll)
        return self._double

    def _say_what_is_narrow(self, double: RoundedModule) -> None:
        nodes = [n for n in double.graph.graph.nodes if n.op == "call_function"]
        narrow = [n.name for n in nodes if any(v.dtype != torch.float64 for v in float_values(n))]
        note = f"the binary64 reference computes {len(narrow)} operations in a narrower dtype, which the model asks for"
        if narrow and note not in self.notes:
            self.notes.append(note)


def _widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.to(torch.complex128) if x.is_complex() else x


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
