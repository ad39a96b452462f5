"""Policies: which rounding each operation of a model gets.

``policy`` has the class, ``rule`` one line of it, and ``presets`` the named policies and recipes.
"""

from fxround.policy.policy import DEFINITIONS, OWN, Policy
from fxround.policy.presets import PRESETS
from fxround.policy.recipes import block_scaling, current_scaling, delayed_scaling, monte_carlo, nvfp4, wage
from fxround.policy.rule import DIRECTIONS, DTYPE, ENTERING, IDENTITY, NATIVE, ROLES, WIDE, Assignment, Rule

__all__ = [
    "DEFINITIONS",
    "DIRECTIONS",
    "DTYPE",
    "ENTERING",
    "IDENTITY",
    "NATIVE",
    "OWN",
    "PRESETS",
    "ROLES",
    "WIDE",
    "Assignment",
    "Policy",
    "Rule",
    "block_scaling",
    "current_scaling",
    "delayed_scaling",
    "monte_carlo",
    "nvfp4",
    "wage",
]
