"""Golden hashes: those of a model's results and gradients in a file, with which a later commit is compared.

``hashes_of`` runs a model on every batch of its inputs, ``write`` and ``read`` keep the hashes as JSON, and
``Comparison`` says which values differ. Example::

    write(hashes_of(model, x), "golden.json")
    Comparison(read("golden.json"), hashes_of(model, x), "golden.json", "this run").first    # "" if all are equal
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from fxround.atomic_files import write_file
from fxround.choices import REPRODUCIBLE
from fxround.compiler.signature import require_module
from fxround.errors import shown
from fxround.fingerprint import hash
from fxround.invariance.subjects import Compiled
from fxround.module import compile
from fxround.module.rounded_module import PolicyLike
from fxround.short_reprs import Short
from fxround.significance.inputs import calls
from fxround.significance.parts import digest_of
from fxround.views.table import Table

# The first entry of a file, with the version of its layout.
LAYOUT: Final = "fxround.hashes 1"
_ABSENT: Final = "absent"


@dataclass(frozen=True, repr=False)
class Hashes(Short):
    """Hashes of one run of a model: what goes in, and what comes out.

    policy      the policy as text
    weights     the hash of the parameters and buffers
    inputs      the digest of each batch of inputs
    values      by name, in order: of each result, and with gradients of each parameter's and argument's gradient
    """

    policy: str
    weights: str
    inputs: tuple[str, ...]
    values: dict[str, str]

    def _line(self) -> str:
        return f"{len(self.values)} values of {len(self.inputs)} batches, policy {self.policy}"


@dataclass(frozen=True, repr=False)
class Comparison(Short):
    """Two sets of hashes side by side, and their names."""

    one: Hashes
    other: Hashes
    name: str
    other_name: str

    @property
    def differing(self) -> tuple[str, ...]:
        """The values that differ, in the order in which the model returns them; those that only one has are last."""
        names = dict.fromkeys((*self.one.values, *self.other.values))
        differing = [name for name in names if self.one.values.get(name) != self.other.values.get(name)]
        return tuple(sorted(differing, key=lambda name: not (name in self.one.values and name in self.other.values)))

    @property
    def causes(self) -> tuple[str, ...]:
        """What differs before the model runs: policy, weights, inputs."""
        return tuple(name for name in ("policy", "weights", "inputs") if self._pair(name)[0] != self._pair(name)[1])

    @property
    def first(self) -> str:
        """A sentence with the first value that differs; "" if none does."""
        if not self.differing:
            return ""
        name = self.differing[0]
        mine, theirs = (hashes.values.get(name, _ABSENT) for hashes in (self.one, self.other))
        reason = f"; {', '.join(self.causes)} differ, too" if self.causes else ""
        return (
            f"{len(self.differing)} of {len(self.one.values)} values differ, first {name}: {mine} in {self.name}, "
            f"{theirs} in {self.other_name}{reason}"
        )

    def _line(self) -> str:
        return self.first or f"all {len(self.one.values)} values of {self.name} and {self.other_name} are equal"

    def table(self) -> Table:
        """Return a table with one row per value: its name, whether it is equal, and both hashes."""
        names = dict.fromkeys((*self.one.values, *self.other.values))
        pairs = [(name, *(hashes.values.get(name, _ABSENT) for hashes in (self.one, self.other))) for name in names]
        before = [(name, *map(str, self._pair(name))) for name in self.causes]
        rows = tuple((name, "equal" if a == b else "differs", a, b) for name, a, b in (*before, *pairs))
        return Table(("value", "bits", self.name, self.other_name), rows)

    def _pair(self, name: str) -> tuple[Any, Any]:
        return getattr(self.one, name), getattr(self.other, name)


def hashes_of(
    model: nn.Module, inputs: Any, policy: PolicyLike = REPRODUCIBLE, *, gradients: bool = False, seed: int = 0
) -> Hashes:
    """Return the hashes of a model's results on every batch of inputs.

    Args:
        model, inputs: as for ``check_invariance``; the model is not changed.
        policy: as for ``fxround.compile``. seed: of its random bits.
        gradients: whether gradients of parameters and arguments are hashed as well.

    Raises:
        What ``compile`` and the model raise; ValueError for gradients of a model without any.
    """
    require_module(model)
    subject = Compiled(compile(model, policy, seed=seed), gradients)
    values: dict[str, str] = {}
    digests = []
    for number, call in enumerate(calls(model, inputs)):
        head = f"batch {number}: " if number else ""
        values |= {f"{head}{name}": hash(value) for name, value in subject.outcome(call).items()}
        digests.append(digest_of(call))
    return Hashes(f"{subject.policy}, seed {seed}", hash(model), tuple(digests), values)


def write(hashes: Hashes, path: str | Path) -> Path:
    """Write hashes as JSON; returns the path."""
    return write_file(path, json.dumps({"layout": LAYOUT, **asdict(hashes)}, indent=2) + "\n")


def read(path: str | Path) -> Hashes:
    """Read hashes. Raises OSError for a file that cannot be read, ValueError for one that has none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} has no hashes of a model: {error}") from error
    layout = data.get("layout") if isinstance(data, dict) else None
    if layout != LAYOUT:
        raise ValueError(f"{path} has no hashes of a model: its layout is {shown(layout)}, expected {LAYOUT!r}")
    parts = data.get("policy"), data.get("weights"), data.get("inputs"), data.get("values")
    if tuple(map(type, parts)) != (str, str, list, dict):
        raise ValueError(f"{path} has no hashes of a model: it lacks the policy, the weights, the inputs or the values")
    policy, weights, inputs, values = parts
    return Hashes(policy, weights, tuple(inputs), values)
