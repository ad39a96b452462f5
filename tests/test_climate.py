"""The benchmark of climates: a file that is resumed, and the picture of the stored figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import climate


def test_a_run_keeps_each_distance_and_resumes(tmp_path: Path) -> None:
    model = replace(climate.MODELS["lorenz63"], spin_up=3, keep=20, samples=4, bits=(5, 12))
    path = tmp_path / "climate.json"
    climate.run(model, climate.Results(path), "command")
    stored = json.loads(path.read_text())
    table = stored["climate: Lorenz 63"]
    (described,) = stored["climate: models"]["rows"]
    assert described[-1] == table["rows"][0][1] and float(described[-2]) <= float(described[-1])
    assert [row[0] for row in table["rows"]] == [climate.REFERENCE, "5", "12"]
    assert all(float(cell) >= 0 for row in table["rows"] for cell in row[1:])
    # What is there is not computed again, and what is missing alone is.
    with mock.patch.object(climate, "ensemble", side_effect=AssertionError):
        climate.run(model, climate.Results(path), "command")
    kept = table["rows"][1][1:]
    table["rows"][1][1:] = ["", "", ""]
    path.write_text(json.dumps(stored))
    ran: list[Any] = []
    ensemble = climate.ensemble
    with mock.patch.object(climate, "ensemble", side_effect=lambda *args: ran.append(args[1:]) or ensemble(*args)):
        climate.run(model, climate.Results(path), "command")
    numbers = [climate.number_of(5, mode) for mode in climate.MODES]
    assert ran == [("identity", 0), ("sbits(5)", numbers[0]), ("sbits(5)/stochastic", numbers[1])]
    again = json.loads(path.read_text())["climate: Lorenz 63"]
    assert again["rows"][1][1:3] == kept[:2]


def test_members_draw_bits_of_their_own() -> None:
    begin = torch.linspace(1, 8, 40, dtype=torch.float64)
    model = replace(climate.MODELS["lorenz96"], begin=begin, spread=0.0, spin_up=1, keep=1, samples=1)
    samples = climate.ensemble(model, "sbits(5)/stochastic", 0)
    assert samples.shape == (1, climate.MEMBERS, 40) and len(torch.unique(samples, dim=1)[0]) == climate.MEMBERS


def test_ensembles_share_no_number() -> None:
    others = [*range(1 + climate.OTHERS), *(climate.number_of(t, m) for t in range(1, 53) for m in climate.MODES)]
    assert len(set(others)) == len(others)


def test_the_decorrelation_is_that_of_a_known_oscillation() -> None:
    # A member turns by 2 pi / 100 a step from a phase of its own: the correlation over n steps is cos(2 pi n / 100).
    # It is below 1/e in magnitude from 20 steps on, and again above it from 31 on, which the last of 40 steps is too.
    c, s = math.cos(2 * math.pi / 100), math.sin(2 * math.pi / 100)

    def turn(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([c * x[..., 0] - s * x[..., 1], s * x[..., 0] + c * x[..., 1]], -1)

    begin = torch.zeros(2, dtype=torch.float64)
    model = replace(climate.MODELS["lorenz63"], step=turn, dt=0.5, begin=begin, spin_up=1, keep=15)
    assert climate.decorrelation(model) == 20 * 0.5
    assert climate.decorrelation(replace(model, keep=20)) == (40 + 2) * 0.5


def test_shallow_water_keeps_its_volume() -> None:
    state = torch.randn(3, 3, climate.POINTS, climate.POINTS, generator=torch.Generator().manual_seed(0)).double() / 8
    derivative = climate.shallow_water(state).numpy()
    # The flows through the faces of cells cancel, but for the roundings of 256 numbers below 8 in binary64.
    assert max(abs(math.fsum(member.ravel())) for member in derivative[:, 2]) < 256 * 8 * 2**-50
    # A member has the same numbers alone.
    assert torch.equal(climate.shallow_water(state[1]), torch.from_numpy(derivative[1]))


def test_the_picture_is_that_of_the_results() -> None:
    stored = json.loads(climate.RESULTS.read_text(encoding="utf-8"))
    assert climate.PICTURE.read_text(encoding="utf-8") == climate.picture(stored)
