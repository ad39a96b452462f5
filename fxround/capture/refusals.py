"""Errors for what fxround does not capture, worded so that the reader knows what to change.

A message says what came (a dtype, a version, a line of the model), what was expected and what to do, for example

    Net cannot be captured as one graph.
      at      net.py:12: if x.sum() > 0:
      reason  Data-dependent branching
      change  choose with torch.where, or pass the decision as a Python argument

PyTorch's own explanation is kept as the cause of the exception.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final

import numpy as np
import torch
import torch.utils._pytree as pytree

from fxround.capture.fully_sharded import is_hooked
from fxround.capture.guards import spelled
from fxround.capture.processes import LOCAL, is_shared, mesh_of, require_known_placement
from fxround.capture.transforms import TANGENTS_REFUSED, TRANSFORMED
from fxround.errors import CaptureError
from fxround.graph.dtypes import DEVICES, FORMAT_OF
from fxround.graph.source_lines import TORCH, source_line

EXPECTED: Final = "fxround rounds real floating-point numbers of " + ", ".join(str(d)[6:] for d in FORMAT_OF)


def refused_kind(tensor: torch.Tensor) -> str:
    """Return quantized or unknown for a tensor that fxround cannot treat, and "" for any other."""
    if tensor.is_quantized:
        return "quantized"
    return "unknown" if tensor.is_floating_point() and tensor.dtype not in FORMAT_OF else ""


UNSHARDED: Final = (
    "fxround captures the modules that parallelize_module and fully_shard share, and no wrapped ones: call fully_shard "
    "for the module, then fxround.compile; or use DistributedDataParallel(fxround.compile(module)); or gather what is "
    "sharded (get_model_state_dict of torch.distributed.checkpoint.state_dict with full_state_dict=True), and compile "
    "an unsharded module that has loaded it."
)
_WRAPS: Final = (
    "wraps other tensors, as torchao's quantized weights do; fxround rounds plain tensors. Compile the model before "
    "its weights are converted: a policy has their formats ('int8', Rule(operands='int8:channel')), and "
    "fxround.quantize_weights rounds the weights. Or put the plain numbers back, "
    "nn.Parameter(tensor.dequantize()), if the tensor can be converted."
)
# The modules of PyTorch with what makes modules and tensors distributed. Where none is imported, nothing is.
_DISTRIBUTED: Final = (
    ("torch.distributed.fsdp", "FSDPModule", "sharded by fully_shard (FSDP2)"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "a FullyShardedDataParallel (FSDP)"),
    ("torch.nn.parallel", "DistributedDataParallel", "a DistributedDataParallel"),
)


def distribution_of(value: Any) -> str:
    """Return how a module is distributed over processes, in words; "" for one that is not."""
    for module, name, said in _DISTRIBUTED:
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(value, kind) and (name != "FSDPModule" or is_hooked(value)):
            return said
    return ""


def refuse_unsupported_tensors(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise CaptureError for state or arguments that are quantized, sparse, sharded, or on a device without kernels."""
    for name, module in model.named_modules():
        if distributed := distribution_of(module):
            raise CaptureError(f"{f'the module {name}' if name else 'the model'} is {distributed}. {UNSHARDED}")
    mesh = mesh_of(model)
    leaves = [(f"argument {i}", leaf) for i, leaf in enumerate(pytree.tree_leaves((args, kwargs)))]
    for name, leaf in leaves:
        if is_shared(leaf):
            require_known_placement(name, leaf, mesh)
        if type(getattr(leaf, LOCAL, leaf)).__name__ == "AsyncCollectiveTensor":
            raise CaptureError(f"{name} is the result of a collective that may not have ended: pass a clone()")
    for name, tensor in [*model.named_parameters(), *model.named_buffers(), *leaves]:
        if not isinstance(tensor, torch.Tensor):
            continue
        kind = refused_kind(tensor)
        if kind:
            raise CaptureError(f"{name} is {kind} ({tensor.dtype}); {EXPECTED}. Pass the float model.")
        if tensor.is_nested and tensor.layout == torch.strided:
            raise CaptureError(f"{name} is a nested tensor; expected a dense one: call .to_padded_tensor(0.0) first.")
        if tensor.layout != torch.strided:
            raise CaptureError(f"{name} has layout {tensor.layout}; expected a dense tensor: call .to_dense() first.")
        if hasattr(tensor, "__tensor_flatten__") and not is_shared(tensor):
            raise CaptureError(f"{name} is a {type(tensor).__module__}.{type(tensor).__qualname__}, which {_WRAPS}")
        if tensor.device.type not in DEVICES:
            raise CaptureError(f"{name} is on {tensor.device}; fxround runs on {' and '.join(DEVICES)}: move it there.")


# The kind of an object that a model makes and returns and that is no tensor, tuple, list or dict.
RESULT: Final = "result"
# The kind of a buffer that a model assigns another tensor to.
BUFFER: Final = "buffer"


class LeftToPython(CaptureError):
    """Raised for what a graph cannot hold: a change of Python state, or a tensor that is found through a Python object.

    A call of a compiled module handles it by way of ``torch.compile``; every other use of the module raises this error.
    """

    def __init__(self, model: torch.nn.Module, uses: Sequence[tuple[str, str, str]], reads: bool = False) -> None:
        self.reads = reads
        verb = "relies on" if reads else "changes"
        lines = [
            f"  {'returns' if kind == RESULT else verb} {source} ({kind}){f' at {line}' if line else ''}"
            for source, kind, line in uses[:8]
        ]
        more = [f"  and {len(uses) - 8} more"] if len(uses) > 8 else []
        assigned = next((source for source, kind, _ in uses if kind == BUFFER), None)
        if assigned:
            more.append(
                f"  {assigned} is a buffer that is assigned another tensor. A graph keeps a change in place: "
                f"{assigned}.copy_(...) or {assigned}.add_(...)."
            )
        self.used = "\n".join([f"{type(model).__name__} uses Python objects that a graph cannot hold:", *lines, *more])
        super().__init__(
            "\n".join(
                [
                    self.used,
                    "  A call of the compiled module does this in the way of torch.compile. To observe, evaluate or "
                    "export the model, return what it changes, register it as a buffer, or pass it as a tensor; "
                    "return tensors, tuples, lists or dicts (for transformers: pass use_cache=False).",
                ]
            )
        )


_QUANTIZES: Final = (
    "compile the model before torch.ao.quantization prepares it: a policy has the formats of weights and activations, "
    "as 'int8' or Rule(operands='int8:channel')"
)
# The file of PyTorch that calls the hooks of modules.
_CALLS_HOOKS: Final = str(PurePath(torch.nn.modules.module.__file__))
_OF_A_TOOL: Final = (
    "a tool has set a hook inside of the model, and hooks are captured with it. Count and summarize the model itself "
    "(compiled.source). To read or differentiate the result of a layer, give the tool a module of parts that are "
    "compiled one by one, whose hooks run outside of the graphs; compiled.observe(...) yields every value"
)
_DECIDES: Final = (
    "choose with torch.where, or pass the decision as a Python argument; leave out an assert about numbers"
)
_ADVICE: Final = (
    (
        "omegaconf/grammar_parser.py",
        "put values in place of interpolations first, omegaconf.OmegaConf.resolve(config): the parser cannot be traced",
    ),
    ("_observer_forward_hook", _QUANTIZES),
    ("FakeQuantize", _QUANTIZES),
    (
        "pack_padded_sequence",
        "let the model change no Python object, and take and return tensors, tuples, lists and dicts: then it may pack",
    ),
    (
        "_ctc_loss",
        "let the model change no Python object, and take and return tensors, tuples, lists and dicts: then it may call "
        "ctc_loss",
    ),
    (
        "in gaussian_nll_loss",
        "write 0.5 * (var.log() + (x - target) ** 2 / var).mean(): gaussian_nll_loss reads whether var is negative",
    ),
    (
        "aten.equal.default",
        "compare by (a == b).all(), which is a tensor; for torch.cov and torch.corrcoef, which read numbers to check "
        "them, write x = x - x.mean(1, keepdim=True) and x @ x.mT / (x.shape[1] - 1)",
    ),
    (
        "select_copy does not support automatic differentiation",
        "give a loop complex inputs with gradients as torch.view_as_real(inputs), and let the step call "
        "torch.view_as_complex",
    ),
    (
        "aten.linalg_lstsq",
        "pass driver='gelsy' or 'gels', which take matrices of full rank: others have results whose size is the rank",
    ),
    (
        TRANSFORMED[0],
        "use torch.func.jacrev in place of jacfwd and hessian, or write the derivative: PyTorch's compiler fails at "
        "some forward derivatives inside of torch.func.vmap",
    ),
    ("autograd.functional.", "use torch.func.jacrev, jvp or vjp in place of torch.autograd.functional"),
    ("expected A and B of one dtype", "convert one of them, as in B.to(A.dtype)"),
    ("_dispatch_kl", "write the formula of the two distributions: kl_divergence searches a table of their classes"),
    (
        "specialized integer",
        "use torch.while_loop, or a fixed number of steps and torch.where; or pass the number as a Python argument",
    ),
    (
        "requires_grad_()",
        "pass the tensor as an argument that requires gradients, in place of requires_grad_() in the model",
    ),
    (
        "_autograd_grad",
        "PyTorch traces no forward derivative of a backward one: nest torch.func.grad or torch.func.jacrev instead",
    ),
    (
        ", placeholders={",
        "make the tensor that is changed in place of arguments, parameters and buffers: register what it is made of "
        "as buffers",
    ),
    (
        "derivative for aten::",
        "detach what the operation reads, as in y.detach() // 2: PyTorch knows no derivative of it, and raises this "
        "error where a backward pass meets it",
    ),
    (
        "Module-level backwards hooks",
        "register the hook on the compiled module; inside of the model, let a forward hook set it on a tensor: "
        "module.register_forward_hook(lambda module, args, result: result.register_hook(hook) and None), where hook "
        "takes the gradient of the result and returns another one",
    ),
    (
        "_StridedShard",
        "let processes share features, or the first dimension, not the positions of several sequences: the sums over "
        "them would have another order than in one process",
    ),
    (
        "not in returned outputs DTensor(",
        "let the model keep the dimension of which each process has a part: cross_entropy(logits.transpose(1, 2), "
        "labels) in place of cross_entropy(logits.flatten(0, 1), labels.flatten())",
    ),
    (
        "distribute_tensor(",
        "convert tensors in the model and in input_fn by DTensor.from_local(x, mesh, [Replicate()], run_check=False)"
        ".redistribute(placements=...), which has gradients; or pass DTensors as arguments",
    ),
    ("KNOWN_TYPES", "pass tensors, numbers, strings and None; a complex number as a tensor"),
    ("Python builtin `_warnings", "give the warning where the model is called: a graph has no side effects"),
    ("LoggingLoggerVariable", "make the logger outside of the model's forward, once: LOG = logging.getLogger(...)"),
    ("wrap sparse Tensor", "compute with dense tensors (to_dense): a graph has no sparse ones"),
    ("does not support running with fake tensors", "compute with dense tensors, without to_sparse and the like"),
    ("non-integer tensor", "keep it a tensor, as in x[0, 0] in place of x.tolist()[0][0]"),
    (
        "expression zuf",
        "choose with torch.where if the number is one of a tensor; else compute the number outside of the model, and "
        "pass it as an argument",
    ),
    (
        "how to trace the builtin",
        "call it outside of the model, and pass what it returns as an argument; let PyTorch draw random numbers, as in "
        "torch.rand(()), which are drawn from (seed, sample)",
    ),
    (
        "Pending unbacked symbols",
        "make what depends on numbers of a tensor outside of the model's forward: for torch.combinations(x), take "
        "x[pairs], with pairs = torch.combinations(torch.arange(n)) made once",
    ),
    ("Data-dependent branching", _DECIDES),
    (
        "Size-like symbols: u",
        "make what depends on such a size outside of the compiled module: counts and masks once, as buffers and Python "
        "numbers; or compile the modules between such steps, each alone: model.part = fxround.compile(model.part)",
    ),
    ("data-dependent", _DECIDES),
    ("builtin `print`", "remove the print: a graph has no side effects (fxround inspect shows every node instead)"),
    ("pytree", "return tensors, tuples, lists or dicts (for transformers: use_cache=False or return_dict=False)"),
)


def called_with(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the sizes of the arguments of a call; of an object that holds tensors (a cache), those of the first."""
    named = [*((f"argument {i}", value) for i, value in enumerate(args)), *kwargs.items()]
    tensors = [(name, value, _first_tensor(value)) for name, value in named]
    return ", ".join(
        f"{name} {tuple(t.shape)}" if t is value else f"{name} ({type(value).__name__}, which holds {tuple(t.shape)})"
        for name, value, t in tensors
        if t is not None
    )


def _first_tensor(value: Any, depth: int = 4) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if not depth or isinstance(value, torch.nn.Module):
        return None
    inner = value if isinstance(value, list | tuple) else [*getattr(value, "__dict__", {}).values()]
    return next((t for t in (_first_tensor(part, depth - 1) for part in inner) if t is not None), None)


# What PyTorch says where a step of scan or while_loop changes its state: which part, what, and both values, of which a
# scan gives the state first, a while_loop the result.
_CHANGED_STATE: Final = re.compile(
    r"Expected (init|body_fn_output) and \w+ to have same metadata but found:\s*"
    r"pair\[(\d+)\] differ in '(\w+): (.*?) vs (.*?)'"
)
# What PyTorch says before the reason, where the body of a loop cannot be traced.
_OF_LOOPS: Final = re.compile(r"This higher order operator doesn't work unless [^\n]*\n\s*")
# What PyTorch says where an operation refuses the sizes of its operands in a trace.
_OPERANDS: Final = re.compile(r"unsupported operand type\(s\) for (.+?): '(\w+)' and '(\w+)'")
_SCALARS_OF_NUMPY: Final = frozenset(each.__name__ for each in np.sctypeDict.values())
# What PyTorch names where autograd.grad in a model would leave the graph: tensors that another computation made.
_COMPUTED: Final = re.compile(r"inputs with external grad_fn: \[(.*)\]")
# What PyTorch says where an operation of DTensors fails, and what it says of it.
_OF_DTENSORS: Final = re.compile(r"with fake tensors: .*DTensor\(.*got \w+\((['\"])(.*)\1\)", re.DOTALL)
_MIXED: Final = re.compile(r"(aten\.\w+)[.\w]*: got mixed torch.Tensor and DTensor")
_REFUSED_SIZES: Final = re.compile(r"when making fake tensor call.*got \w+\((['\"])(.*)\1\)", re.DOTALL)


def _package(filename: str) -> Path:
    """Return the folder of the outermost package that a file belongs to, or the file itself."""
    folder = Path(filename)
    while (folder.parent / "__init__.py").is_file():
        folder = folder.parent
    return folder


def without_derivative(graph: torch.fx.GraphModule) -> str:
    """Return the stack of the first operation of Dynamo's graph whose derivative PyTorch does not know; "" for none."""
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        made = value.grad_fn if isinstance(value, torch.Tensor) else None
        if made is not None and made.name().endswith("NotImplemented"):
            return str(node.meta.get("stack_trace") or "")
    return ""


def _is_hook_of_a_tool(frames: Sequence[Any]) -> bool:
    """Whether the innermost frame is in a hook that PyTorch or an installed package has set."""
    calls = [i for i, frame in enumerate(frames) if frame.filename == _CALLS_HOOKS and "hook(" in (frame.line or "")]
    if not calls:
        return False
    called = [frame.filename for frame in frames[calls[-1] + 1 :]]
    return not called or called[0].startswith(TORCH) or "site-packages" in PurePath(called[0]).parts


def explained(model: torch.nn.Module, error: Exception, called: str = "", stack: str = "") -> CaptureError:
    """Return PyTorch's error as a CaptureError: its first line, the line of the model and what to change.

    For a line of a library, the line that calls the library is named too.

    called: the sizes of the arguments, if they are known. stack: that of the operation, if the error does not name it.
    """
    text = _OF_LOOPS.sub("", str(error))
    if "wrap a dual tensor input" in text:  # since torch 2.14; earlier versions trace it, and its call is refused
        return CaptureError(TANGENTS_REFUSED)
    frames = list(getattr(error, "real_stack", None) or ())
    outside = [frame for frame in frames if not frame.filename.startswith(TORCH)]
    line = next((line for line in (source_line(text), source_line(stack)) if any(line)), None)
    where = "a line that PyTorch does not name" if line is None else ": ".join(line)
    if frames:
        frame = (outside or frames)[-1]
        callers = [other for other in outside if not PurePath(other.filename).is_relative_to(_package(frame.filename))]
        where = "\n  from    ".join(f"{f.filename}:{f.lineno}: {f.line}" for f in (frame, *callers[-1:]))
    hint = re.search(r"Hint: ([^\n]+)", text)
    of_hint = hint[1] if hint else "make it expressible as one graph"
    general = _OF_A_TOOL if _is_hook_of_a_tool(frames) else of_hint
    advice = next((a for key, a in _ADVICE if key in text), general)
    explanation = re.search(r"Explanation: ([^\n]+)", text)
    first = text.strip().partition("\n")[0] or f"{type(error.__cause__ or error).__name__} without a message"
    said = first + (f" ({explanation[1].strip()})" if explanation else "")
    if TRANSFORMED[0] in said:
        said = "PyTorch cannot trace this operation inside of transforms of torch.func"
    changed = _CHANGED_STATE.search(text)
    if changed:
        loop, part, what, *values = changed.groups()
        before, after = values if loop == "init" else reversed(values)
        said = f"part {part} of the state of a loop has the {what} {before} before a step and {after} after it"
        advice = "return the shape and dtype that the step was given"
    operands = _OPERANDS.search(text)
    if operands and not _SCALARS_OF_NUMPY.isdisjoint(operands.groups()[1:]):
        said = f"NumPy computes {operands[2]} {operands[1]} {operands[3]} of scalars in the forward"
        advice = "compute the number once, in __init__, or of Python's numbers: float(...) or int(...) of the scalars"
    computed = _COMPUTED.search(text)
    if computed:
        names = ", ".join(map(spelled, re.findall(r"\"(.*?)\"", computed[1])))
        said = f"autograd.grad in the model would differentiate beyond it: {names} was computed and requires gradients"
        advice = "detach it before: tensor.detach(), with requires_grad_() for what the model differentiates"
    refused = _REFUSED_SIZES.search(text)
    if refused and called:
        said = f"{refused[2]}\n  called  with {called}"
        advice = "pass arguments whose sizes fit together; a cache holds the batch that filled it: make a new one"
    inside = _OF_DTENSORS.search(text)
    if inside:
        said = inside[2].partition("\\n")[0]
        advice = (
            "PyTorch's DTensor does not compute this: use plain tensors here (to_local), or leave it out of the plan"
        )
    mixed = _MIXED.search(text)
    if mixed:
        said = f"{mixed[1]} reads a tensor of this process and one that several processes share (DTensor)"
        advice = (
            "let the plan convert what the layer reads (PrepareModuleInput), or convert it, as in "
            "DTensor.from_local(tensor, mesh, [Replicate()])"
        )
    return CaptureError(
        f"{type(model).__name__} cannot be captured as one graph.\n"
        f"  at      {where}\n  reason  {said}\n  change  {advice}"
    )
