"""fxround, a rounding compiler for PyTorch: it makes every rounding of a model explicit, chosen by a policy.

Example::

    compiled = fxround.compile(model, "stochastic")     # or "bfloat16", "reproducible", a Policy, a TOML file
    compiled(x)                                         # the same bits for the same (seed, sample), on any machine
    compiled.coverage()                                 # what is rounded, and what is not, with the reason

Importing the package registers the operators ``torch.ops.fxround.*``, which exported programs need. ``compile``,
``round`` and ``hash`` are not in ``__all__``, so that a star import does not replace Python's builtins.
"""

from fxround.analysis.culprits import LocalizeReport
from fxround.analysis.localize import localize
from fxround.analysis.perturb import perturb
from fxround.analysis.report import VariabilityReport
from fxround.analysis.variability import variability
from fxround.compiler import RoundedModule
from fxround.compiler import compile as compile
from fxround.eager import round as round
from fxround.errors import (
    CaptureError,
    FxroundError,
    PolicyError,
    UnsupportedOperator,
    UnsupportedRounding,
    VerificationError,
)
from fxround.hashing import hash as hash
from fxround.invariance import InvarianceReport, NotInvariant, check_invariance
from fxround.loading import LoadedModule, load
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.modes import MODES, Rounding
from fxround.policy import PRESETS, Policy, Rule
from fxround.runtime.compiled import instruction_set
from fxround.selftests import SelftestFailed, SelftestReport, selftest
from fxround.summaries import Coverage, Operation, Summary
from fxround.training import RoundedOptimizer, compile_optimizer

formats, modes, policies = FORMATS, MODES, PRESETS

# compile, round and hash are left out: a star import would replace the builtins of these names.
__all__ = [
    "CaptureError",
    "Coverage",
    "Format",
    "FxroundError",
    "InvarianceReport",
    "LoadedModule",
    "LocalizeReport",
    "NotInvariant",
    "Operation",
    "Policy",
    "PolicyError",
    "RoundedModule",
    "RoundedOptimizer",
    "Rounding",
    "Rule",
    "SelftestFailed",
    "SelftestReport",
    "Summary",
    "UnsupportedOperator",
    "UnsupportedRounding",
    "VariabilityReport",
    "VerificationError",
    "check_invariance",
    "compile_optimizer",
    "formats",
    "instruction_set",
    "load",
    "localize",
    "modes",
    "perturb",
    "policies",
    "selftest",
    "variability",
]
