"""``fxround.compile``, and the modules that it returns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, overload

from torch import nn

from fxround.compiler.signature import arguments, require_flag
from fxround.errors import type_of
from fxround.exported.program import LoadedModule
from fxround.module.rounded_module import PolicyLike, RoundedModule
from fxround.policy import Policy
from fxround.python_model.functions import Function, Method


@overload
def compile(
    model: nn.Module | Callable[..., Any],
    policy: PolicyLike,
    *,
    example_inputs: Any = None,
    strict: bool | None = None,
    seed: int = 0,
    fuse: bool = True,
    advance: bool = False,
    unroll_loops: bool = False,
) -> RoundedModule: ...


@overload
def compile(
    *,
    policy: PolicyLike,
    strict: bool | None = None,
    seed: int = 0,
    fuse: bool = True,
    advance: bool = False,
    unroll_loops: bool = False,
) -> Callable[[nn.Module | Callable[..., Any]], RoundedModule]: ...


def compile(
    model: nn.Module | Callable[..., Any] | None = None,
    policy: PolicyLike = None,
    *,
    example_inputs: Any = None,
    strict: bool | None = None,
    seed: int = 0,
    fuse: bool = True,
    advance: bool = False,
    unroll_loops: bool = False,
) -> Any:
    """Return a module that computes ``model`` with the roundings of ``policy``; without a model, return a decorator.

    Args:
        model: a ``torch.nn.Module``, a function of tensors, or a method of a module; all that it calls is compiled
            too. It must be possible to capture it as one graph. The parameters and buffers are shared, not copied. The
            decorator ``@fxround.compile(policy=...)`` takes a function, or a method such as ``forward`` in the body of
            a module's class; each instance of the class then has a compiled method of its own.
        policy: a preset's name, a format or rounding (text, ``Format``, ``Rounding`` or a floating-point dtype), the
            name of a scaled format, a path to a TOML file, a dict or a ``Policy``.
        example_inputs: arguments for which ``compile`` captures the graph: a tensor, a tuple of positional arguments, a
            dict of keyword arguments, or (tuple, dict). None: the first call captures it.
        strict: whether a floating-point operator that cannot be rounded is an error; None takes the policy's setting.
        seed: 0 to 2^63 - 1, the seed of all random bits.
        fuse: whether chains of pointwise operations run in one pass over memory. The bits do not change. False
            keeps a kernel for each operation of ``compiled.graph``.
        advance: whether every call advances the sample. By default only calls in training mode that record gradients
            do. Use it for a module that is iterated (a time step, a sampler), which otherwise draws the same random
            bits at every call.
        unroll_loops: whether the steps of LSTM, GRU, RNN, ``scan`` and ``map`` are captured one by one, so that each
            operation of each step is an operation of the graph, which ``observe`` sees. Each length is another graph.
            The bits are those of the loop, unless the policy draws: then they are other draws of the same kind.

    Returns:
        A ``RoundedModule``, called like the model. It takes floating-point tensors of float32, float64, float16 or
        bfloat16 on the CPU or a CUDA device, and its results have the model's shapes and dtypes.

    Raises:
        TypeError, ValueError: for wrong arguments.
        PolicyError: for an invalid policy, and at capture for a rule that matches nothing.
        CaptureError: at capture, if the model is not one graph.
        UnsupportedOperator, UnsupportedRounding: at capture, for an operation that cannot be rounded as requested.

    Example::

        compiled = fxround.compile(model, "stochastic", seed=1)
        samples = torch.stack([compiled.reseed(1, sample=i)(x) for i in range(10)])
    """
    if policy is None:
        raise TypeError("no policy is given: fxround.compile(model, 'stochastic'), or @fxround.compile(policy=...)")
    require_flag("strict", strict, optional=True)
    for name, flag in (("fuse", fuse), ("advance", advance), ("unroll_loops", unroll_loops)):
        require_flag(name, flag)
    if model is None:
        if example_inputs is not None:
            raise TypeError("example_inputs is for a model that is given: a decorated function is captured by its call")
        settings = {"strict": strict, "seed": seed, "fuse": fuse, "advance": advance, "unroll_loops": unroll_loops}
        return partial(compile, policy=Policy.parse(policy), **settings)
    if isinstance(model, type):
        raise TypeError(f"model is the class {model.__name__}: pass an instance, or decorate the class's forward")
    if isinstance(model, RoundedModule | LoadedModule):
        raise TypeError(f"the model is {type_of(model)} already; compile the original module")
    if not callable(model):
        raise TypeError(f"model is {type_of(model)}; expected a torch.nn.Module or a function of tensors")
    if not isinstance(model, nn.Module):
        holder = getattr(model, "__self__", None)
        method = isinstance(model, MethodType) and isinstance(holder, nn.Module)
        model = Method(model) if method else Function(model)
        model.adopt()
    compiled = RoundedModule(model, Policy.parse(policy), strict, seed, 0, fuse, advance, unroll_loops)
    if example_inputs is not None:
        args, kwargs = arguments(example_inputs)
        compiled.prepare(*args, **kwargs)
    return compiled


__all__ = ["RoundedModule", "compile"]
