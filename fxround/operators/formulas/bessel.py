"""Formulas of the modified Bessel functions I0 and I1: Chebyshev series up to 8 and beyond.

exp(-x) I0(x) and exp(-x) I1(x) / x are series in x / 4 - 1 up to 8; beyond, exp(-x) sqrt(x) times the functions are
series in 16 / x - 1 (the idea of Clenshaw 1962). The coefficients are those of the interpolants at Chebyshev points; a
test computes them again with mpmath. A series ends with its last coefficient above a tenth of the dtype's unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from fxround.operators.formulas.table import formula, widened

aten = torch.ops.aten

I0_NEAR: Final = (
    0.33839763720473803,
    -0.3046826723431984,
    0.17162090152220877,
    -0.09490109704804764,
    0.04930528423967071,
    -0.02373741480589947,
    0.010546460394594998,
    -0.004324309995050576,
    0.0016394756169413357,
    -0.0005763755745385824,
    0.00018850288509584165,
    -5.754195010082104e-05,
    1.6448448070728896e-05,
    -4.4167383584587505e-06,
    1.1173875391201037e-06,
    -2.670793853940612e-07,
    6.046995022541919e-08,
    -1.300025009986248e-08,
    2.6598237246823866e-09,
    -5.189795601635263e-10,
    9.675809035373237e-11,
    -1.726826291441556e-11,
    2.95505266312964e-12,
    -4.856446783111929e-13,
    7.676185498604936e-14,
    -1.1685332877993439e-14,
    1.7153912855549895e-15,
    -2.4312798465332357e-16,
    3.3307945173500575e-17,
    -4.4153415028659044e-18,
    5.669164351369136e-19,
    -7.055835897907514e-20,
    8.410516804158722e-21,
)
I1_NEAR: Final = (
    0.12629359322181682,
    -0.17641651835783406,
    0.1026436586898471,
    -0.05294598120809499,
    0.024726449030626516,
    -0.010564084894626197,
    0.004156422944312888,
    -0.0015135724506312532,
    0.0005122859561685758,
    -0.00016176081582589674,
    4.781565107550054e-05,
    -1.3273163656039436e-05,
    3.4702513081376785e-06,
    -8.568720264695455e-07,
    2.0032947535521353e-07,
    -4.445059128796328e-08,
    9.381537386495773e-09,
    -1.8872497517228294e-09,
    3.625590281552117e-10,
    -6.663489723502027e-11,
    1.1736186298890901e-11,
    -1.9839743977649436e-12,
    3.223793365945575e-13,
    -5.042185504727912e-14,
    7.600684294735406e-15,
    -1.1055969477353855e-15,
    1.5536319577361197e-16,
    -2.1114212143496558e-17,
    2.777914111885218e-18,
    -3.541581684560474e-19,
    4.3792941345944494e-20,
    -5.255906200356329e-21,
    6.053641290050226e-22,
)
I0_FAR: Final = (
    0.4022452055070544,
    0.0033691164782556943,
    6.889758346916825e-05,
    2.8913705208347567e-06,
    2.0489185894690638e-07,
    2.266668990498178e-08,
    3.3962320257083865e-09,
    4.94060238822497e-10,
    1.188914710784644e-11,
    -3.149916527963241e-11,
    -1.3215811840447725e-11,
    -1.7941785315067997e-12,
    7.18012445138407e-13,
    3.852778382741297e-13,
    1.5400862175166178e-14,
    -4.1505693472451204e-14,
    -9.554846699197212e-15,
    3.811680668039041e-15,
    1.7725601363591718e-15,
    -3.4254856038252755e-16,
    -2.8276241466181937e-16,
    3.4612241365070906e-17,
    4.46562752129513e-17,
    -4.830631005532533e-18,
    -7.233330701231891e-18,
    9.929025237193076e-19,
    1.1936382078695018e-18,
    -2.5255791599890715e-19,
    -1.9057183040549827e-19,
    8.046611604548415e-20,
)
I1_FAR: Final = (
    0.38928811750914005,
    -0.009761097491361469,
    -0.00011058893876262371,
    -3.882564808877691e-06,
    -2.512236237870209e-07,
    -2.6314688468895196e-08,
    -3.835380385964237e-09,
    -5.589743462196584e-10,
    -1.8974958123505416e-11,
    3.252603583015488e-11,
    1.4125807436613793e-11,
    2.0356285441470823e-12,
    -7.198551776246313e-13,
    -4.083551111091324e-13,
    -2.1015418427682397e-14,
    4.27244001666918e-14,
    1.0420276984522873e-14,
    -3.8144030711275505e-15,
    -1.8803547789203403e-15,
    3.3082022966149676e-16,
    2.962629166729719e-16,
    -3.2095272982731864e-17,
    -4.650311485144221e-17,
    4.414480145600382e-18,
    7.517441589931824e-18,
    -9.32193886483853e-19,
    -1.2421354048206203e-18,
    2.4517968989342127e-19,
    1.9913352444101859e-19,
    -8.007109039920578e-20,
)


def _series(t: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Return c0 + c1 T1(t) + c2 T2(t) + ... by Clenshaw's recurrence: b_k = (2 t) b_(k+1) - b_(k+2) + c_k."""
    least = torch.finfo(t.dtype).eps / 20
    used = coefficients[: max(k for k, c in enumerate(coefficients) if abs(c) > least) + 1]
    double = t + t
    first, second = torch.full_like(t, used[-1]), None
    for c in reversed(used[1:-1]):
        term = double * first
        first, second = (term if second is None else term - second) + c, first
    assert second is not None
    return t * first - second + used[0]


def _decayed(x: Tensor, near: Sequence[float], far: Sequence[float], odd: bool) -> Tensor:
    """Return exp(-|x|) I(x)."""
    size = x.abs()
    small = size <= 8
    inside = _series(torch.where(small, size, 8.0) * 0.25 - 1, near)
    beyond = torch.where(small, 8.0, size)
    outside = _series(16 / beyond - 1, far) / beyond.sqrt()
    if not odd:
        return torch.where(small, inside, outside)
    return torch.where(small, x * inside, torch.where(x < 0, -outside, outside))


@formula(aten.special_i0e.default)
def i0e(x: Tensor) -> Tensor:
    """i0e(x) = where(|x| <= 8, c(|x| / 4 - 1), c(16 / |x| - 1) / sqrt(|x|)), c a Chebyshev series for each range"""
    return _decayed(widened(x), I0_NEAR, I0_FAR, False).to(x.dtype)


@formula(aten.i0.default)
def i0(x: Tensor) -> Tensor:
    """i0(x) = exp(|x|) * i0e(x)"""
    w = widened(x)
    return (w.abs().exp() * _decayed(w, I0_NEAR, I0_FAR, False)).to(x.dtype)


@formula(aten.special_i1e.default)
def i1e(x: Tensor) -> Tensor:
    """i1e(x) = where(|x| <= 8, x * c(|x| / 4 - 1), sign(x) c(16 / |x| - 1) / sqrt(|x|)), c as for i0e"""
    return _decayed(widened(x), I1_NEAR, I1_FAR, True).to(x.dtype)


@formula(aten.special_i1.default)
def i1(x: Tensor) -> Tensor:
    """i1(x) = exp(|x|) * i1e(x)"""
    w = widened(x)
    return (w.abs().exp() * _decayed(w, I1_NEAR, I1_FAR, True)).to(x.dtype)
