"""Words that arguments choose from, and defaults: the command line shows them without importing PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

# The policy of ``check_invariance``.
REPRODUCIBLE: Final = "reproducible"
# What may change between two runs of ``check_invariance``.
INVARIANCE_AXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "batch": "how many other rows there are",
        "slice": "where a row stands, and what its batch was cut out of",
        "stride": "the memory layout of the arguments",
        "threads": "how many threads work",
        "isa": "which instruction set the kernels use",
        "device": "which device the model is on",
        "process": "which process runs",
        "world_size": "how many processes share the model",
    }
)
# The policy of the operations that ``localize`` does not try.
QUIET: Final = "reproducible"
Level = Literal["modules", "nodes", "elements"]
LEVELS: Final[tuple[Level, ...]] = ("modules", "nodes", "elements")
# Of ``tune``: what gets a format, what mean bits are of, and when an assignment is proved to be the cheapest.
Per = Literal["layer", "operator"]
Cost = Literal["weights", "activations", "both"]
Proof = Literal["monotone", "all"]
# Passes over the data up to which ``tune`` looks for better assignments without being told.
PASSES: Final = 40
