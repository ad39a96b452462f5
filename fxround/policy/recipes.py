"""Recipes: training in 8 and 4 bits, and Monte Carlo arithmetic.

The recipes are functions, which name their choices as arguments. All but ``wage`` and ``monte_carlo`` round operands
of matrix products to scaled formats. Norms, softmax, residuals and results keep the model's dtype, and master weights
and optimizer states are the model's own. They are those that NVIDIA's TransformerEngine publishes; docs/scaled.md says
where bits differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fxround.errors import PolicyError, shown
from fxround.numerics.formats import Format
from fxround.policy.policy import Policy, of_operands
from fxround.policy.rule import DTYPE, NATIVE, WIDE, Rule

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


def monte_carlo(precision: int | None = None, mode: str = "mca") -> Policy:
    """Return Monte Carlo arithmetic with a virtual precision of t bits.

    The noise is that of the rounding modes ``mca`` and ``mca_rr``.

    precision: t, from 1 to the bits of the dtype (24 for float32, 53 for float64); None: the bits of each dtype.
    mode: ``"rr"``, random rounding: each result gets noise that is not a number of t bits. ``"pb"``, precision
    bounding: the operands of each operation do, and are rounded to their dtype, so that t below its bits is needed.
    ``"mca"``: each result and each operand gets noise.

    The steps of an accumulation are results, its operands get their noise once, before the first step. The same operand
    has the same noise in all operations that read it.

    Raises PolicyError for another mode or precision.

    Source: Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997; the names are those of Verificarlo's backend.
    """
    if mode not in ("mca", "rr", "pb"):
        raise PolicyError(f"mode = {shown(mode)}: expected 'mca', 'rr' or 'pb'")
    if precision is not None and (type(precision) is not int or not 1 <= precision <= 53):
        raise PolicyError(f"precision = {shown(precision)}: expected 1 to 53 bits, or None for those of each dtype")
    bits = "" if precision is None else f":{precision}"
    result = {"mca": f"mca{bits}", "rr": f"mca_rr{bits}", "pb": "nearest_even"}[mode]
    rules = [Rule(rounding=f"{DTYPE}/{result}", accumulate=f"{WIDE}/{result}", optional=True)]
    if mode != "rr":
        rules.append(Rule(operands=f"{DTYPE}/mca{bits}", optional=True))
    return Policy(f"monte_carlo_{mode}{bits.replace(':', '_')}", tuple(rules))


def wage(
    last: str,
    *,
    weights: int = 2,
    activations: int = 8,
    gradients: int = 8,
    errors: int = 8,
    scales: Mapping[str, float] | None = None,
) -> Policy:
    """Return WAGE: weights, activations, gradients and errors as integers of few bits, in a network of ReLUs.

    With s(k) = 2^(1-k), a number of k bits is a multiple of s(k) from -1 + s(k) to 1 - s(k), and Q(x, k) the nearest
    one. 2^round(log2(x)) is Shift(x).

    - Weights are Q(w, k_W) where they are used.
    - Results of ReLU and arguments of the model are Q(a, k_A). Where a result is beyond the largest number, its
      gradient is zero. The derivative of ReLU is that at the rounded result, so that it is zero where this is zero.
    - Errors, the gradients of these results and of the last layer's, are Q(e / Shift(max |e|), k_E) Shift(max |e|).
    - In the optimizer's step, each ``update`` is rounded stochastically to multiples of s(k_G), and each new weight is
      kept within the numbers of k_G bits.

    The optimizer is ``torch.optim.SGD`` without momentum, at the learning rate r s(k_G) for WAGE's rate r; between
    ``backward()`` and ``step()``, ``fxround.training.wage.normalize_gradients`` divides each gradient g by
    Shift(max |g|), which no policy can say. ``initial_weights`` in the same module makes weights and ``scales``.

    last: the path of the layer that computes the model's result. weights, activations, gradients, errors: k_W, k_A, k_G
    and k_E, 2 to 16 bits. scales: the a of layers by path, powers of two from 1 on. A layer of WAGE computes
    Q(w, k_W) / a; its parameter here is w / a, so that all numbers of its weight and its updates are divided by a.

    Raises PolicyError for other bits or scales.

    Source: Wu, Li, Chen, Shi: Training and inference with integers in deep neural networks, ICLR 2018, section 3. The
    error of a layer is multiplied by Shift again, which changes no update: Shift(max |g|) divides it out.
    """
    bits = {"weights": weights, "activations": activations, "gradients": gradients, "errors": errors}
    for name, k in bits.items():
        if k not in range(2, 17):
            raise PolicyError(f"{name}={shown(k)}: expected 2 to 16 bits")
    given = {"*": 1.0, **(scales or {})}
    for path, a in given.items():
        if not (a >= 1 and math.frexp(a)[0] == 0.5):
            raise PolicyError(f"the scale of {path} is {shown(a)}: expected a power of two from 1 on")
    activation, error = _integers(activations), f"scaled(int{errors};tensor,e8m0fnu,shift)"
    rules = [
        Rule(rounding=DTYPE, accumulate=WIDE),
        Rule(operator="contraction", accumulate=NATIVE),
        Rule(role="input", rounding=activation),
        Rule(operator="relu", direction="forward", rounding=activation, gradient=f"zero_clamped {error}"),
        Rule(last, operator="contraction", direction="backward", operands=error),
    ]
    for path, a in given.items():
        rules += [
            Rule(path, role="weight", direction="forward", rounding=_integers(weights, a)),
            Rule(path, role="update", direction="update", rounding=_multiples(gradients, a)),
            Rule(path, role="weight", direction="update", rounding=_integers(gradients, a)),
        ]
    defaults = {name: (k, 2 if name == "weights" else 8) for name, k in bits.items()}
    return Policy(_varied("wage", defaults), tuple(replace(rule, optional=True) for rule in rules))


def _integers(bits: int, a: float = 1.0) -> str:
    """Return the rounding to integers of these bits times 2^(1 - bits) / a, without the least one of two's complement.

    It is no scaled format, so that a ReLU rounds its result.
    """
    quantum = math.ldexp(1 / a, 1 - bits)
    exponent = math.frexp(quantum)[1] + bits - 3
    most = quantum * (2 ** (bits - 1) - 1)
    held = Format.custom(precision=bits - 1, emin=exponent, maximum=most, inf=False, nan=False)
    return f"{held}/nearest_even/saturate"


def _multiples(bits: int, a: float) -> str:
    """Return the stochastic rounding to multiples of 2^(1 - bits) / a, bounded beyond what a weight can be."""
    return f"fixed(24,{bits - 2 + math.frexp(a)[1]})/stochastic"


def _varied(name: str, choices: Mapping[str, tuple[object, object]]) -> str:
    """Return a preset's name, with the choices (present, default) that differ from the defaults."""
    said = ", ".join(f"{key}={value!r}" for key, (value, default) in choices.items() if value != default)
    return f"{name}({said})" if said else name
