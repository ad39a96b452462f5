"""``fxround.perplexity``: the perplexity of a language model per width of significands, place and mode.

A model is captured once. Each combination of a place, a width and a mode is a policy of its own, under which the whole
text is read: once in a mode that draws nothing, several times in one that does. Logits are rounded by the policy; their
log-likelihoods are computed in binary64. The same arguments and seed give the same figures with any number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from fxround.compiler.signature import require_module, signature_of
from fxround.errors import shown
from fxround.graph.dtypes import FORMAT_OF
from fxround.module import compile
from fxround.module.rounded_module import PolicyLike, RoundedModule
from fxround.numerics.formats import Format
from fxround.numerics.modes import Rounding
from fxround.policy import Policy, Rule
from fxround.runtime.draw import Draw
from fxround.significance.bits import CONFIDENCE, require
from fxround.significance.inputs import ModelCall, calls
from fxround.significance.metrics import METRICS, Sums
from fxround.significance.observed import sample_number
from fxround.significance.perplexity_report import Perplexity, PerplexityReport
from fxround.significance.progress import progress as shown_progress
from fxround.significance.provenance import provenance
from fxround.significance.stopping import interruptible

EVERYTHING: Final = "everything"
MODES: Final = ("nearest_even", "stochastic")
# What modules are called in transformers' models, by the part of the path after the last dot.
NAMES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "attention": frozenset({"attn", "self_attn", "attention", "self_attention"}),
        "mlp": frozenset({"mlp", "feed_forward", "ffn", "block_sparse_moe"}),
        "head": frozenset({"lm_head", "head", "embed_out", "output_projection"}),
    }
)

Sites = Mapping[str, str | Sequence[str]]


def perplexity(
    model: nn.Module,
    inputs: Any,
    widths: Iterable[int] | None = None,
    samples: int = 10,
    *,
    sites: Sites | None = None,
    modes: Sequence[str] = MODES,
    accumulate: str | None = None,
    rest: PolicyLike = "reproducible",
    batch_size: int | None = None,
    seed: int = 0,
    confidence: float = CONFIDENCE,
    progress: bool | None = None,
) -> PerplexityReport:
    """Measure the perplexity of a causal language model whose operations have significands of p bits.

    Each operation of a site, and each step of its accumulators, is rounded to p bits with the exponents of the model's
    dtype (``"ieee(8,p)"`` for float32); weights and everything outside of the site keep their bits. Perplexity is exp
    of the mean negative log-likelihood of a token, in nats, computed in binary64 from the logits.

    Args:
        model: a causal language model in eval mode that returns logits [n, time, vocabulary], by themselves or as
            ``logits``. It is not changed. If its ``forward`` takes ``use_cache``, it is called without a cache.
        inputs: integer tokens [n, time], or what ``variability`` takes. ``labels`` (-100: no token) are the tokens
            that are predicted if they are given, ``attention_mask`` leaves out padding.
        widths: the numbers of bits p, the leading one included, from 2; None takes 2 to that of the model's dtype.
        samples: runs of the text in a mode that draws random bits, at least 2; other modes run once.
        sites: names and their globs over module paths, one or several, such as ``{"first": "transformer.h.0"}``; None
            takes ``"everything"``, and ``"attention"``, ``"mlp"`` and ``"head"`` of modules that are called so.
        modes: names of rounding modes.
        accumulate: the rounding of each step of an accumulator, such as ``"wide"``; None rounds it as the results.
        rest: the policy of everything outside of a site.
        batch_size: splits tensors into batches of this many rows; None takes them whole.
        seed: 0 to 2^63 - 1, the seed of all random bits.
        confidence: of the interval of a mean over samples, between 0 and 1.
        progress: whether to show progress; None shows it in a terminal or a notebook.

    Returns:
        A ``PerplexityReport``. Ctrl-C ends the measurement and returns the report of what is complete so far.

    Raises:
        TypeError, ValueError: for wrong arguments; also what ``compile`` and the model raise, such as PolicyError for a
            site that matches no operation.
        ImportError: without scipy, which the extra ``report`` installs.

    Example::

        report = fxround.perplexity(model, tokens, widths=(4, 8, 12), samples=5)
        print(report)
        report.to_pandas()

    Source: the interval is Student's t, of samples whose perplexities are taken as independent and normal. Operations
    of a chosen width are those of Verificarlo's VPREC backend: Chatelain, Petit, de Oliveira Castro, Lartigue, Defour,
    Automatic exploration of reduced floating-point representations in iterative methods, Euro-Par 2019.
    """
    _require(model, samples, confidence, seed)
    fmt = _format(model)
    _require_collections(widths, modes, sites)
    modes = tuple(modes)
    if not modes:
        raise ValueError("modes has nothing; expected names of rounding modes, such as 'nearest_even'")
    chosen = tuple(range(2, fmt.precision + 1)) if widths is None else tuple(widths)
    _require_widths(chosen, fmt)
    places = sites_of(model) if sites is None else {name: _patterns(name, globs) for name, globs in sites.items()}
    roundings = [(width, Rounding.parse(f"{_narrowed(fmt, width)}/{mode}")) for mode in modes for width in chosen]
    base = Policy.parse(rest)
    started = time.perf_counter()
    texts = [_without_cache(model, call) for call in calls(model, inputs, batch_size)]
    rounded = compile(model, base, seed=seed)
    perplexities: list[Perplexity] = []
    runs = {rounding: samples if rounding.mode.random_bits else 1 for _, rounding in roundings}
    total = 1 + len(places) * sum(runs[rounding] for _, rounding in roundings)
    with shown_progress("perplexity", total, progress) as tick, interruptible() as stopping:
        baseline = _read(rounded, texts, 0, stopping)
        tick()
        for (site, globs), (width, rounding) in product(places.items(), roundings):
            if stopping():
                break
            narrow = rounded.with_policy(_policy(base, globs, rounding, accumulate))
            values = []
            for sample in range(runs[rounding]):
                value = _read(narrow, texts, sample, stopping)
                if value is None:
                    break
                values.append(value)
                tick()
            if values:
                perplexities.append(Perplexity(site, width, str(rounding.mode), tuple(values), confidence))
        complete = not stopping()
    facts = provenance(model, base, seed, 1, time.perf_counter() - started, {})
    return PerplexityReport(
        baseline=baseline,
        rest=base,
        sites=MappingProxyType(places),
        accumulate=accumulate,
        samples=samples,
        confidence=confidence,
        seed=seed,
        complete=complete,
        rows=sum(call.rows for call in texts),
        figures=tuple(perplexities),
        provenance=facts,
    )


def sites_of(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the default sites of a model, with their globs: everything, and the kinds of ``NAMES`` that it has."""
    paths = [path for path, _ in model.named_modules() if path]
    sites: dict[str, tuple[str, ...]] = {EVERYTHING: ("*",)}
    for site, names in NAMES.items():
        here = [path for path in paths if path.rpartition(".")[2] in names]
        globs = {f"*.{path.rpartition('.')[2]}" if "." in path else path for path in here}
        if globs:
            sites[site] = tuple(sorted(globs))
    return sites


def _policy(base: Policy, globs: Sequence[str], rounding: Rounding, accumulate: str | None) -> Policy:
    steps = str(rounding) if accumulate is None else accumulate
    rules = (Rule(glob, rounding=str(rounding), accumulate=steps) for glob in globs)
    return base.with_rules(*rules, name=f"{base.name}, {' '.join(globs)}: {rounding}")


def _read(model: RoundedModule, texts: Sequence[ModelCall], sample: int, stopping: Callable[[], bool]) -> float | None:
    """Return the perplexity of one sample of the whole text; None if it was interrupted."""
    metric, sums = METRICS["perplexity"], None
    for batch, call in enumerate(texts):
        if stopping():
            return None
        model.reseed(int(model.rng[0]), sample=sample_number(batch, sample))
        result = model.evaluate(*call.args, **call.kwargs)
        part: Sums = metric.measure(result, result, call)
        sums = metric.added(sums, part)
    if sums is not None and not sums[1]:
        raise ValueError("no text has two tokens that count, so that nothing is predicted: expected longer texts")
    return None if sums is None else metric.finish(sums)


def _without_cache(model: nn.Module, call: ModelCall) -> ModelCall:
    if "use_cache" in call.kwargs or "use_cache" not in signature_of(model.forward).parameters:
        return call
    return replace(call, kwargs={**call.kwargs, "use_cache": False})


def _format(model: nn.Module) -> Format:
    """Return the format of the model's parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.get_default_dtype()}
    if len(dtypes) > 1 or not dtypes <= FORMAT_OF.keys():
        names = ", ".join(sorted(map(str, dtypes)))
        raise TypeError(f"the parameters have the dtypes {names}; expected one floating-point dtype, as model.float()")
    return Format.parse(FORMAT_OF[dtypes.pop()])


def _narrowed(fmt: Format, width: int) -> Format:
    """Return the format of ``width`` bits of significand with the exponents of another."""
    exponent_bits = (fmt.emax + 1).bit_length()
    return Format.ieee(exponent_bits=exponent_bits, precision=width)


def _patterns(name: Any, globs: Any) -> tuple[str, ...]:
    several = (globs,) if isinstance(globs, str) or not isinstance(globs, Iterable) else tuple(globs)
    if not isinstance(name, str) or not several or not all(isinstance(glob, str) for glob in several):
        raise TypeError(f"sites has {shown(name)}: {shown(globs)}; expected a name and globs over module paths")
    return several


def _require_collections(widths: Any, modes: Any, sites: Any) -> None:
    if widths is not None and not isinstance(widths, Iterable):
        raise TypeError(f"widths is {shown(widths)}; expected several whole numbers, such as (4, 8, 12)")
    if isinstance(modes, str) or not isinstance(modes, Iterable):
        raise TypeError(f"modes is {shown(modes)}; expected several modes, such as ('nearest_even', 'stochastic')")
    if sites is not None and (not isinstance(sites, Mapping) or not sites):
        raise TypeError(f"sites is {shown(sites)}; expected a dict of names and globs over module paths, or None")


def _require_widths(widths: Sequence[Any], fmt: Format) -> None:
    wrong = [w for w in widths if isinstance(w, bool) or not isinstance(w, int) or not 2 <= w <= fmt.precision]
    if wrong or not widths:
        raise ValueError(f"widths has {wrong or 'nothing'}; expected whole numbers from 2 to {fmt.precision}, {fmt}'s")


def _require(model: nn.Module, samples: Any, confidence: float, seed: int) -> None:
    """Raise for arguments with which nothing can be measured."""
    Draw(seed)
    require("scipy.special", "report")
    require_module(model)
    if model.training:
        raise ValueError("the model is in training mode, where dropout is random: call model.eval() first")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} has an encoder; expected a causal model, which predicts its input")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise ValueError(f"samples is {shown(samples)}; expected a whole number of at least 2, which an interval needs")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; expected more than 0 and less than 1")
