"""What is attributed: a call of a model, the gradients of a loss of it, or the parameters after a training step.

A subject runs in three ways: with its derivatives (``linearized``), as a sample, and exactly, in binary64. Each gives
the leaves of one structure, ``spec``: the model's result, or a dict from the names of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fxround.attribution.evaluated import evaluated
from fxround.attribution.linearized import Linearized
from fxround.attribution.states import State
from fxround.attribution.tangents import Tangents
from fxround.capture.processes import mesh_of
from fxround.compiler.executable import Entry
from fxround.errors import UnsupportedOperator
from fxround.graph.site import located
from fxround.module import compile
from fxround.module.rounded_module import RoundedModule
from fxround.numerics.modes import Rounding
from fxround.passes.analyses.draws import any_draws
from fxround.policy import Policy
from fxround.significance.inputs import calls
from fxround.training.optimizer import RoundedOptimizer


@dataclass(frozen=True)
class Subject:
    """A call of a compiled model; ``tangents`` if its gradients are wanted, ``optimizer`` if a step is."""

    model: nn.Module
    compiled: RoundedModule
    entry: Entry
    leaves: list[Any]
    tangents: Tangents | None
    optimizer: RoundedOptimizer | None
    seed: int
    sample: int

    @staticmethod
    def of(
        model: nn.Module,
        inputs: Any,
        policy: Policy,
        loss: Callable[[Any], Tensor] | None,
        optimizer: RoundedOptimizer | None,
        seed: int,
        sample: int,
    ) -> Subject:
        """Capture the model.

        Raises ValueError for gradients that do not exist, or an optimizer of other parameters, UnsupportedOperator for
        a model that processes share.
        """
        if mesh_of(model) is not None:
            raise UnsupportedOperator(
                "processes share the model (parallelize_module), and roundings are attributed in one process alone: "
                "pass the model as it is before parallelize_module"
            )
        call = next(calls(model, inputs))
        compiled = compile(model, policy, unroll_loops=True).reseed(seed, sample)
        with torch.set_grad_enabled(loss is not None):
            entry = compiled._entry(call.args, call.kwargs)
        if loss is not None and entry.step is None:
            raise ValueError("loss: no result of the model depends on a parameter that requires a gradient")
        tangents = None if loss is None else Tangents(loss, entry.captured.out_spec)
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        subject = Subject(model, compiled, entry, leaves, tangents, optimizer, seed, sample)
        if optimizer is not None and not subject._names:
            raise ValueError("optimizer has none of the model's parameters; pass the optimizer of this model")
        return subject

    @property
    def draws(self) -> bool:
        """Whether a rounding draws random bits."""
        steps = [] if self.optimizer is None else [graph.lowered for graph in self.optimizer.graphs(self._names)]
        return any(map(any_draws, (self.entry.lowered, *steps)))

    @property
    def spec(self) -> pytree.TreeSpec:
        """The structure of the result."""
        if self.tangents is None:
            return self.entry.captured.out_spec
        return pytree.tree_structure(dict.fromkeys(self._returned(self.entry.captured.outputs), 0))

    def linearized(
        self, noise: torch.Generator | None, watched: Collection[str], formats: tuple[Rounding, ...]
    ) -> tuple[Linearized, list[State]]:
        """Run the subject with its derivatives; returns the run and the states of the leaves of the result."""
        later = None if self.tangents is None else self.tangents.states
        run = Linearized(self.entry.lowered, self._inputs(self.sample), noise, watched, formats, later)
        returned = self._returned(run.outputs)
        if self.optimizer is None:
            return run, list(returned.values())
        for graph in self.optimizer.graphs(self._names):
            name = self._names[id(graph.parameter)]
            gradient = returned[name].reshaped(graph.shape)
            entering = [graph.parameter.detach().reshape(graph.shape), gradient, *graph.entering]
            step = Linearized(graph.lowered, entering, noise, (), formats, after=run, within=f"{name}.")
            returned[name] = step.outputs[0].reshaped(graph.parameter.shape)
        return run, list(returned.values())

    def evaluated(
        self, exact: bool = False, later: int = 0, watched: Collection[str] = (), rounded: Collection[str] = ()
    ) -> tuple[list[Any], Any]:
        """Return the leaves of the result and the values of nodes: exactly, or of a later sample.

        rounded: the nodes of an exact run that are rounded nevertheless.
        """
        tangents = None if self.tangents is None else self.tangents.values
        values, seen = evaluated(
            self.entry.lowered, self._inputs(self.sample + later), exact, tangents, watched, rounded
        )
        returned = self._returned(values)
        if self.optimizer is None:
            return list(returned.values()), seen
        for graph in self.optimizer.graphs(self._names, later):
            name = self._names[id(graph.parameter)]
            gradient = returned[name].reshape(graph.shape)
            entering = [graph.parameter.detach().reshape(graph.shape), gradient, *graph.entering]
            new, _ = evaluated(graph.lowered, entering, exact)
            returned[name] = new[0].reshape(graph.parameter.shape)
        return list(returned.values()), seen

    @property
    def _names(self) -> Mapping[int, str]:
        """The names of the parameters that have a gradient and that the optimizer updates, by id."""
        if self.optimizer is None:
            return {}
        owned = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        known = self._returned(self.entry.captured.outputs)
        return {id(p): name for name, p in self.model.named_parameters() if id(p) in owned and name in known}

    def _inputs(self, sample: int) -> list[Any]:
        """Return what enters the graph, on the CPU, whose bits are those of any device.

        Raises UnsupportedOperator for a graph that makes tensors on another device.
        """
        for node in self.entry.lowered.graph.nodes:
            device = node.kwargs.get("device")
            if device is not None and torch.device(device).type != "cpu":
                raise UnsupportedOperator(
                    f"{located(node)} makes a tensor on {device}, and attribution computes on the CPU: move the model "
                    "and its inputs with .cpu()"
                )
        rng = self.compiled.reseed(self.seed, sample).rng
        values = [*self.entry._inputs(self.leaves), *self.entry.multipliers(), rng]
        return [value.cpu() if isinstance(value, Tensor) else value for value in values]

    def _returned(self, outputs: Sequence[Any]) -> dict[Any, Any]:
        """Return the leaves of the result of a graph's outputs: gradients of parameters by name, if there are any."""
        pairs = list(zip(self.entry.captured.outputs, outputs, strict=False))
        if self.tangents is not None:
            return {port.name: value for port, value in pairs if port.kind == "gradient" and port.name}
        results = [value for port, value in pairs if port.kind == "result" and not port.mutation]
        return dict(enumerate(results))
