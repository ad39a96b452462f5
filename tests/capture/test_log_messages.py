"""A model that logs is captured, and logs while it is: once for each capture."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import fxround

LOGGER = logging.getLogger("a model")


class Talking(nn.Module):
    """Logs a text, what only a call knows, and asks for the level; ``counts`` needs torch.compile."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.calls = counts, [0]

    def forward(self, x: Tensor) -> Tensor:
        LOGGER.warning("width %d of %s", 4, "four")
        LOGGER.warning(f"the sum is {x.sum()}")
        if self.counts:
            self.calls.append(1)
            self.calls.pop()
        return x * 3 if LOGGER.isEnabledFor(logging.WARNING) else x


@pytest.mark.parametrize("counts", [False, True])
def test_a_message_is_logged_when_a_model_is_captured(counts: bool, caplog: pytest.LogCaptureFixture) -> None:
    compiled = fxround.compile(Talking(counts).eval(), "reproducible")
    with torch.no_grad(), caplog.at_level("WARNING", logger=LOGGER.name):
        for rows in (3, 5, 7, 9):
            assert torch.equal(compiled(torch.ones(rows, 4)), torch.full((rows, 4), 3.0))
    found = [record.getMessage() for record in caplog.records if record.name == LOGGER.name]
    assert set(found) == {"width 4 of four"}
    # With a change of Python state, captures are given up before torch.compile traces the model.
    assert len(found) == (2 if counts else 1)


def test_traces_of_others_are_as_before() -> None:
    from torch._dynamo.exc import Unsupported

    with torch.no_grad():
        fxround.compile(Talking(counts=False).eval(), "reproducible")(torch.ones(2))
        with pytest.raises(Unsupported, match="logging"):
            torch.compile(Talking(counts=False).eval(), backend="eager", fullgraph=True)(torch.ones(2))
