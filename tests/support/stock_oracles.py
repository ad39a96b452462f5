"""Where a test compares bits with a stock floating-point operation: PyTorch's kernels are no oracle of bits.

Their sums and products have any order and their functions any last bit, which differ between processors. A comparison
of bits is a call of ``equal``, ``same`` or a like name, or ``==`` between two values. One of its operands is a stock
operation if it is ``a @ b``, a function of ``torch``, ``torch.nn.functional``, ``torch.linalg``, ``torch.special`` or a
method of a tensor that sums, multiplies matrices or approximates a function (the families that ``foreign`` replaces,
and what is composed of them); or arithmetic, a selection or a movement of one; or a name to which the same function
assigns one. Operations of fxround, of NumPy and of other modules are none, and so are ``+ - * /`` of elements.

``# stock: reason``, on a line of the comparison or the assignment, or on the line before, allows it: the values are
exact (small integers), or the graph run eagerly is the definition (``identity``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreign import FUNCTIONS, SUMS, named

_COMPARISONS: Final = re.compile(r"_?(assert_|require_)?(same|equal|identical)(_bits)?|assert_array_equal|array_equal")
_COMPOSED: Final = r"""
    matmul | linear | bilinear | einsum | tensordot | inner | mv | chain_matmul | multi_dot | conv[123]d | dist | cdist
    conv_transpose[123]d | softmin | logsumexp | normalize | cross_entropy | nll_loss | kl_div | l1_loss | interpolate
    (layer|batch|group|instance|rms|local_response)_norm | scaled_dot_product_attention | cosine_similarity | upsample
    avg_pool[123]d | adaptive_avg_pool[123]d | lp_pool[123]d | embedding_bag | logsigmoid | square_root | cov | corrcoef
    grid_sample | pairwise_distance | gaussian_nll_loss | poisson_nll_loss | rfft | irfft | fft | ifft
"""
_FUNCTION: Final = re.compile("|".join(f"(?:{named(each).pattern})" for each in (FUNCTIONS, SUMS, _COMPOSED)))
_METHOD: Final = re.compile(f"{named(FUNCTIONS).pattern}|{named(SUMS).pattern}|matmul|mv|logsumexp|softmax|log_softmax")
_MOVEMENTS: Final = re.compile(
    r"detach|numpy|contiguous|view|reshape|to|float|double|half|bfloat16|clone|(un)?flatten|(un)?squeeze|permute|t|type"
    r"|transpose|movedim|expand|tolist|item|requires_grad_|abs|neg|clamp|masked_fill|add|sub|mul|div"
)
_BUILDERS: Final = re.compile(r"stack|cat|tensor|as_tensor|where|list|tuple|float")
_TORCH: Final = re.compile(r"torch(\.(nn\.functional|linalg|special|fft|_C\._nn))?|F|functional|(torch\.ops\.)?aten")
_NUMBER: Final = ast.Constant | ast.UnaryOp
_MARK: Final = re.compile(r"#.*\bstock: \S")


@dataclass(frozen=True)
class File:
    """A file's text and what it needs to know of its names."""

    lines: list[str]
    tree: ast.Module
    imported: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> File:
        """Parse a text."""
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {(alias.asname or alias.name).partition(".")[0] for node in nodes for alias in node.names}
        return cls(text.splitlines(), tree, frozenset(names))

    def allowed(self, node: ast.stmt) -> bool:
        """Whether a statement is marked."""
        last: int = node.end_lineno or node.lineno
        return any(_MARK.search(line) for line in self.lines[max(0, node.lineno - 2) : last])


def found(text: str) -> list[tuple[int, str]]:
    """The lines that compare bits with a stock operation, with that operation."""
    file = File.parse(text)
    scopes = [node for node in ast.walk(file.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    told = {}
    for scope in scopes:
        assigned = _assigned(scope)
        for statement in _statements(scope):
            for operand in _compared(statement):
                stock = _stock(operand, file, assigned, frozenset())
                if stock is not None and not file.allowed(statement):
                    told[operand.lineno] = ast.unparse(stock)
    return sorted(told.items())


def files(root: Path) -> list[str]:
    return [f"{path}:{line}: {what}" for path in sorted(root.rglob("*.py")) for line, what in found(path.read_text())]


def _statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """The simple statements, and the tests of compound ones as such."""
    for node in ast.walk(scope):
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield node


def _compared(statement: ast.stmt) -> Iterator[ast.expr]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and _COMPARISONS.fullmatch(_last(node.func)):
            base = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            yield from [*base, *node.args]
        elif isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                if isinstance(op, ast.Eq) and not isinstance(left, _NUMBER) and not isinstance(right, _NUMBER):
                    yield from (left, right)


def _assigned(scope: ast.AST) -> dict[str, list[tuple[ast.stmt, ast.expr]]]:
    names: dict[str, list[tuple[ast.stmt, ast.expr]]] = {}
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    names.setdefault(name.id, []).append((node, value))
    return names


def _last(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _stock(
    node: ast.expr, file: File, assigned: dict[str, list[tuple[ast.stmt, ast.expr]]], seen: frozenset[str]
) -> ast.expr | None:
    """The stock operation whose value an expression is, moves or computes with."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return node
    if isinstance(node, ast.Call) and _is_stock(node, file):
        return node
    parts: list[ast.expr] = []
    match node:
        case ast.Name(id=name) if name not in seen:
            parts = [value for statement, value in assigned.get(name, []) if not file.allowed(statement)]
            seen |= {name}
        case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
            parts = [left, right]
        case ast.UnaryOp(operand=one) | ast.Subscript(value=one) | ast.Starred(value=one):
            parts = [one]
        case ast.Attribute(value=one, attr="T" | "mT") | ast.ListComp(elt=one) | ast.GeneratorExp(elt=one):
            parts = [one]
        case ast.Tuple(elts=many) | ast.List(elts=many):
            parts = many
        case ast.Call(func=ast.Attribute(value=base, attr=name), args=many) if _MOVEMENTS.fullmatch(name):
            parts = [base, *many]
        case ast.Call(func=function, args=many) if _BUILDERS.fullmatch(_last(function)):
            parts = many
    return next((it for part in parts if (it := _stock(part, file, assigned, seen)) is not None), None)


def _is_stock(call: ast.Call, file: File) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    base, name = call.func.value, call.func.attr.removesuffix("_")
    if _TORCH.fullmatch(ast.unparse(base)):
        return _FUNCTION.fullmatch(name) is not None
    root = base
    while isinstance(root, ast.Attribute):
        root = root.value
    # Modules and tables of operators have functions of these names, masks a count, and columns of a table a sum.
    own = isinstance(root, ast.Name) and (root.id in file.imported or root.id.isupper())
    column = (
        isinstance(base, ast.Subscript) and isinstance(base.slice, ast.Constant) and isinstance(base.slice.value, str)
    )
    return _METHOD.fullmatch(name) is not None and not (own or column or isinstance(base, ast.Compare | ast.Constant))
