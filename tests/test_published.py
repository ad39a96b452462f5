"""The tables of other projects in small: trainings hold their numbers, and the metric of detection is COCO's."""

from __future__ import annotations

import copy
import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fxround
from benchmarks.published import __main__ as command
from benchmarks.published import discquant, folders, fuzzy, pychop, qpytorch, repdl, residual
from benchmarks.published.scenes import CELLS, Scenes, boxes_of, kept, mean_average_precision
from benchmarks.tables import RESULTS
from fxround import demo
from fxround.training import compile_optimizer


def test_a_training_in_blocks_holds_its_weights_and_momenta_in_blocks() -> None:
    net, policy = nn.Linear(6, 3, bias=False), qpytorch.held("blocks", qpytorch.BLOCKS)
    optimizer = compile_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), policy, model=net)
    fxround.compile(net, policy)(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    for held in (net.weight, optimizer.state[net.weight]["momentum_buffer"]):
        assert torch.equal(held, fxround.round(held, qpytorch.BLOCKS.partition("/")[0]))


def test_the_rows_have_means_and_what_was_published() -> None:
    rows = qpytorch.rows({"half": [5.0, 6.0], "WAGE": [7.0]})
    assert rows == [["half", "5.50 ± 6.35", "5.0, 6.0", ""], ["WAGE", "7.00", "7.0", "6.96 (WAGE's network)"]]


def cells_of(scenes: Scenes, score: float) -> torch.Tensor:
    """What a detector says that finds each object, in its place and class, with this logit, and nothing else."""
    cells = torch.full((len(scenes.images), 15, CELLS, CELLS), -20.0)
    for i, objects in enumerate(scenes.objects):
        for left, top, width, height, kind in objects[objects[:, 4] >= 0].tolist():
            x, y = (left + width / 2) / 4, (top + height / 2) / 4
            place = cells[i, :, min(int(y), CELLS - 1), min(int(x), CELLS - 1)]
            boxes = torch.tensor([x - int(x), y - int(y), width / 16, height / 16]).clamp(1e-6, 1 - 1e-6)
            place[0], place[1:5], place[5:] = score, torch.logit(boxes), -20.0
            place[5 + int(kind)] = 20.0
    return cells


def test_the_metric_of_a_perfect_detector_is_1_and_falls_with_each_kind_of_error() -> None:
    scenes = Scenes.make(16, 1, test=True)
    cells = cells_of(scenes, 5.0)
    assert len(kept(boxes_of(cells[:1])[0])) == 10
    assert mean_average_precision(cells, scenes.objects) > 0.999
    # Of the ten overlaps, 12 to 14 pixels that are moved by one keep those up to 0.7 or so.
    moved = scenes.objects.clone()
    moved[..., 0] += (moved[..., 4] >= 0).float()
    assert 0.4 < mean_average_precision(cells, moved) < 0.8
    wrong = scenes.objects.clone()
    wrong[..., 4] = torch.where(wrong[..., 4] >= 0, (wrong[..., 4] + 1) % 10, -1.0)
    assert mean_average_precision(cells, wrong) < 0.02
    missed = cells.clone()
    missed[:8] = -20.0
    assert 0.3 < mean_average_precision(missed, scenes.objects) < 0.9
    assert mean_average_precision(torch.full_like(cells, float("nan")), scenes.objects) < 0.02


def test_the_digits_of_scenes_do_not_overlap_and_are_where_the_objects_say() -> None:
    scenes = Scenes.make(30, 0, test=False)
    assert all(
        torch.equal(a, b)
        for a, b in zip((scenes.images, scenes.objects), vars(Scenes.make(30, 0, False)).values(), strict=True)
    )
    for image, objects in zip(scenes.images[:, 0], scenes.objects, strict=True):
        inside = torch.zeros_like(image, dtype=torch.int32)
        for left, top, width, height, kind in objects[objects[:, 4] >= 0].int().tolist():
            assert 0 <= kind <= 9
            inside[top : top + height, left : left + width] += 1
        assert inside.max() == 1 and image[inside == 0].max() <= 0.2


def test_the_initial_weights_are_repdl_s() -> None:
    assert repdl.hash_of(repdl.network().parameters()) == repdl.PUBLISHED[0]


def test_files_of_mnist_are_read(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (5, 28, 28), generator=generator, dtype=torch.uint8)
    labels = torch.tensor([3, 1, 4, 1, 5], dtype=torch.uint8)
    for part in ("train", "t10k"):
        for name, x in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            head = bytes([0, 0, 8, x.dim()]) + b"".join(n.to_bytes(4, "big") for n in x.shape)
            data = head + x.numpy().tobytes()
            packed = part == "t10k"
            (tmp_path / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(data) if packed else data)
    for read in folders.images(tmp_path):
        pixels, digits = read.tensors
        assert torch.equal((pixels * 255).round(), images[:, None].float()) and torch.equal(digits, labels.long())
    with pytest.raises(FileNotFoundError, match=r"has no images; expected train-images-idx3-ubyte and the other three"):
        folders.images(tmp_path / "nothing")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no file t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte\.gz"):
        folders.images(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"PK\x03\x04")
    with pytest.raises(ValueError, match=r"is no file of unsigned bytes in the format IDX: it begins with b'PK"):
        folders.images(tmp_path)


def test_batches_of_cifar10_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    batches = {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batches[name] = rng.integers(0, 256, (3, 3072), np.uint8), rng.integers(0, 10, 3).tolist()
        (tmp_path / name).write_bytes(pickle.dumps({b"data": batches[name][0], b"labels": batches[name][1]}))
    train, test = folders.images(tmp_path)
    pixels, labels = train.tensors
    assert pixels.shape == (15, 3, 32, 32) and len(test) == 3
    # The rows of a channel follow one another, and the channels too.
    assert pixels[4, 2, 5, 7] == float(
        np.float32(batches["data_batch_2"][0][1, 2 * 1024 + 5 * 32 + 7]) / np.float32(255)
    )
    assert labels.tolist() == [y for name in list(batches)[:5] for y in batches[name][1]]


def _pictures(folder: Path) -> None:
    for part, classes in (("train", ("cat", "dog")), ("val", ("dog",))):
        for kind in classes:
            (folder / part / kind).mkdir(parents=True)
            for i in range(2):
                color = (255, 51 * i, 0) if kind == "cat" else (0, 0, 255)
                Image.new("RGB", (80, 70), color).save(folder / part / kind / f"{i}.png")


def test_pictures_by_class_are_read(tmp_path: Path) -> None:
    _pictures(tmp_path)
    train, test = folders.images(tmp_path)
    assert train.tensors[0].shape == (4, 3, folders.SIDE, folders.SIDE) and train.tensors[1].tolist() == [0, 0, 1, 1]
    assert train.tensors[0][1, :, 3, 4].tolist() == [1.0, float(np.float32(51) / np.float32(255)), 0.0]
    assert test.tensors[1].tolist() == [1, 1]
    (tmp_path / "val" / "bird").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "val" / "bird" / "a.png")
    with pytest.raises(ValueError, match=r"bird is a class that is not under train: cat, dog"):
        folders.images(tmp_path)


def test_the_tables_take_images_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _pictures(tmp_path)
    monkeypatch.setattr(qpytorch, "EPOCHS", 1)
    monkeypatch.setattr(residual, "EPOCHS", 1)
    monkeypatch.setattr(residual, "BLOCKS", 1)
    monkeypatch.setattr(pychop, "MODES", ("nearest_even",))
    train, test = qpytorch.images_of(tmp_path)
    net, tested = qpytorch.trained(qpytorch.SCHEMES["half"], train, 0, epochs=1)
    assert net.conv1.weight.shape[1] == 3 and 0 <= qpytorch.error_of(tested, test) <= 100
    (made,) = [*pychop.tables(1, folder=tmp_path)]
    page = made["published-pychop-residual"]
    assert page["columns"][0] == f"residual network on {tmp_path.name}: accuracy, %" and len(page["rows"]) == 16


def test_the_mask_of_a_scene_is_the_bright_part_of_its_digits() -> None:
    scenes = Scenes.make(5, 3, test=True)
    mask = fuzzy.masks(scenes)
    assert torch.equal(mask.bool(), scenes.images > 0.2) and 0.02 < float(mask.mean()) < 0.5
    assert fuzzy.UNet().eval()(scenes.images).shape == mask.shape


def test_norms_are_fused_into_convolutions() -> None:
    torch.manual_seed(0)
    model, x = demo.DigitsCNN(), torch.rand(4, 1, 8, 8)
    model(x)
    wanted = copy.deepcopy(model).double().eval()(x.double())
    fused = pychop.fused(model)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in fused.modules())
    # Six operations of relative error 2^-24 and sums of at most 144 products, of numbers below 1.
    assert (fused.double()(x.double()) - wanted).abs().max() < 1e-5


def test_the_command_offers_the_models_that_there_are() -> None:
    assert tuple(pychop.STUDIES) == command.MODELS
    tables = json.loads((RESULTS / "published_pychop.json").read_text(encoding="utf-8"))
    for name, study in pychop.STUDIES.items():
        rows = {row[0]: row[1:] for row in tables[f"published-pychop-{name}"]["rows"]}
        for form, figures in study.published.items():
            digits = 1 if max(figures) > 1 else 3
            assert rows[f"{form}, published"] == [f"{figure:.{digits}f}" for figure in figures]
            # What the page says: nearest keeps what a directed mode loses, and 8 bits upward the most.
            assert float(rows[f"{form}, weights"][0]) > float(rows["q52, weights"][1])


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"has no discq\.py; expected a clone of github"),
        discquant.programs(tmp_path),
    ):
        pass


def test_rows_of_several_runs_have_the_least_and_the_largest_figure() -> None:
    runs = [(4.0, 0.1, 90.0, 7.0), (5.0, 0.2, 91.0, 8.4)]
    assert discquant.row(2, "GPTQ, authors'", runs[:1]) == ["2", "GPTQ, authors'", "4.000", "0.1000", "90.0", "7"]
    assert discquant.row(2, "DiscQuant", runs)[2:] == [
        "4.500 (4.000 to 5.000)",
        "0.1500 (0.1000 to 0.2000)",
        "90.5 (90.0 to 91.0)",
        "8 (7 to 8)",
    ]


def test_the_layers_that_both_programs_round_are_those_of_the_policy() -> None:
    """One step of ours changes these weights and no others, and nearest gives both the same ones."""
    model = discquant.trained(steps=1)
    data = discquant.texts()[0][:4]
    small = discquant.ours(model, data, 3, "nearest")
    names = {f"{name}.weight" for name in discquant.rounded_layers(model)}
    state = model.state_dict()
    changed = {name for name, value in small.state_dict().items() if not torch.equal(value, state[name])}
    assert changed == names and len(names) == 8
    assert discquant.equal_weights(small, small) == 100.0
    assert discquant.equal_weights(small, model) < 50
