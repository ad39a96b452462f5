"""Small layers and functions, one line each: ``LAYERS`` maps a name to (module, arguments), all deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Layer = tuple[nn.Module, tuple[Any, ...]]


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


class All(nn.Module):
    """Several modules on the same arguments, so that one capture is enough."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.all = nn.ModuleList(modules)

    def forward(self, *args: Any) -> list[Any]:
        return [module(*args) for module in self.all]


class Together(nn.Module):
    """Several layers with arguments of their own, so that one capture is enough."""

    def __init__(self, layers: list[nn.Module], numbers: list[int]) -> None:
        super().__init__()
        self.layers, self.numbers = nn.ModuleList(layers), numbers

    def forward(self, *args: Any) -> list[Any]:
        results, begin = [], 0
        for layer, number in zip(self.layers, self.numbers, strict=True):
            results.append(layer(*args[begin : begin + number]))
            begin += number
        return results


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.fc(x).float()


def _spaces() -> dict[int, Tensor]:
    return {1: torch.randn(2, 4, 9), 2: torch.randn(2, 4, 8, 8), 3: torch.randn(2, 4, 4, 6, 5)}


def activations() -> dict[str, Layer]:
    names = """ReLU ReLU6 ELU CELU SELU GELU SiLU Mish Hardswish Hardsigmoid Hardtanh Softplus Softsign Tanh Tanhshrink
        Softshrink Hardshrink LeakyReLU PReLU LogSigmoid Sigmoid GLU"""
    x = torch.randn(3, 6)
    softmaxes = [getattr(nn, name)(1) for name in ("Softmin", "Softmax", "LogSoftmax")]
    rest = [nn.GELU("tanh"), nn.Softplus(2.0, 3.0), *softmaxes]
    return {"activations": (All(*(getattr(nn, name)() for name in names.split()), *rest), (x,))}


def spatial() -> dict[str, Layer]:
    found: dict[str, Layer] = {}
    modes = {1: ["nearest", "linear"], 2: ["nearest", "bilinear", "bicubic"], 3: ["nearest", "trilinear"]}
    for d, x in _spaces().items():

        def of(name: str, d: int = d) -> Any:
            return getattr(nn, name.replace("Nd", f"{d}d"))

        layers = {
            "ConvNd": of("ConvNd")(4, 6, 3, padding=1, stride=2, groups=2),
            "ConvNd_dilated": of("ConvNd")(4, 3, 2, dilation=2, bias=False),
            "ConvNd_valid": of("ConvNd")(4, 3, 2, padding="valid"),
            "ConvTransposeNd": of("ConvTransposeNd")(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
            "AvgPoolNd": of("AvgPoolNd")(2),
            "AvgPoolNd_ceil": of("AvgPoolNd")(3, 2, padding=1, ceil_mode=True),
            "AvgPoolNd_no_pad": of("AvgPoolNd")(3, 2, padding=1, count_include_pad=False),
            "MaxPoolNd": of("MaxPoolNd")(3, 2, padding=1, ceil_mode=True),
            "AdaptiveAvgPoolNd": of("AdaptiveAvgPoolNd")(3),
            "AdaptiveAvgPoolNd_1": of("AdaptiveAvgPoolNd")(1),
            "AdaptiveMaxPoolNd": of("AdaptiveMaxPoolNd")(3),
            "BatchNormNd": of("BatchNormNd")(4).eval(),
            "BatchNormNd_train": of("BatchNormNd")(4),
            "InstanceNormNd": of("InstanceNormNd")(4, affine=True),
            "LPPoolNd": of("LPPoolNd")(2, 2),
            "ReflectionPadNd": of("ReflectionPadNd")(1),
            "ReplicationPadNd": of("ReplicationPadNd")(1),
            **{f"UpsampleNd_{m}": nn.Upsample(size=[5] * d, mode=m) for m in modes[d]},
        }
        found |= {name.replace("Nd", f"{d}d"): (layer, (x,)) for name, layer in layers.items()}
    x = _spaces()[2]
    found["Conv2d_same"], found["unbatched"] = (nn.Conv2d(4, 4, 4, padding="same"), (x,)), (nn.Conv2d(4, 2, 3), (x[0],))
    found["AdaptiveAvgPool2d_of_one"] = (nn.AdaptiveAvgPool2d((3, 2)), (x[..., :1, :1],))
    found["avg_pool_divisor"] = (Calls(lambda x: F.avg_pool2d(x, 2, divisor_override=3)), (x,))
    found["grid_sample"] = (Calls(lambda x, g: F.grid_sample(x, g, align_corners=False)), (x, torch.rand(2, 3, 3, 2)))
    found["PixelShuffle"], found["Unfold"] = (nn.PixelShuffle(2), (x,)), (nn.Unfold(3), (x,))
    return found


def structured() -> dict[str, Layer]:
    x, sequence, image = torch.randn(3, 6), torch.randn(2, 3, 8), torch.randn(2, 4, 8, 8)
    tokens, heads = torch.randint(0, 9, (3, 5)), torch.randn(2, 2, 4, 8)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    causal = Calls(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    return {
        "Linear": (nn.Linear(6, 5), (x,)),
        "Linear_4d": (nn.Linear(8, 5, bias=False), (image,)),
        "Bilinear": (nn.Bilinear(6, 6, 3), (x, x + 1)),
        "LayerNorm": (nn.LayerNorm(6), (x,)),
        "LayerNorm_2d": (nn.LayerNorm([8, 8], elementwise_affine=False), (image,)),
        "GroupNorm": (nn.GroupNorm(2, 4), (image,)),
        "RMSNorm": (nn.RMSNorm(6), (x,)),
        "LocalResponseNorm": (nn.LocalResponseNorm(3), (image,)),
        "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), (x,)),
        "spectral_norm": (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)).eval(), (x,)),
        "Embedding": (nn.Embedding(9, 4), (tokens,)),
        "RNN": (nn.RNN(8, 5, batch_first=True), (sequence,)),
        "LSTM_projected": (nn.LSTM(8, 5, proj_size=3), (sequence,)),
        "GRUCell": (nn.GRUCell(6, 5), (x,)),
        "MultiheadAttention": (nn.MultiheadAttention(8, 2, batch_first=True).eval(), (sequence,) * 3),
        "TransformerEncoder": (nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), (sequence,)),
        "Transformer": (nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval(), (sequence, sequence + 1)),
        "causal_attention": (causal, (heads,)),
        "autocast": (Autocast(), (x,)),
    }


def losses() -> dict[str, Layer]:
    x, y, labels = torch.randn(3, 6), torch.randn(3, 6), torch.tensor([0, 2, 5])
    sign = y.sign()
    targets: dict[str, tuple[Any, ...]] = {
        "MSELoss": (y,),
        "L1Loss": (y,),
        "SmoothL1Loss": (y,),
        "HuberLoss": (y,),
        "BCEWithLogitsLoss": (y.sigmoid(),),
        "KLDivLoss": (y.softmax(1),),
        "CrossEntropyLoss": (labels,),
        "NLLLoss": (labels,),
        "SoftMarginLoss": (sign,),
        "HingeEmbeddingLoss": (sign,),
        "PoissonNLLLoss": (y.abs(),),
        "TripletMarginLoss": (y, y + 1),
        "CosineEmbeddingLoss": (y, torch.ones(3)),
    }
    found: dict[str, Layer] = {name: (getattr(nn, name)(), (x, *rest)) for name, rest in targets.items()}
    found["label_smoothing"] = (nn.CrossEntropyLoss(label_smoothing=0.1), (x, labels))
    found["cdist"], found["CosineSimilarity"] = (Calls(torch.cdist), (x, y)), (nn.CosineSimilarity(), (x, y))
    return found


def functions() -> dict[str, Layer]:
    x, y, image = torch.randn(3, 6), torch.randn(3, 6), torch.randn(2, 4, 8, 8)
    p, index = x.abs().clamp(0.1, 0.9), torch.tensor([0, 2, 2])
    unary = """exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sin cos tan asin acos atan sinh cosh tanh asinh
        atanh erf erfc erfinv lgamma digamma sigmoid square abs neg sign floor ceil round trunc frac logit nan_to_num
        sgn"""
    binary = "add sub mul div pow atan2 hypot fmod remainder maximum minimum copysign"
    reduced = "sum mean std var amax amin logsumexp cumsum cummax"
    powers = (3, 2, 1, 0.5, -0.5, -1, 2.5, -2)
    found: dict[str, Layer] = {
        "unary": (Calls(lambda x: [getattr(torch, name)(x) for name in unary.split()]), (p,)),
        "binary": (Calls(lambda x, y: [getattr(torch, name)(x, y) for name in binary.split()]), (p, p.flip(0))),
        "reduced": (Calls(lambda x: [getattr(x, name)(dim=1) for name in reduced.split()]), (x,)),
        "powers": (Calls(lambda x: [x**e for e in powers]), (p,)),
    }
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "integer_quotients": (
            lambda x, y: (
                [torch.div(x, y, rounding_mode=mode) for x, y in ((x, y), (x, 0.3)) for mode in ("floor", "trunc")]
                + [x // y, 3 // x, x // 0.3]
            ),
            (p, p.flip(0)),
        ),
        "scalars": (lambda x: 3 - x * 2 + x / 7 - 1 / x + 2.0**x, (p,)),
        "alpha": (lambda a, b: torch.add(a, b, alpha=2) - torch.sub(a, b, alpha=0.3), (x, y)),
        "addcmul": (lambda a, b: torch.addcmul(a, a, b, value=0.5), (x, y)),
        "addcdiv": (lambda a, b: torch.addcdiv(a, a, b), (x, p)),
        "lerp": (lambda a, b: torch.lerp(a, b, 0.3) + torch.lerp(a, b, 0.7) + torch.lerp(a, b, p), (x, y)),
        "reduce_all": (lambda x: x.sum() + x.mean() + x.var() + x.std() + x.nansum(), (x,)),
        "var_mean": (lambda x: torch.var_mean(x, dim=(1, 2), correction=0), (image,)),
        "norms": (lambda x: (x.norm(p=1), x.norm(p=3, dim=1), x.norm(float("inf")), x.norm(p=0)), (x,)),
        "counts": (lambda x: (x > 0).sum() * 1.5 + (x > 0).float().mean(), (x,)),
        "products": (lambda a: (a @ a.t(), a @ a[0], a[0] @ a[1], torch.outer(a[0], a[1])), (x,)),
        "addmm": (lambda a: torch.addmm(a @ a.t(), a, a.t(), beta=0.5, alpha=2), (x,)),
        "baddbmm": (lambda a: torch.baddbmm(a[0], a[0], a[0], beta=2), (image,)),
        "addbmm": (
            lambda a: torch.addbmm(a[0, 0], a[0], a[0]) + torch.addmv(a[0, 0, 0], a[0, 0], a[0, 0, 1]),
            (image,),
        ),
        "addr": (lambda a: torch.addr(a[:, :3], a[:, 0], a[:, 1], alpha=0.5), (x,)),
        "einsum": (lambda a: torch.einsum("bchw,bdhw->bcd", a, a), (image,)),
        "integers": (lambda t: (t.float() @ t.float().t()) + (t @ t.t()) * 2, (torch.randint(0, 5, (3, 3)),)),
        "gathers": (lambda x: x[:, [0, 2]] + x[:, 1:3] + x.gather(1, (x > 0).long())[:, :2], (x,)),
        "scatter_add": (lambda x: torch.zeros_like(x).scatter_add(1, (x > 0).long(), x), (x,)),
        "index_add": (lambda x: x.index_add(1, index, x[:, :3], alpha=0.5), (x,)),
        "index_put": (lambda x: torch.index_put(x, (index[1:],), x[:2], accumulate=True), (x,)),
        "selects": (
            lambda x: torch.where(x > 0, x, -1.5).masked_fill(x > 1, 0.25).clamp(-1, 1).minimum(x.amax()),
            (x,),
        ),
        "masked_softmax": (lambda x: x.masked_fill(x > 0.5, float("-inf")).softmax(1), (x,)),
        "moves": (lambda x: torch.cat([x.triu(), x.roll(1, 0).flip(1), F.pad(x, (1, 2), value=0.5)[:, 3:]]), (x,)),
        "sorts": (lambda x: (x.topk(2), x.sort(1), x.kthvalue(2), x.median()), (x,)),
        "ranges": (lambda x: x * torch.arange(6) * 0.5 + torch.arange(0, 3, 0.5) + torch.linspace(0, 1, 6), (x,)),
        "casts": (lambda x: x.double().float() + x.bfloat16().float() + x.int() + x.half(), (x,)),
        "sizes": (lambda x: x / x.shape[0] + x.sum(0) * x.numel(), (x,)),
        "in_place": (lambda x: x.clone().mul_(2).add_(1).relu_(), (x,)),
        "as_strided": (lambda x: (x * 2).t().as_strided((2, 2), (6, 1)), (x,)),
        "no_dimensions": (lambda x: (x.sum() * 2).cumsum(0) + x.sum().sum().softmax(0) + x.mean().mean(), (x,)),
        "boolean_index": (lambda x: x[x > 0].sum(), (x,)),
        "empty": (lambda x: F.linear(x, torch.ones(5, 6)).softmax(1), (torch.randn(0, 6),)),
    }
    return found | {name: (Calls(function), args) for name, (function, args) in calls.items()}


def layers() -> dict[str, Layer]:
    """All of them, with the same numbers every time."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return activations() | spatial() | structured() | losses() | functions()


LAYERS = layers()
