"""Changes that a model's code makes in Python are made with the rounded values, or refused by name."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import state_changes
import torch
from torch import Tensor, nn

import fxround
from fxround.capture import dynamo
from fxround.errors import CaptureError

ROUNDED = "bfloat16"  # far from what stock kernels give: a value of another graph would be seen
TABLE = torch.ones(3)


class Stateful(nn.Module):
    """A layer, and Python state of every common kind."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.n = 0
        self.state = torch.ones(3)
        self.memory: list[Tensor] = []
        self.first: Tensor | None = None

    def forward(self, x: Tensor, cache: dict[str, Tensor], trace: list[Tensor]) -> Tensor:
        y = self.fc(x) + self.state
        cache["k"] = torch.cat([cache["k"], y])
        trace.append(y)
        self.n += 1
        self.state = torch.tanh(y).sum(0)
        self.memory.append(y.sum())
        if self.first is None:
            self.first = y.amax(0)
        self.seen.add_(1)
        return y * self.n + self.first


def reference(model: Stateful, x: Tensor, cache: dict[str, Tensor], trace: list[Tensor]) -> Tensor:
    """The same call, by a compiled function of tensors alone, and Python's own statements."""
    key = (model.n, model.first is None)
    if key not in FUNCTIONS:
        n = model.n + 1

        def pure(x: Tensor, w: Tensor, b: Tensor, state: Tensor, k: Tensor, first: Tensor | None) -> Any:
            y = torch.nn.functional.linear(x, w, b) + state
            if first is None:
                first = y.amax(0)
            return y, torch.cat([k, y]), torch.tanh(y).sum(0), y.sum(), first, y * n + first

        FUNCTIONS[key] = fxround.compile(pure, ROUNDED)
    arguments = (x, model.fc.weight, model.fc.bias, model.state, cache["k"], model.first)
    y, cache["k"], model.state, total, model.first, result = FUNCTIONS[key](*arguments)
    trace.append(y)
    model.memory.append(total)
    model.n += 1
    model.seen.add_(1)
    return result


FUNCTIONS: dict[Any, Any] = {}


def compared(left: Any, right: Any) -> None:
    """Whether two structures of tensors are equal, bit for bit."""
    assert type(left) is type(right)
    if isinstance(left, Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            compared(a, b)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        compared(list(left.values()), list(right.values()))
    else:
        assert left == right


def test_everything_that_a_call_changes_is_changed_with_the_rounded_values() -> None:
    torch.manual_seed(0)
    model = Stateful().eval()
    twin = copy.deepcopy(model)
    compiled = fxround.compile(model, ROUNDED)
    held = dict(model.named_parameters())
    ours, theirs = ({"k": torch.zeros(1, 3)}, []), ({"k": torch.zeros(1, 3)}, [])
    with torch.no_grad():
        for _ in range(3):
            x = torch.rand(4, 3)
            compared(compiled(x, *ours), reference(twin, x, *theirs))
            compared(list(ours), list(theirs))
            for name in ("n", "state", "memory", "first", "seen"):
                compared(getattr(model, name), getattr(twin, name))
        model.n = twin.n = 0  # what the model reads from Python is asked again
        compared(compiled(x, *ours), reference(twin, x, *theirs))
    assert all(held[name] is tensor for name, tensor in model.named_parameters())
    assert not compiled.coverage().unrounded


def test_what_cannot_be_replayed_is_refused_with_name_and_line() -> None:
    model = Stateful().eval()
    compiled = fxround.compile(model, ROUNDED)
    arguments: Any = (torch.rand(4, 3), {"k": torch.zeros(1, 3)}, [])
    compiled.prepare(*arguments)
    assert (model.n, arguments[2], arguments[1]["k"].shape) == (0, [], (1, 3))
    assert "tanh" in str(compiled.summary())
    for refused in (lambda: list(compiled.observe(*arguments)), lambda: compiled.evaluate(*arguments)):
        with pytest.raises(CaptureError) as told:
            refused()
        for said in (
            "changes cache (dict)",
            'cache["k"] = torch.cat',
            "changes trace (list)",
            "test_replay.py:",
            "self",
        ):
            assert said in str(told.value)


class Reader(nn.Module):
    """Reads tensors that are neither state nor arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.offset + TABLE


def test_a_tensor_that_is_no_buffer_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Reader()
    compiled = fxround.compile(model, "reproducible")
    x = torch.rand(4, 3)
    assert torch.equal(compiled(x), x * 2 + 1 + 1)
    model.offset.add_(1)
    assert torch.equal(compiled(x), x * 2 + 2 + 1)
    model.offset = torch.full((3,), 5.0)
    assert torch.equal(compiled(x), x * 2 + 5 + 1)
    monkeypatch.setitem(globals(), "TABLE", torch.zeros(3))
    assert torch.equal(compiled(x), x * 2 + 5)
    assert torch.equal(list(compiled.observe(x))[-1][1], x * 2 + 5)


class Settings:
    """An argument that no key can name."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.bias = torch.ones(3)


def test_objects_and_arrays_among_the_arguments_are_read_again() -> None:
    compiled = fxround.compile(lambda x, s, a: x * s.scale + s.bias + torch.from_numpy(a), "reproducible")
    x, settings, array = torch.rand(4, 3), Settings(), np.ones(3, np.float32)
    assert torch.equal(compiled(x, settings, array), x * 2 + 1 + 1)
    settings.scale, settings.bias = 4.0, torch.zeros(3)
    array[:] = 0.5
    assert torch.equal(compiled(x, settings, array), x * 4 + 0 + 0.5)


class Counting(nn.Module):
    """Counts its calls while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.calls: list[int] = []

    def forward(self, x: Tensor, keep: bool = True) -> Tensor:
        y = self.fc(x)
        if keep:
            self.calls.append(len(self.calls))
        return y


def test_training_a_model_that_counts_has_the_bits_of_one_that_does_not() -> None:
    torch.manual_seed(0)
    counting = fxround.compile(Counting(), "stochastic", seed=3)
    plain = fxround.compile(copy.deepcopy(counting.source), "stochastic", seed=3)
    x = torch.rand(4, 3)
    for _ in range(2):
        for module, arguments in ((counting, {}), (plain, {"keep": False})):
            module.zero_grad()
            module(x, **arguments).square().sum().backward()
        assert torch.equal(counting.fc.weight.grad, plain.fc.weight.grad)
        assert torch.equal(counting.rng, plain.rng)
    assert (counting.source.calls, plain.source.calls) == ([0, 1], [])


def test_a_replay_that_is_switched_off_is_an_error() -> None:
    compiled = fxround.compile(Counting().eval(), "reproducible")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), pytest.raises(CaptureError, match="switched off"):
        compiled(torch.rand(4, 3))


class Flag:
    """As transformers' collector of outputs: set during a call, and reset before it returns."""

    def __init__(self) -> None:
        self.active: Tensor | None = None
        self.on = False


FLAG = Flag()


class Flagging(nn.Module):
    """Changes a global object of the file, and restores it before it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        FLAG.active, FLAG.on = x, True
        y = self.fc(x) * (2 if FLAG.on else 3)
        FLAG.active, FLAG.on = None, False
        return y


def test_what_a_call_sets_and_resets_is_no_change_while_it_is_so() -> None:
    model, x = Flagging().eval(), torch.randn(2, 3)
    compiled = fxround.compile(model, "reproducible")
    with torch.no_grad():
        expected = compiled(x)
        assert torch.equal(compiled.evaluate(x), expected) and torch.equal(compiled(x[1:]), expected[1:])
        # A tolerance: stock kernels add in another order than the declared one.
        torch.testing.assert_close(expected, model(x))
        # From another value there is something to change: a call changes it.
        FLAG.on = True
        assert torch.equal(compiled(x), expected)
    assert FLAG.on is False and FLAG.active is None


class Box:
    """An object that is not a pytree, like the caches of transformers."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


def test_an_object_that_the_model_makes_is_returned_with_the_rounded_values() -> None:
    class Boxing(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Box]:
            box = Box()
            box.kept.append(x / 3)
            return x + 1, box

    x = torch.arange(12.0).reshape(4, 3) / 16
    compiled = fxround.compile(Boxing(), "bfloat16")
    for _ in range(2):
        result, box = compiled(x)
        assert isinstance(box, Box) and torch.equal(result, fxround.round(x + 1, "bfloat16"))
        assert torch.equal(box.kept[0], fxround.round(x.double() / 3, "bfloat16").float())
    with pytest.raises(CaptureError, match=r"(?s)returns .*Box.* \(result\).*use_cache=False"):
        next(iter(compiled.observe(x)))


def test_models_of_the_same_code_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """More graphs in a process than one model may have; a model that has too many is refused."""

    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kind = "a"
            self.calls: list[str] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(self.kind)
            return x * 3

    monkeypatch.setattr(dynamo, "GRAPHS", 2)
    compiled = [fxround.compile(Numbered(), ROUNDED) for _ in range(3)]
    for kind in "ab":
        for module in compiled:
            module.source.kind = kind
            assert torch.equal(module(torch.ones(2)), torch.full((2,), 3.0))
    assert [len(module.captures()) for module in compiled] == [2, 2, 2]
    compiled[0].source.kind = "c"
    with pytest.raises(CaptureError, match="Numbered has 2 graphs already"):
        compiled[0](torch.ones(2))


class Stepping(nn.Module):
    """A layer whose result depends on the number of its calls."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.fc, self.use, self.step = nn.Linear(3, 3), use, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        result: Tensor = self.use(self.fc(x), self.step)
        return result


@pytest.mark.part(5)
@pytest.mark.parametrize("policy", ["bfloat16", "stochastic"])
@pytest.mark.parametrize(
    "use, graphs",
    [
        (lambda y, step: y, 1),
        (lambda y, step: y * step, 1),
        (lambda y, step: y * 0.5**step, 1),
        (lambda y, step: y + torch.full((3,), float(step)), 1),
        (lambda y, step: y.tanh() if step % 2 == 0 else y, 2),
        (lambda y, step: y[:, : step % 3 + 1], 3),
    ],
    ids=["unread", "factor", "decay", "tensor", "branch", "size"],
)
def test_a_counter_of_calls_needs_no_graph_for_each_value(use: Any, graphs: int, policy: str) -> None:
    model, x = Stepping(use).eval(), torch.randn(2, 3)
    compiled = fxround.compile(model, policy, seed=1)
    for step in (1, 2, 3, 4, 5, 6, 2**24 + 1, 2**53 + 1):
        model.step = step - 1
        constant = step
        expected = fxround.compile(lambda x: use(model.fc(x), constant), policy, seed=1)(x)  # noqa: B023
        assert torch.equal(compiled.reseed(1)(x), expected) and model.step == step, step
    assert len(compiled.captures()) <= graphs


def test_only_numbers_that_change_are_symbols() -> None:
    heads: Any = lambda y, gain, step: y.reshape(-1, model.heads).sum(1) * gain * step  # noqa: E731
    model, x = Stepping(lambda y, step: heads(y, model.gain, step)).eval(), torch.randn(4, 3)
    model.heads, model.gain, compiled = 3, 2, fxround.compile(model, ROUNDED)
    for gain, graphs in ((2, 1), (5, 2), (7, 2)):
        model.gain, step = gain, model.step + 1
        expected = fxround.compile(lambda x: heads(model.fc(x), gain, step), ROUNDED)(x)  # noqa: B023
        assert torch.equal(compiled(x), expected) and len(compiled.captures()) == graphs, gain
    # A size that is a quotient of symbols would need conditions.
    assert [(row["arguments"], row["conditions"]) for row in compiled.captures()] == [("float32[a, 3]", "")] * 2


def test_a_number_that_cannot_be_a_symbol_makes_a_graph_for_each_value() -> None:
    model, x = Stepping(lambda y, step: y.abs() ** model.power * step).eval(), torch.randn(4, 3)
    model.power, compiled = 2, fxround.compile(model, ROUNDED)
    for power, graphs in ((2, 1), (3, 2), (2, 2), (0, 3)):
        model.power, step = power, model.step + 1
        expected = fxround.compile(lambda x: model.fc(x).abs() ** power * step, ROUNDED)(x)  # noqa: B023
        assert torch.equal(compiled(x), expected) and len(compiled.captures()) == graphs, power


def test_a_counter_of_calls_in_training() -> None:
    model, x = Stepping(lambda y, step: y * 0.5**step), torch.randn(2, 3)
    compiled = fxround.compile(model, "bfloat16")
    gradients = []
    for _ in range(3):
        model.zero_grad()
        compiled(x).sum().backward()
        assert model.fc.bias.grad is not None
        gradients.append(model.fc.bias.grad.clone())
    assert torch.equal(gradients[0], 2 * gradients[1]) and torch.equal(gradients[1], 2 * gradients[2])
    assert len(compiled.captures()) == 1 and model.step == 3


class LayerOutside(nn.Module):
    """A count, which is left to Python, and a layer that the model does not register."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.n = [nn.Linear(3, 3)], 0

    def forward(self, x: Tensor) -> Tensor:
        self.n = min(self.n + 1, 3)
        result: Tensor = self.layers[0](x)
        return result * self.n


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_first_hook_on_a_layer_outside_is_noticed_in_a_replay() -> None:
    model, x = LayerOutside(), torch.ones(2, 3)
    compiled = fxround.compile(model, ROUNDED)
    for _ in range(5):
        before = compiled(x)
    model.layers[0].register_forward_hook(lambda module, given, result: result * 2)
    assert torch.equal(compiled(x), before * 2)


class Around(nn.Module):
    """A model with a count, which is left to Python, around another model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.n = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.n = min(self.n + 1, 3)
        result: Tensor = self.inner(x)
        return result * self.n


@pytest.mark.part(
    "attribute of a class before its base",
    "attribute by super",
    "forward of a class",
    "method of a class",
    "property of a class",
    "environment by getenv",
    "order of an attribute",
    "hook of a layer outside",
    "tied parameters",
    "objects become one",
    "dicts become one",
)
@pytest.mark.parametrize("name", state_changes.OTHERS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_graph_is_replayed_after_a_change_of_what_the_model_reads(name: str) -> None:
    try:
        inner, change = state_changes.OTHERS[name]()
        compiled, fresh = (fxround.compile(Around(inner), ROUNDED) for _ in range(2))
        if name == "objects become one, by ==":  # of ``object``
            with pytest.raises(CaptureError, match="richcompare"):
                compiled(state_changes.X)
            return
        for _ in range(4):
            before = compiled(state_changes.X)
        change()
        for _ in range(4):
            expected = fresh(state_changes.X)
        found = compiled(state_changes.X)
    finally:
        state_changes.undo()
    assert state_changes.same(found, expected)
    assert not state_changes.same(found, before)


def test_a_replayed_model_notices_its_own_class_and_keeps_none_alive() -> None:
    def around() -> Any:
        class Base(nn.Module):
            factor = 2.0

        class Model(Base):
            def __init__(self) -> None:
                super().__init__()
                self.n = 0

            def forward(self, x: Tensor) -> Tensor:
                self.n = min(self.n + 1, 3)
                return x * self.n * self.factor

        return Model

    x, made = torch.ones(2), around()
    compiled = fxround.compile(made(), ROUNDED)
    found = [float(compiled(x)[0]) for _ in range(4)]
    made.factor = 5.0
    found += [float(compiled(x)[0]) for _ in range(2)]
    assert found == [2, 4, 6, 6, 15, 15] and "a method or an attribute of a class" in str(compiled.captures())
    kept = weakref.ref(made)
    del compiled, made
    gc.collect()
    assert kept() is None


class Scale:
    """An argument that is equal to others, has a hash, and may change, as omegaconf's DictConfig."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scale) and self.factor == other.factor

    def __hash__(self) -> int:
        return hash(self.factor)


class Scaled(nn.Module):
    def forward(self, x: Tensor, by: Any) -> Tensor:
        return x * by.factor


def test_an_argument_with_a_hash_of_its_own_is_read_at_every_call() -> None:
    @dataclass(frozen=True)
    class Constant:
        factor: float

    x, compiled = torch.full((2,), 3.0), fxround.compile(Scaled(), "reproducible")
    changing = Scale(2.0)
    assert compiled(x, changing).tolist() == [6, 6]
    changing.factor = 4.0
    assert compiled(x, changing).tolist() == [12, 12] and compiled(x, by=Scale(5.0)).tolist() == [15, 15]
    assert compiled(x, Constant(7.0)).tolist() == [21, 21] and compiled(x, Constant(8.0)).tolist() == [24, 24]
    with pytest.raises(CaptureError, match=r"relies on Constant \(argument\)"):
        compiled.evaluate(x, Constant(7.0))
