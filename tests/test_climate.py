"""The benchmark of climates: a file that is resumed, and the picture of the stored figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import climate


def test_a_run_keeps_each_distance_and_resumes(tmp_path: Path) -> None:
    model = replace(climate.MODELS["lorenz63"], spin_up=3, keep=2, samples=4, bits=(5, 12))
    path = tmp_path / "climate.json"
    climate.run("lorenz63", model, climate.Results(path), "command")
    (table,) = json.loads(path.read_text()).values()
    assert [row[0] for row in table["rows"]] == [climate.REFERENCE, "5", "12"]
    assert all(float(cell) >= 0 for row in table["rows"] for cell in row[1:])
    assert float(table["rows"][2][1]) < float(table["rows"][1][1])
    # What is there is not computed again, and what is missing alone is.
    with mock.patch.object(climate, "ensemble", side_effect=AssertionError):
        climate.run("lorenz63", model, climate.Results(path), "command")
    kept = table["rows"][1][1:]
    table["rows"][1][1:] = ["", "", ""]
    path.write_text(json.dumps({"climate: Lorenz 63": table}))
    ran: list[Any] = []
    ensemble = climate.ensemble
    with mock.patch.object(climate, "ensemble", side_effect=lambda *args: ran.append(args[1:]) or ensemble(*args)):
        climate.run("lorenz63", model, climate.Results(path), "command")
    assert ran == [("identity", 0), ("sbits(5)", 0), ("sbits(5)/stochastic", 0)]
    (again,) = json.loads(path.read_text()).values()
    assert again["rows"][1][1:3] == kept[:2]


def test_members_draw_bits_of_their_own() -> None:
    begin = torch.linspace(1, 8, 40, dtype=torch.float64)
    model = replace(climate.MODELS["lorenz96"], begin=begin, spread=0.0, spin_up=1, keep=1, samples=1)
    samples = climate.ensemble(model, "sbits(5)/stochastic", 0)
    assert samples.shape == (climate.MEMBERS, 40) and len(torch.unique(samples, dim=0)) == climate.MEMBERS


def test_the_picture_is_that_of_the_results() -> None:
    stored = json.loads(climate.RESULTS.read_text(encoding="utf-8"))
    assert climate.PICTURE.read_text(encoding="utf-8") == climate.picture(stored)
