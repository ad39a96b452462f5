"""``fxround.fold_norms``: batch norms that become a part of the convolution or linear layer before them.

In eval mode a batch norm multiplies each channel by a number and adds one, and so do the weights of the layer before.
The captured graph says which layer is before which norm, and what else reads them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from fxround.compiler.signature import require_module
from fxround.errors import shown
from fxround.graph.dtypes import FORMAT_OF
from fxround.graph.site import PORT, Port, site
from fxround.graph.values import memory_of
from fxround.kernels.program import Program
from fxround.module import compile
from fxround.runtime.draw import Draw
from fxround.runtime.run import run_map
from fxround.significance.inputs import calls
from fxround.tuning.absorbing import readers
from fxround.tuning.weights import readers_of

# The types of norms, and those of layers with the dimension of a weight that is the one of output channels.
_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LAYERS: Final[Mapping[type[nn.Module], int]] = MappingProxyType(
    {
        **dict.fromkeys((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d), 0),
        **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), 1),
    }
)
# The attribute of the result that says what was folded.
FOLDED: Final = "folded_norms"


def fold_norms(model: nn.Module, data: Any, norms: Sequence[str] | None = None) -> nn.Module:
    """Return a copy of a model in eval mode whose batch norms are a part of the layers before them.

    With the factor r = gamma / sqrt(variance + eps) of each channel, the weight w and bias b of a layer become w r and
    (b - mean) r + beta, and the norm becomes ``nn.Identity``: in exact arithmetic, the same function. Every step is
    rounded to binary64, the last one to the dtype of the weight instead; roundings of results therefore differ from
    those of the model. Source: Jacob et al., Quantization and training of neural networks for efficient
    integer-arithmetic-only inference, CVPR 2018, section 3.2.

    Args:
        model: any ``torch.nn.Module`` that ``fxround.compile`` takes, in eval mode. It is not changed.
        data: a tensor, arguments, or a DataLoader, as for ``variability``. The first batch alone is used: it says which
            layer is before which norm.
        norms: paths of norms, all of which have to be folded; None folds those that can be.

    Returns:
        A copy of the model with the attribute ``folded_norms``: a dict from the path of each norm to that of its layer.
        A norm that is not in it stays, because no convolution or linear layer is directly before it, because
        the layer or the norm is called twice, shared, or has hooks, because something else reads the layer's result or
        weight, or because the norm normalizes by the batch.

    Raises:
        ValueError: for a model in training mode, for a path in ``norms`` that is no batch norm or cannot be folded,
            with the reason, and for variances of which no factor can be made. Also what ``compile`` raises.

    Example::

        folded = fxround.fold_norms(model.eval(), x)
        print(folded.folded_norms)                          # {"norm1": "conv1", "norm2": "conv2"}
        small = fxround.quantize_weights(folded, "int8:channel", x)
    """
    require_module(model)
    if model.training:
        raise ValueError("the model is in training mode, in which batch norms change: call model.eval() before")
    if hasattr(model, FOLDED):
        raise ValueError(f"the model has an attribute {FOLDED!r}, which is the name of the result; rename or delete it")
    with torch.random.fork_rng(), torch.inference_mode(False), torch.no_grad():
        result, call = copy.deepcopy(model), next(calls(model, data))
        known = dict(result.named_modules(remove_duplicate=False))
        for path in norms or ():
            if not isinstance(known.get(path), _NORMS):
                raise ValueError(
                    f"norms has {shown(path)}, which is no batch norm of the model; expected paths of these"
                )
        graph = compile(result, "identity", unroll_loops=True)._entry(call.args, call.kwargs).lowered
        folded: dict[str, str] = {}
        for path, norm in known.items():
            if type(norm) not in _NORMS or (norms is not None and path not in norms):
                continue
            try:
                folded[path] = _layer_before(graph, known, path)
            except _Kept as kept:
                if norms is not None:
                    raise ValueError(f"the norm {path} cannot be folded: {kept}") from None
        for path, before in folded.items():
            fold_norm(known[before], known[path])
            owner, _, name = path.rpartition(".")
            setattr(result.get_submodule(owner), name, nn.Identity())
    setattr(result, FOLDED, folded)
    return result


def fold_norm(layer: nn.Module, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
    """Make a norm a part of the layer before it, which is changed.

    Raises ValueError for a factor that is not finite.
    """
    weight: Any = layer.weight
    mean, variance = _wide(norm.running_mean), _wide(norm.running_var)
    gamma = torch.ones_like(mean) if norm.weight is None else _wide(norm.weight)
    beta = torch.zeros_like(mean) if norm.bias is None else _wide(norm.bias)
    before = torch.zeros_like(mean) if layer.bias is None else _wide(layer.bias)
    factor = _run(_FACTOR, weight.dtype, gamma, variance, torch.full_like(mean, norm.eps))
    bias = _run(_BIAS, weight.dtype, before, mean, factor, beta)
    dim, groups = _LAYERS[type(layer)], getattr(layer, "groups", 1)
    # A transposed convolution has the output channels of one group in dimension 1.
    split = weight.detach().view(groups if dim else 1, -1, *weight.shape[1:])
    factors = factor.view(groups if dim else 1, *[1] * dim, -1, *[1] * (weight.dim() - 1 - dim))
    product = _run(_PRODUCT, weight.dtype, split.double(), factors).view(weight.shape)
    if not (product.isfinite().all() and bias.isfinite().all()):
        raise ValueError(
            "a weight times gamma / sqrt(variance + eps) is not finite, or a bias is not: there is nothing to fold; "
            "check the norm's statistics"
        )
    for name, value in (("weight", product), ("bias", bias)):
        setattr(layer, name, nn.Parameter(value.to(weight.dtype), weight.requires_grad))


def _wide(tensor: Any) -> Tensor:
    wide: Tensor = tensor.detach().double()
    return wide


# W stands for binary64, and R for the format of the weight.
_FACTOR: Final = "t0 = add(x1, x2) @ W; t1 = sqrt(t0) @ W; t2 = div(x0, t1) @ W"
_BIAS: Final = "t0 = sub(x0, x1) @ W; t1 = mul(t0, x2) @ W; t2 = add(t1, x3) @ R"
_PRODUCT: Final = "t0 = mul(x0, x1) @ R"


def _run(text: str, dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """Return the result of a program in float64, of which numbers of a narrower format are a part."""
    texts = {"W": "binary64/nearest_even/inf", "R": f"{FORMAT_OF[dtype]}/nearest_even/inf"}
    program = Program.parse(re.sub(r"\b[WR]\b", lambda letter: texts[letter[0]], text))
    return run_map(program, operands, torch.float64, Draw())


class _Kept(Exception):
    """Why a norm stays."""


def _layer_before(graph: fx.GraphModule, modules: Mapping[str, nn.Module], path: str) -> str:
    """Return the path of the layer whose result a norm alone reads. Raises _Kept with the reason if there is none."""
    norm = modules[path]
    if norm.training or norm.running_mean is None or norm.running_var is None:
        raise _Kept("it normalizes by the batch; expected running statistics, and eval mode")
    _require_own(modules, path)
    nodes = _nodes_of(graph, path)
    if not nodes:
        raise _Kept("the data never reach it")
    (value, *others) = _read_by(nodes)
    place = site(value)
    means = [n for n in graph.graph.find_nodes(op="placeholder") if n.meta[PORT].name == f"{path}.running_mean"]
    if others or sum(1 for mean in means for _ in readers_of(mean)) != 1:
        raise _Kept("it is called twice, or reads several values")
    before = place.path if place is not None else ""
    layer: Any = modules.get(before)
    if value.op != "call_function" or type(layer) not in _LAYERS:
        raise _Kept("no convolution or linear layer is directly before it")
    if isinstance(layer, nn.Linear) and value.meta["val"].dim() != 2:
        raise _Kept(f"its channels are not those of {before}, whose result has more than two dimensions")
    if layer.weight.dtype not in (norm.running_mean.dtype, value.meta["val"].dtype):
        raise _Kept(f"it has another dtype than {before}")
    _require_own(modules, before)
    own = _nodes_of(graph, before)
    inside = own | nodes
    if any(readers(node) - inside for node in own) or any(readers(node) - own for node in own - {value}):
        raise _Kept(f"something else reads the result of {before}")
    if sum(place.kind == "contraction" for node in own if (place := site(node)) is not None) != 1:
        raise _Kept(f"{before} is called twice")
    for node in graph.graph.find_nodes(op="placeholder"):
        name = node.meta[PORT].name
        if name.rpartition(".")[0] in (before, path) and readers(node) - inside:
            raise _Kept(f"something else reads {name}")
    return before


def _require_own(modules: Mapping[str, nn.Module], path: str) -> None:
    """Raise _Kept for a module with hooks, or one that has a second path or shares a parameter."""
    module = modules[path]
    if module._forward_hooks or module._forward_pre_hooks:
        raise _Kept(f"{path} has hooks, which read what it computes")
    tensors = {memory_of(t) for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))}
    for other, another in modules.items():
        if other == path:
            continue
        if another is module:
            raise _Kept(f"{path} is shared: it is {other} too")
        if tensors & {memory_of(t) for t in (*another.parameters(recurse=False), *another.buffers(recurse=False))}:
            raise _Kept(f"{path} shares its parameters with {other or 'the model'}")


def _nodes_of(graph: fx.GraphModule, path: str) -> set[fx.Node]:
    """Return the operations of a module."""
    return {
        node
        for node in graph.graph.nodes
        if node.op == "call_function" and (place := site(node)) is not None and place.path == path
    }


def _read_by(nodes: set[fx.Node]) -> list[fx.Node]:
    """Return the values that operations read, but for state, numbers, and the results of each other."""
    read = dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in nodes)
    return [v for v in read if isinstance(v.meta.get("val"), Tensor) and not _is_state(v)]


def _is_state(node: fx.Node) -> bool:
    port: Port | None = node.meta.get(PORT)
    return port is not None and port.kind in ("parameter", "buffer")


__all__ = ["FOLDED", "fold_norm", "fold_norms"]
