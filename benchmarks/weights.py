"""Weights to nearest beside optimum-quanto and torchao: ``python -m benchmarks.weights [--write]``.

Four encoder layers of width 256 (3.2 million parameters, random weights, seed 0) in few bits, by
``fxround.quantize_weights(model, ..., x)`` and by what the peers' users call: ``quantize`` and ``freeze`` of
optimum-quanto, ``quantize_`` of torchao, each in its own integers. A peer that is not installed is left out
(``pip install --no-deps optimum-quanto torchao``). The seconds are processor time of one thread, the median of three
runs on a copy of the model; those of fxround contain a capture of the model and a report, for which products run on 16
x 64 tokens. Beside them stand the ratio of signal to error of all weights of the linear layers, and the share of
weights that are equal to fxround's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

import fxround
from benchmarks.harness import conditions, table, vision_operators
from benchmarks.tables import RESULTS

# fxround's format, and the integers of each peer that are nearest to it.
FORMATS: Final = {
    "int8:channel": ("qint8", ("int8", None)),
    "uint4:128": ("qint4", ("int4", 128)),
    "uint2:128": ("qint2", ("int2", 128)),
}
COLUMNS: Final = ("format", "", "seconds", "SQNR, dB", "equal to fxround's, %")
Make = Callable[[nn.Module], nn.Module]


def model() -> nn.Module:
    """Return the layers, in eval mode."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()


def peers(name: str) -> dict[str, Make]:
    """Return what each installed peer makes of a model for a format of fxround."""
    quanto_name, (dtype, group) = FORMATS[name]
    named: dict[str, Make] = {}
    try:
        vision_operators()
        from optimum import quanto
    except ImportError:
        pass
    else:

        def by_quanto(net: nn.Module) -> nn.Module:
            quanto.quantize(net, weights=getattr(quanto, quanto_name))
            quanto.freeze(net)
            return net

        named["optimum-quanto"] = by_quanto
    try:
        from torchao.quantization import IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerAxis, PerGroup
    except ImportError:
        return named

    def by_torchao(net: nn.Module) -> nn.Module:
        granularity = PerAxis(0) if group is None else PerGroup(group)
        quantize_(net, IntxWeightOnlyConfig(weight_dtype=getattr(torch, dtype), granularity=granularity))
        return net

    return {**named, "torchao": by_torchao}


def linear_weights(net: nn.Module) -> Tensor:
    """Return the weights of the feed-forward layers, one after the other: attention is no linear layer to the peers."""
    layers = [layer for name, layer in net.named_modules() if name.endswith(("linear1", "linear2"))]
    weights = [layer.weight for layer in layers]
    return torch.cat([getattr(w, "dequantize", lambda w=w: w)().detach().flatten() for w in weights])


def rows() -> list[list[str]]:
    """Return the rows of the table."""
    original, x = linear_weights(model()), torch.randn(16, 64, 256)
    made_rows: list[list[str]] = []
    for name in FORMATS:
        own = None
        makers: dict[str, Make] = {"fxround": lambda net, name=name: fxround.quantize_weights(net, name, x)}
        for who, make in {**makers, **peers(name)}.items():
            seconds = []
            for _ in range(3):
                net = model()
                started = time.process_time()
                made = make(net)
                seconds.append(time.process_time() - started)
            weights = linear_weights(made)
            own = weights if own is None else own
            sqnr = 10 * torch.log10(original.square().sum() / (weights - original).square().sum())
            equal = 100 * float((weights == own).double().mean())
            made_rows.append([name, who, f"{statistics.median(seconds):.3f}", f"{sqnr:.2f}", f"{equal:.1f}"])
    return made_rows


def main() -> None:
    """Print the table, or store it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the figures under benchmarks/results")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    made = rows()
    print(table(COLUMNS, made))
    if asked.write:
        page: dict[str, Any] = {
            "columns": list(COLUMNS),
            "numbers": [2, 3, 4],
            "rows": made,
            **conditions("python -m benchmarks.weights", where=", one thread"),
        }
        (RESULTS / "weights.json").write_text(json.dumps({"weights-peers": page}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
