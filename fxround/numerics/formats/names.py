"""The names that formats and dtypes have elsewhere, without the formats themselves."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

FLUSH: Final = "-flush"

# The only list of the names that formats have elsewhere. PyTorch's dtypes are here without "torch."; float8_e4m3 is
# ml_dtypes' name of the format with infinities, fp8_e4m3 the hardware's name of the one without.
ALIASES: Final = MappingProxyType(
    {
        **dict.fromkeys(("float64", "fp64", "f64", "double"), "binary64"),
        **dict.fromkeys(("float32", "fp32", "f32", "float", "single"), "binary32"),
        **dict.fromkeys(("float16", "fp16", "f16", "half"), "binary16"),
        **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
        **dict.fromkeys(("float8_e5m2", "fp8_e5m2", "f8e5m2"), "e5m2"),
        **dict.fromkeys(("float8_e4m3fn", "fp8_e4m3fn", "fp8_e4m3", "f8e4m3fn"), "e4m3fn"),
        **dict.fromkeys(("float8_e4m3", "f8e4m3"), "e4m3"),
        **dict.fromkeys(("float8_e5m2fnuz", "fp8_e5m2fnuz", "f8e5m2fnuz"), "e5m2fnuz"),
        **dict.fromkeys(("float8_e4m3fnuz", "fp8_e4m3fnuz", "f8e4m3fnuz"), "e4m3fnuz"),
        **dict.fromkeys(("float8_e4m3b11fnuz", "float8_e4m3b11", "f8e4m3b11fnuz"), "e4m3b11fnuz"),
        **dict.fromkeys(("float8_e8m0fnu", "fp8_e8m0"), "e8m0fnu"),
        **{f"binary8p{p}": f"binary8p{p}se" for p in range(1, 8)},
        **{f"posit{n}": f"posit({n},2)" for n in (8, 16, 32)},
        **dict.fromkeys(("float6_e3m2fn", "fp6_e3m2"), "e3m2fn"),
        **dict.fromkeys(("float6_e2m3fn", "fp6_e2m3"), "e2m3fn"),
        **dict.fromkeys(("float4_e2m1fn", "float4_e2m1fn_x2", "fp4_e2m1"), "e2m1fn"),
    }
)
# Names that mean more than one format: for messages.
UNSURE: Final = MappingProxyType(
    {
        **dict.fromkeys(("fp8", "float8"), ("e4m3fn", "e5m2")),
        **dict.fromkeys(("fp4", "mxfp4", "float4"), ("e2m1fn",)),
        **dict.fromkeys(("fp6", "float6"), ("e3m2fn", "e2m3fn")),
    }
)
# How formats with arguments are written.
SPELT: Final = MappingProxyType(
    {
        "ieee": "ieee(exponent_bits,precision)",
        "table": "table(value,value,...)",
        "posit": "posit(bits,exponent_bits)",
        "fixed": "fixed(bits,fraction)",
        "ufixed": "ufixed(bits,fraction)",
        "bfp": "bfp(bits,block)",
        "sbits": "sbits(bits)",
    }
)
_OTHER_TYPES: Final = re.compile(
    r"(torch\.)?((?P<complex>c(omplex|float|double|half)[0-9]*)|bool_?|q?u?int[0-9]*(_t)?|q?u?int[0-9]+x[0-9]+"
    r"|bits[0-9x]+|long|short|byte|char|ulong)"
)


def other_numbers(name: str) -> str:
    """Return what kind of numbers a dtype holds that is not floating-point, for messages; "" for any other name."""
    match = _OTHER_TYPES.fullmatch(name)
    return "" if not match else "complex numbers" if match["complex"] else "integers or truth values"


def own_name(name: str) -> str:
    """Return fxround's name of a format: ``"binary16"`` for ``"half"``. An unknown name is returned unchanged.

    ``-flush``, and the mode and overflow that follow a slash in a rounding, are kept.
    """
    head, slash, rest = name.partition("/")
    row = head.strip().removesuffix(FLUSH)
    known = ALIASES.get(row.removeprefix("torch."))
    return name if known is None else f"{known}{head.strip().removeprefix(row)}{slash}{rest}"
