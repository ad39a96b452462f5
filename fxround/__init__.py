"""fxround, a rounding compiler for PyTorch: it makes every rounding of a model explicit, and a policy chooses it.

Example::

    compiled = fxround.compile(model, "stochastic")     # or "bfloat16", "reproducible", a Policy, a TOML file
    compiled(x)                                         # the same (seed, sample) gives the same bits
    compiled.coverage()                                 # what is rounded, and what is not, with the reason

``formats``, ``modes`` and ``policies`` are read-only mappings from names to formats, rounding modes and the policies
that have a name. ``print(fxround.describe(name))`` says what a format is.

A name is imported when it is first used, so that ``import fxround`` takes little longer than ``import torch``. It
registers the operators ``torch.ops.fxround.*``, which exported programs need: they are made when one is asked for.
``compile``, ``round`` and ``hash`` are not in ``__all__``, so that a star import does not replace Python's builtins.
"""

from __future__ import annotations

from fxround.interrupts import is_command  # before the imports that take seconds

# isort: split
import ast
import logging
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxround.version import VERSION

if TYPE_CHECKING:  # the public names: type checkers read these lines, and so does ``_homes``
    from fxround.attribution.attribute import attribute
    from fxround.attribution.report import AttributionReport
    from fxround.eager.round import round as round
    from fxround.errors import (
        CaptureError,
        FxroundError,
        PolicyError,
        UnsupportedOperator,
        UnsupportedRounding,
        VerificationError,
    )
    from fxround.exported.program import LoadedModule, load
    from fxround.faults.flip_table import Flip, Flips
    from fxround.fingerprint import hash as hash
    from fxround.invariance.check import check_invariance
    from fxround.invariance.report import InvarianceReport, NotInvariant
    from fxround.localization.localize import localize
    from fxround.localization.report import LocalizeReport
    from fxround.module import compile as compile
    from fxround.module.iteration import iterate
    from fxround.module.rounded_module import RoundedModule
    from fxround.numerics.formats import FORMATS as formats
    from fxround.numerics.formats import Format, table
    from fxround.numerics.formats.scaled import ScaledFormat, ScaledRounding
    from fxround.numerics.modes import MODES as modes
    from fxround.numerics.modes import Rounding
    from fxround.policy import PRESETS as policies
    from fxround.policy import Policy, Rule
    from fxround.policy.calibrated import CalibratedPolicy
    from fxround.runtime.cpu.code import instruction_set
    from fxround.selftests import SelftestFailed, SelftestReport, selftest
    from fxround.significance.calibration import calibrate
    from fxround.significance.inputs import batches
    from fxround.significance.metrics import metric
    from fxround.significance.parts import merge
    from fxround.significance.perplexity import perplexity
    from fxround.significance.perplexity_report import PerplexityReport
    from fxround.significance.perturb import perturb
    from fxround.significance.report import VariabilityReport, load_report
    from fxround.significance.variability import variability
    from fxround.significance.wasserstein import wasserstein
    from fxround.training import RoundedOptimizer, compile_optimizer
    from fxround.tuning.compare import compare
    from fxround.tuning.comparison import ComparisonReport, PolicyResult
    from fxround.tuning.fold_norms import fold_norms
    from fxround.tuning.quantize_weights import quantize_weights
    from fxround.tuning.report import QuantizationReport, WeightRounding
    from fxround.tuning.rescale_channels import rescale_channels
    from fxround.tuning.rescaling_report import Rescaling, RescalingReport
    from fxround.tuning.sweep import sweep
    from fxround.tuning.sweep_policies import Sweep
    from fxround.tuning.sweep_report import SweepReport, TrainingRun
    from fxround.tuning.switch import Switch, store_integers
    from fxround.tuning.train_widths import train_widths
    from fxround.tuning.tune import tune
    from fxround.tuning.tuning_report import EvaluatedAssignment, PartChoice, TuningReport
    from fxround.views.descriptions import FormatDescription, ScaledDescription, describe
    from fxround.views.leaks import Leak, Leaks
    from fxround.views.summaries import Coverage, Operation, Summary

# A program that sets up logging shows what long work says; no other program hears of it.
logging.getLogger("fxround").addHandler(logging.NullHandler())
__version__ = VERSION

# compile, round and hash are left out: a star import would replace the builtins of these names.
__all__ = [
    "AttributionReport",
    "CalibratedPolicy",
    "CaptureError",
    "ComparisonReport",
    "Coverage",
    "EvaluatedAssignment",
    "Flip",
    "Flips",
    "Format",
    "FormatDescription",
    "FxroundError",
    "InvarianceReport",
    "Leak",
    "Leaks",
    "LoadedModule",
    "LocalizeReport",
    "NotInvariant",
    "Operation",
    "PartChoice",
    "PerplexityReport",
    "Policy",
    "PolicyError",
    "PolicyResult",
    "QuantizationReport",
    "Rescaling",
    "RescalingReport",
    "RoundedModule",
    "RoundedOptimizer",
    "Rounding",
    "Rule",
    "ScaledDescription",
    "ScaledFormat",
    "ScaledRounding",
    "SelftestFailed",
    "SelftestReport",
    "Summary",
    "Sweep",
    "SweepReport",
    "Switch",
    "TrainingRun",
    "TuningReport",
    "UnsupportedOperator",
    "UnsupportedRounding",
    "VariabilityReport",
    "VerificationError",
    "WeightRounding",
    "attribute",
    "batches",
    "calibrate",
    "check_invariance",
    "compare",
    "compile_optimizer",
    "describe",
    "fold_norms",
    "formats",
    "instruction_set",
    "iterate",
    "load",
    "load_report",
    "localize",
    "merge",
    "metric",
    "modes",
    "perplexity",
    "perturb",
    "policies",
    "quantize_weights",
    "rescale_channels",
    "selftest",
    "store_integers",
    "sweep",
    "table",
    "train_widths",
    "tune",
    "variability",
    "wasserstein",
]


@cache
def _homes() -> dict[str, tuple[str, str]]:
    """Return the module that defines each public name, and the name that it has there."""
    lines = next(n for n in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if isinstance(n, ast.If)).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {name.asname or name.name: (str(line.module), name.name) for line in imports for name in line.names}


if not TYPE_CHECKING:  # a checker would take every name for one that this function returns

    def __getattr__(name: str) -> Any:
        if name in _homes():
            module, there = _homes()[name]
            value = getattr(import_module(module), there)
        elif name.startswith("_"):
            raise AttributeError(f"module 'fxround' has no attribute {name!r}")
        else:
            try:
                return import_module(f"fxround.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"fxround.{name}":
                    raise
                raise AttributeError(f"module 'fxround' has no attribute {name!r}") from None
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})


if not is_command():  # the command imports PyTorch after it has read its arguments
    from fxround import deferred_operators

    deferred_operators.register()
