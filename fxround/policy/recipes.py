"""Recipes of training in 8 and 4 bits.

The recipes are functions, which name their choices as arguments. They round the operands of matrix products to scaled
formats. Norms, softmax, residuals and results keep the model's dtype, and master weights and optimizer states are the
model's own. They are those that NVIDIA's TransformerEngine publishes; docs/scaled.md says where bits differ.
"""

from __future__ import annotations

from collections.abc import Mapping

from fxround.policy.policy import Policy, of_operands
from fxround.policy.rule import Rule

_E4M3, _E5M2 = "e4m3fn", "e5m2"


def current_scaling(*, forward: str = _E4M3, backward: str = _E5M2, power_of_two: bool = False) -> Policy:
    """Return FP8 with one scale for each tensor, from its own largest magnitude.

    forward, backward: the formats of forward values and of errors. power_of_two: whether multipliers are powers of two.
    """
    scale = "e8m0fnu" if power_of_two else "binary32"
    others = {"forward": (forward, _E4M3), "backward": (backward, _E5M2), "power_of_two": (power_of_two, False)}
    return of_operands(
        _varied("fp8", others),
        Rule(operands=f"scaled({forward};tensor,{scale},inverse)"),
        Rule(direction="backward", operands=f"scaled({backward};tensor,{scale},inverse)"),
    )


def delayed_scaling(
    *,
    forward: str = _E4M3,
    backward: str = _E5M2,
    history: int = 1024,
    margin: int = 0,
    most_recent: bool = False,
) -> Policy:
    """Return FP8 with one scale for each tensor, from the largest magnitudes of earlier steps.

    forward, backward: the formats of forward values and of errors. history: the number of steps of which the largest
    magnitude is taken. margin: scales are 2^margin times as large as the magnitude asks for. most_recent: whether the
    last step alone is taken, whatever the history.

    Raises PolicyError for a history outside 1 to 65536, and a margin outside -32 to 32.
    """
    choices = {"forward": (forward, _E4M3), "backward": (backward, _E5M2), "history": (history, 1024)}
    choices |= {"margin": (margin, 0), "most_recent": (most_recent, False)}
    how = f"tensor,binary32,delayed,history={1 if most_recent else history},margin={margin}"
    return of_operands(
        _varied("fp8_delayed", choices),
        Rule(operands=f"scaled({forward};{how})"),
        Rule(direction="backward", operands=f"scaled({backward};{how})"),
    )


def block_scaling(*, element: str = _E4M3, power_of_two: bool = True) -> Policy:
    """Return FP8 with one scale for 128 values along the sum of a product, and for 128 x 128 values of a weight.

    element: the format of all operands. power_of_two: whether multipliers are powers of two.
    """
    scale = "e8m0fnu" if power_of_two else "binary32"
    return of_operands(
        _varied("fp8_blocks", {"element": (element, _E4M3), "power_of_two": (power_of_two, True)}),
        Rule(operands=f"scaled({element};128,{scale},inverse)"),
        Rule(role="weight", operands=f"scaled({element};128x128,{scale},inverse)"),
    )


def nvfp4(*, stochastic_errors: bool = True, square_weights: bool = True, hadamard: int | None = 16) -> Policy:
    """Return NVFP4 for all products.

    stochastic_errors: whether errors are rounded stochastically. square_weights: whether weights share scales in tiles
    of 16 x 16, so that forward and backward pass read the same values; else in blocks of 16 along the sum. hadamard:
    the size of the random Hadamard transform of the operands of weights' gradients (4, 16, 64 or 256), None for none.

    Raises PolicyError for another size.
    """
    error = "nvfp4/stochastic" if stochastic_errors else "nvfp4"
    rules = [Rule(operands="nvfp4"), Rule(direction="backward", operands=error)]
    if square_weights:
        rules.append(Rule(role="weight", operands="nvfp4:16x16"))
    if hadamard is not None:
        turned = f"hadamard({hadamard})+"
        rules.append(Rule(result="gradient", operands=f"{turned}nvfp4"))
        rules.append(Rule(result="gradient", direction="backward", operands=f"{turned}{error}"))
    others = {"stochastic_errors": (stochastic_errors, True), "square_weights": (square_weights, True)}
    return of_operands(_varied("nvfp4_training", {**others, "hadamard": (hadamard, 16)}), *rules)


def _varied(name: str, choices: Mapping[str, tuple[object, object]]) -> str:
    """Return a preset's name, with the choices (present, default) that differ from the defaults."""
    said = ", ".join(f"{key}={value!r}" for key, (value, default) in choices.items() if value != default)
    return f"{name}({said})" if said else name
