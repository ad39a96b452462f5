"""fxround, a rounding compiler for PyTorch: it makes every rounding of a model explicit, and a policy chooses it.

Example::

    compiled = fxround.compile(model, "stochastic")     # or "bfloat16", "reproducible", a Policy, a TOML file
    compiled(x)                                         # the same (seed, sample) gives the same bits
    compiled.coverage()                                 # what is rounded, and what is not, with the reason

``formats``, ``modes`` and ``policies`` are read-only mappings from names to formats, rounding modes and the policies
that have a name. ``print(fxround.describe(name))`` says what a format is.

Importing the package registers the operators ``torch.ops.fxround.*``, which exported programs need. ``compile``,
``round`` and ``hash`` are not in ``__all__``, so that a star import does not replace Python's builtins.
"""

import fxround.interrupts  # noqa: F401  before the imports that take seconds

# isort: split
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
from fxround.invariance import InvarianceReport, NotInvariant, check_invariance
from fxround.localization.localize import localize
from fxround.localization.report import LocalizeReport
from fxround.module import compile as compile
from fxround.module.iteration import iterate
from fxround.module.rounded_module import RoundedModule
from fxround.numerics.formats import FORMATS, Format
from fxround.numerics.formats.scaled import ScaledFormat, ScaledRounding
from fxround.numerics.modes import MODES, Rounding
from fxround.policy import PRESETS, Policy, Rule
from fxround.policy.calibrated import CalibratedPolicy
from fxround.runtime.cpu.code import instruction_set
from fxround.selftests import SelftestFailed, SelftestReport, selftest
from fxround.significance.calibration import calibrate
from fxround.significance.inputs import batches
from fxround.significance.metrics import metric
from fxround.significance.perplexity import perplexity
from fxround.significance.perplexity_report import PerplexityReport
from fxround.significance.perturb import perturb
from fxround.significance.report import VariabilityReport
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
from fxround.version import VERSION
from fxround.views.descriptions import FormatDescription, ScaledDescription, describe
from fxround.views.leaks import Leak, Leaks
from fxround.views.summaries import Coverage, Operation, Summary

formats, modes, policies = FORMATS, MODES, PRESETS
__version__ = VERSION
table = Format.table

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
    "localize",
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
