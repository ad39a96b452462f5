"""Random modules have the same bits by every entry point and in a training step, with compiled kernels."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_judge import as_if_large
from random_modules import MODULES, Drawn, Steps, judge_module
from random_reference import quickly


# A module takes seconds, and a minimal one minutes: what fails is shown as it was drawn. .ci/run draws four more.
@settings(max_examples=2, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(steps=MODULES, policy=st.sampled_from(("reproducible", "stochastic", "up_down", "bfloat16")))
def test_every_entrance_gives_a_module_the_same_bits(tmp_path: Path, steps: Steps, policy: str) -> None:
    with quickly(graphs=False), as_if_large():
        judge_module(Drawn(steps, 2), policy, tmp_path)
