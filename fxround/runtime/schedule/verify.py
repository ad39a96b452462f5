"""Verification of a schedule: no memory is used after its release.

``verify_schedule`` follows the memory of every value through the graph that runs, in the order in which it runs. It
raises VerificationError if released memory is read, released again or returned to the caller, if memory is released
that no kernel of ours made or that a value shares with the caller, and if two arguments of a module share memory that
the module may release. It shares with the scheduler only the definition of what may share memory (``aliasing``), so an
error in the order or the number of the releases is found at every compile.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import fx

from fxround.errors import VerificationError
from fxround.runtime import buffers
from fxround.runtime.schedule.aliasing import is_kernel, is_known, may_share, returns_list
from fxround.runtime.schedule.loops import RepeatedPart


@dataclass(frozen=True)
class Memory:
    """The memory of one result.

    node    the name of the node that made it
    kind    kernel: a kernel of ours made it for this graph alone; stock: an operator of PyTorch's may have made it;
            caller: it belongs to the caller
    """

    node: str
    kind: Literal["kernel", "stock", "caller"]


_CALLER: Final = Memory("the caller", "caller")
# Values without memory: sizes and numbers.
_NUMBERS: Final = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)


def verify_schedule(graph: fx.GraphModule, given: Collection[int] = ()) -> None:
    """Raise VerificationError unless every release in the graph, and in its modules, is safe.

    given: positions of inputs that kernels of ours made and that the graph may release.
    """
    ledger = _Ledger(graph)
    inputs = 0
    for node in graph.graph.nodes:
        if isinstance(node.meta.get("val"), _NUMBERS):
            ledger.reach[node] = frozenset()
        elif node.op == "placeholder":
            ledger.reach[node] = frozenset({Memory(node.name, "kernel") if inputs in given else _CALLER})
        elif node.op == "get_attr":
            ledger.reach[node] = frozenset({_CALLER})
        elif node.target is buffers.release:
            for value in node.args:
                ledger.release(node, value)
        elif node.target is not buffers.begin:
            ledger.run(node)
        inputs += node.op == "placeholder"


class _Ledger:
    """The memory that each value may reach, and the node after which it was released."""

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.reach: dict[fx.Node, frozenset[Memory]] = {}
        self.released: dict[Memory, str] = {}
        # Memory that an operator without a rule may keep a reference to.
        self.kept: set[Memory] = set()

    def run(self, node: fx.Node) -> None:
        """Check what the node reads, and note what its result may reach."""
        read: set[Memory] = set()
        for used in node.all_input_nodes:
            read |= self._readable(used, node)
        if node.op == "output":
            return
        fresh = Memory(node.name, "kernel" if is_kernel(node) and not returns_list(node) else "stock")
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            ours = returns_list(source)
            made = Memory(f"{source.name}[{node.args[1]}]", "kernel")
            self.reach[node] = frozenset({made}) if ours else self.reach[source]
            self._readable(node, node)
            return
        if not is_known(node):
            self.kept |= read
        self.reach[node] = frozenset({fresh, *read} if may_share(node) else {fresh})
        if node.op == "call_module":
            self._hand_over(node)

    def release(self, by: fx.Node, value: Any) -> None:
        """Check that ``value`` is alone on memory of ours that was not released, and note its release."""
        # Memory that PyTorch allocated is not in the pool: ``buffers.release`` raises for it.
        memories = [memory for memory in self._readable(value, by) if memory.kind != "stock"]
        if len(memories) != 1 or memories[0].kind != "kernel" or memories[0] in self.kept:
            names = ", ".join(sorted(memory.node for memory in memories)) or "no kernel's result"
            raise VerificationError(
                f"the schedule releases {value.name} after {by.prev.name}, which may share the memory of {names}"
            )
        self.released[memories[0]] = by.prev.name

    def _readable(self, value: fx.Node, user: fx.Node) -> frozenset[Memory]:
        """What the value may reach; VerificationError if any of it was released."""
        for memory in self.reach[value]:
            if memory in self.released:
                raise VerificationError(
                    f"the schedule lets {user.name} use {value.name}, on the memory of {memory.node}, "
                    f"which was released after {self.released[memory]}"
                )
        return self.reach[value]

    def _hand_over(self, call: fx.Node) -> None:
        """Check the inputs that a module releases itself: each is alone on its memory among the inputs."""
        module: Any = self.graph.get_submodule(str(call.target))
        if isinstance(module, RepeatedPart):
            return
        for place in module.spent:
            value: Any = call.args[place]
            for other, argument in enumerate(call.args):
                if other != place and isinstance(argument, fx.Node) and self.reach[value] & self.reach[argument]:
                    raise VerificationError(
                        f"the schedule lets {call.name} release its argument {value.name}, "
                        f"whose memory its argument {argument.name} may share"
                    )
        for place in module.spent:
            self.release(call.next, call.args[place])
        verify_schedule(module.whole, module.spent)
