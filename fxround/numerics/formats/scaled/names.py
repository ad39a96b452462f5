"""The shortest texts of scaled formats."""

from __future__ import annotations

from fxround.numerics.formats.fixed_point import integers
from fxround.numerics.formats.scaled.format import ScaledFormat
from fxround.numerics.formats.scaled.rows import SCALED


def short_name(form: ScaledFormat) -> str:
    """Return the shortest text that names a scaled format, such as ``nvfp4`` or ``int4:channel``."""
    element, scaling = form.element, form.scaling
    names = [name for name, known in SCALED.items() if known == form]
    bits = element.precision + (scaling is None or scaling.how != "affine")
    if not names and scaling is not None and 2 <= bits <= 16 and element == integers(element.precision + 1):
        word = f"{'u' * (scaling.how == 'affine')}int{bits}"
        block = scaling.block if isinstance(scaling.block, str) else "x".join(map(str, scaling.block))
        names = [text for text in (word, f"{word}:{block}") if ScaledFormat.parse(text) == form]
        names = names or [str(form).replace(str(element), word)]
    return names[0] if names else str(form)
