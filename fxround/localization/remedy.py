"""A remedy: the perturbing policy with rules that round the culprits as the quiet policy does.

A rule matches an operator (or a role) in a module, so that it may match more sites than the culprits. ``remaining``
returns the sites that the policy still perturbs; ``localize`` checks that set like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

from fxround.localization.delta_debugging import Units
from fxround.localization.masked_model import Masked
from fxround.policy import ENTERING, IDENTITY, Assignment, Policy, Rule


def remedy(masked: Masked, culprits: Iterable[str]) -> Policy:
    """Return the loud policy with one more rule for every module and operator of the culprits."""
    rules = dict.fromkeys(_rule(masked, name) for name in culprits)
    return masked.policy.with_rules(*rules, name=f"{masked.policy.name}, remedied")


def remaining(masked: Masked, cured: Policy) -> Units:
    """Return the sites that a remedy still rounds as the loud policy does."""
    own = len(masked.policy.rules)
    return tuple(name for name in masked.sites if max(_matching(masked, cured, name), default=-1) < own)


def _matching(masked: Masked, policy: Policy, name: str) -> tuple[int, ...]:
    place = masked.sites[name]
    return policy.matching(path=place.path, operator=place.operator, kind=place.kind, role=place.role)


def _rule(masked: Masked, name: str) -> Rule:
    place, quiet = masked.sites[name], masked.quiet_assignment(name)
    enters = place.role in ENTERING
    said = _said(quiet) if quiet is not None and quiet.rounding is not None else {"rounding": IDENTITY}
    operator, role = (None, place.role) if enters else (place.operator, None)
    return Rule(place.path, operator, role, **said, optional=True)


def _said(quiet: Assignment) -> dict[str, str]:
    return {"rounding": str(quiet.rounding), "accumulate": str(quiet.accumulate), "order": str(quiet.order)}
