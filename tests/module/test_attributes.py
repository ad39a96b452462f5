"""A compiled module gives access to the attributes and methods of its model, also to those with fxround's names."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from models import hugging_face
from torch import Tensor, nn
from torch.nn import functional as F

import fxround
from fxround.errors import FxroundError, UnsupportedOperator
from fxround.python_model.method_dispatch import rounds

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Plain(nn.Module):
    """Attributes, properties and methods of every kind, and fxround's names among them."""

    kind = "plain"
    made: ClassVar[list[type]] = []

    def __init_subclass__(cls, **named: Any) -> None:
        Plain.made.append(cls)

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.fc, self.source = nn.Linear(4, 4), nn.Linear(4, 4)
        self.policy, self.seed, self.fuse, self.strict, self.advance = "the model's", 9, "f", "s", "a"
        self.captured, self.sample, self.function = 1.5, 4, 0.5
        self.register_buffer("rng", torch.full((4,), 2.0))
        self.register_buffer("graph", torch.ones(4))
        self.config = {"width": 4}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Uses every one of them."""
        assert (self.policy, self.seed, self.fuse, self.strict, self.advance) == ("the model's", 9, "f", "s", "a")
        y: Tensor = self.source(self.fc(x)) * self.rng * self.graph
        return y * self.captured * self.sample * self.function

    @property
    def width(self) -> int:
        return self.fc.out_features

    @property
    def on_ones(self) -> Tensor:
        result: Tensor = self(torch.ones(2, 4))
        return result

    @classmethod
    def another(cls) -> Plain:
        return cls()

    @staticmethod
    def doubled(x: int) -> int:
        return 2 * x

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.fc(x))

    def project(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.fc.weight, self.fc.bias))

    def twice(self, x: Tensor, again: bool = True) -> Tensor:
        """Calls the model by both its names."""
        self.calls += 1
        return self(self.forward(x)) if again else self(x)

    def steps(self, x: Tensor, n: int) -> Iterator[Tensor]:
        for _ in range(n):
            x = self(x)
            yield x

    def noisy_steps(self, x: Tensor) -> Iterator[Tensor]:
        yield self(x)
        yield x.exp()

    def saved(self) -> dict[str, Any]:
        return self.state_dict()

    def set_up(self, width: int) -> Plain:
        self.config = {"width": width}
        return self

    def copied(self) -> Any:
        return copy.deepcopy(self)

    def alike(self, other: Any) -> bool:
        return isinstance(other, self.__class__)

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()


class Child(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1

    def encode(self, x: Tensor) -> Tensor:
        return super().encode(x)

    def as_parent(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.fixture
def model() -> Plain:
    return Plain().eval()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_attributes_properties_and_buffers_are_read_through_the_compiled_module(model: Plain) -> None:
    compiled = fxround.compile(model, "bfloat16")
    assert compiled.config is model.config and compiled.width == 4 and compiled.kind == "plain"
    assert compiled.fc is model.fc and compiled.doubled(3) == 6 and type(compiled.another()) is Plain
    assert {"config", "encode", "policy", "reseed"} <= set(dir(compiled))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = compiled.nothing
    assert not hasattr(compiled, "nothing") and hasattr(compiled, "config")


def test_what_is_set_or_deleted_is_the_models(model: Plain) -> None:
    compiled = fxround.compile(model, "bfloat16")
    compiled.config = {"width": 5}
    compiled.added = nn.Linear(4, 4)
    compiled.number = 3
    assert model.config == {"width": 5} and isinstance(model.added, nn.Linear) and vars(model)["number"] == 3
    assert "added.weight" in compiled.state_dict()
    del compiled.number, compiled.added
    assert not hasattr(model, "number") and not hasattr(compiled, "added")
    compiled.register_buffer("extra", torch.zeros(1))
    assert model.extra is compiled.extra


def test_a_number_that_is_set_through_the_compiled_module_is_seen_by_its_graph(model: Plain) -> None:
    compiled = fxround.compile(model, "reproducible")
    with torch.no_grad():
        before = compiled(X)
        model.config["width"] = 7
        compiled.calls = 3
        assert same(compiled(X), before)
        model.captured = 3.0
        assert same(compiled(X), 2 * before)


NAMES = ("policy", "source", "rng", "fuse", "strict", "advance", "graph", "captured")


def test_a_name_that_both_have_is_fxrounds_outside_and_the_models_inside(model: Plain) -> None:
    stock = model(X)
    compiled = fxround.compile(model, "reproducible", seed=3)
    with torch.no_grad():
        # A tolerance: five binary32 operations after two layers, which stock PyTorch computes in other orders.
        torch.testing.assert_close(compiled(X), stock)
    assert isinstance(compiled.policy, fxround.Policy) and compiled.source is model
    assert compiled.rng.tolist() == [3, 0] and compiled.fuse is True and compiled.strict is None
    for name in NAMES:
        assert getattr(compiled.source, name) is getattr(model, name)
    # seed and sample are no names of fxround's modules.
    assert (compiled.seed, compiled.sample) == (9, 4)
    compiled.reseed(5)
    compiled.advance = True
    assert model.rng.tolist() == [2.0] * 4 and model.advance == "a" and compiled.rng.tolist() == [5, 0]
    assert compiled.get_submodule("source") is model.get_submodule("source")
    assert compiled.get_buffer("rng") is model.rng and compiled.get_parameter("source.weight") is model.source.weight
    assert set(compiled.state_dict()) == {*model.state_dict(), "fxround_rng"}
    compiled.load_state_dict(model.state_dict() | {"fxround_rng": torch.tensor([6, 7])})
    assert compiled.rng.tolist() == [6, 7]


@pytest.mark.parametrize("name, advice", [("policy", "with_policy"), ("source", "of another model")])
def test_policy_and_model_are_fixed(model: Plain, name: str, advice: str) -> None:
    compiled = fxround.compile(model, "bfloat16")
    with pytest.raises(AttributeError, match=rf"compiled\.{name} is fxround's own and fixed.*{advice}"):
        setattr(compiled, name, "other")


@pytest.mark.filterwarnings("ignore:the compiled Plain is applied to its own result")
@pytest.mark.parametrize("policy", ["bfloat16", "reproducible", "stochastic"])
def test_a_methods_calls_of_the_model_are_rounded(model: Plain, policy: str) -> None:
    compiled = fxround.compile(model, policy, seed=1)
    with torch.no_grad():
        once = compiled(X)
        wanted = compiled(once.clone())
        assert same(compiled.twice(X), wanted) and same(compiled.twice(X, again=False), once)
        assert not same(model.twice(X), wanted) or policy == "reproducible"
        assert model.calls == 3 and compiled.calls == 3
        assert [same(a, b) for a, b in zip(compiled.steps(X, 2), (once, wanted), strict=True)] == [True, True]
        assert same(compiled.on_ones, compiled(torch.ones(2, 4)))
    assert compiled.twice.__name__ == "twice" and "by both its names" in compiled.twice.__doc__
    assert compiled.set_up(6) is compiled and model.config == {"width": 6}
    assert type(compiled.copied()) is Plain


def test_stand_ins_leave_no_subclass_after(model: Plain) -> None:
    before = list(Plain.made)
    fxround.compile(model, "bfloat16").set_up(1)
    assert Plain.made == before


def test_a_methods_use_of_parameters_is_refused_if_strict_and_warned_about_if_not(model: Plain) -> None:
    strict = fxround.compile(model, "reproducible")
    with torch.no_grad():
        with pytest.raises(
            UnsupportedOperator,
            match=r"Plain\.project computes aten\.addmm.*test_attributes.*compile\(model\.project, p",
        ):
            strict.project(X)
        lenient = fxround.compile(model, "bfloat16")
        tanh = fxround.compile(torch.tanh, "bfloat16")
        with pytest.warns(UserWarning, match=r"Plain\.project computes aten\.addmm") as told:
            assert same(lenient.project(X), tanh(model.fc(X)))
        assert {w.filename for w in told} == {__file__} and len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lenient.project(X)  # told once
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plain = fxround.compile(model, "identity", strict=True)  # no rule asks for a rounding
            assert same(plain.project(X), model.project(X))
    parent = fxround.compile(Child().eval(), "reproducible")
    with torch.no_grad(), pytest.raises(UnsupportedOperator, match=r"Child\.as_parent computes aten\.mul"):
        parent.as_parent(X)


def test_a_compiled_module_is_of_the_models_class_too_and_methods_save_its_seed(model: Plain) -> None:
    compiled = fxround.compile(model, "bfloat16", seed=4)
    assert isinstance(compiled, Plain) and isinstance(compiled, fxround.RoundedModule)
    assert not isinstance(compiled, Child) and not isinstance(fxround.compile(model.encode, "bfloat16"), Plain)
    assert compiled.saved()["fxround_rng"].tolist() == [4, 0] and "fxround_rng" not in model.saved()
    again = pickle.loads(pickle.dumps(compiled))
    assert type(again).__mro__[1:] == type(compiled).__mro__[1:] and isinstance(again, Plain)


def test_a_method_finds_the_compiled_module_and_the_model_to_be_of_its_own_class(model: Plain) -> None:
    compiled = fxround.compile(model, "bfloat16")
    assert compiled.alike(compiled) and compiled.alike(model) and compiled.alike(Child())
    assert not compiled.alike(nn.Linear(1, 1)) and not fxround.compile(Child(), "bfloat16").alike(model)


class Choosing(nn.Module):
    """Methods that compute with results of the model, as those that choose the next word of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x)
        return result

    def divided(self, x: Tensor, by: float) -> Tensor:
        return self(x) / by

    def divided_in_place(self, x: Tensor, by: float) -> Tensor:
        return self(x).div_(by)

    def twice_divided(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x / 3, x / 3

    def probabilities(self, x: Tensor) -> Tensor:
        return torch.softmax(self(x), -1)

    def singular(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x)


def test_a_methods_own_operations_are_rounded_by_the_policy() -> None:
    torch.manual_seed(0)
    model = Choosing().eval()
    compiled = fxround.compile(model, "bfloat16", strict=True)
    with torch.no_grad():
        y = compiled(X)
        for by in (3.0, 7.0, 0.1):
            # A quotient of 24-bit numbers is no nearer than 2^-33 to a point halfway between values of 8 bits.
            wanted = fxround.round(y.double() / torch.tensor(by).double(), "bfloat16").float()
            assert same(compiled.divided(X, by), wanted) and same(compiled.divided_in_place(X, by), wanted)
        softmax = fxround.compile(lambda x: torch.softmax(x, -1), "bfloat16")
        assert same(compiled.probabilities(X), softmax(y))


def test_operations_of_a_method_draw_their_own_random_bits() -> None:
    compiled = fxround.compile(Choosing().eval(), "bfloat16/stochastic", seed=1)
    x = torch.rand(64)
    with torch.no_grad():
        (first, second), again = compiled.twice_divided(x), compiled.twice_divided(x)
        assert not same(first, second) and same(first, again[0]) and same(second, again[1])
        assert not same(compiled.reseed(1, sample=1).twice_divided(x)[0], first)
        assert not same(compiled.reseed(2).twice_divided(x)[0], first)


def test_operations_of_a_method_that_cannot_be_rounded_are_refused() -> None:
    model = Choosing().eval()
    compiled = fxround.compile(model, "reproducible")
    square = torch.eye(4)
    with torch.no_grad(), pytest.raises(UnsupportedOperator, match=r"Choosing\.singular computes aten\._linalg_svd"):
        compiled.singular(square)
    # The gradient of an operation outside of the graph would be PyTorch's.
    with pytest.raises(UnsupportedOperator, match=r"Choosing\.divided computes aten\.div"):
        compiled.divided(X, 3.0)
    # A rule for some modules does not say whether it applies.
    partial = fxround.Policy("partial", (fxround.Rule("fc", rounding="bfloat16"),), strict=True)
    with torch.no_grad(), pytest.raises(UnsupportedOperator, match=r"Choosing\.divided computes aten\.div"):
        fxround.compile(model, partial).divided(X, 3.0)


@pytest.mark.parametrize("cls", [Plain, Child])
def test_a_method_is_compiled_by_itself_with_the_models_state(cls: type[Plain]) -> None:
    model = cls()
    compiled = fxround.compile(model.encode, "reproducible")
    reference = fxround.compile(nn.Sequential(model.fc, nn.Tanh()), "reproducible")
    result, wanted = compiled(X), reference(X)
    assert same(result, wanted)
    assert compiled.coverage().unrounded == () and compiled.summary()[0].module == "fc"
    gradient = torch.ones_like(result)
    (mine,) = torch.autograd.grad(result, model.fc.weight, gradient)
    (other,) = torch.autograd.grad(wanted, model.fc.weight, gradient)
    assert same(mine, other)
    with torch.no_grad():
        model.fc.weight.mul_(2)
        assert same(compiled(X), reference(X))
        again = pickle.loads(pickle.dumps(compiled))
        assert same(again(X), compiled(X)) and again.source.source is not model
    compiled.eval()
    assert model.training is False


def test_a_whole_method_that_calls_the_model_is_one_graph(model: Plain) -> None:
    loss = fxround.compile(model.loss, "reproducible")
    square = fxround.compile(lambda y: y.square().mean(), "reproducible")
    with torch.no_grad():
        assert same(loss(X), square(fxround.compile(model, "reproducible")(X)))
        model.captured = 3.0
        assert same(loss(X), square(fxround.compile(model, "reproducible")(X)))


def test_a_method_may_train(model: Plain) -> None:
    """A backward pass inside a method has the results and gradients of one outside."""

    class Trained(Plain):
        def step(self, x: Tensor) -> list[Tensor]:
            self(x).backward(torch.ones_like(x))
            return [p.grad for p in self.parameters() if p.grad is not None]

    for mode in (True, False):
        inside = fxround.compile(Trained().train(mode), "reproducible").step(X)
        compiled = fxround.compile(Trained().train(mode), "reproducible")
        compiled(X).backward(torch.ones_like(X))
        outside = [p.grad for p in compiled.parameters() if p.grad is not None]
        assert len(inside) == len(outside) == 4
        assert all(same(a, b) for a, b in zip(inside, outside, strict=True))


def test_pickle_and_deepcopy_keep_the_compiled_module(model: Plain) -> None:
    compiled = fxround.compile(model, "stochastic", seed=4, advance=True)
    compiled.set_up(8)
    with torch.no_grad():
        for again in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
            assert type(again.source) is Plain and again.source is not model
            assert again.config == {"width": 8} and again.advance is True
            assert same(again.reseed(4)(X), compiled.reseed(4)(X))
            assert same(again.reseed(4).twice(X), compiled.reseed(4).twice(X))


class Copied(nn.Module):
    """A model that defines its own copy: a copy of the compiled module is still a compiled module."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.copies = nn.Linear(4, 4), 0

    def __deepcopy__(self, memo: Any) -> Copied:
        made = Copied()
        made.load_state_dict(self.state_dict())
        made.copies = self.copies + 1
        return made

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x)
        return result

    def train(self, mode: bool = True) -> Copied:
        super().train(mode)
        self.fc.eval()
        return self


def test_special_methods_and_the_models_own_train() -> None:
    compiled = fxround.compile(Copied(), "bfloat16")
    assert isinstance(copy.deepcopy(compiled), fxround.RoundedModule) and copy.deepcopy(compiled).copies == 1
    assert compiled.train() is compiled and compiled.training and not compiled.fc.training
    assert compiled.eval() is compiled and not compiled.source.training


def test_a_functions_attributes() -> None:
    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x)

    gelu.order = 3  # type: ignore[attr-defined]
    compiled = fxround.compile(gelu, "bfloat16")
    assert compiled.order == 3 and compiled.__name__ == "gelu" and compiled.__wrapped__ is gelu


A = torch.ops.aten
F32, F16, I64 = torch.ones(3), torch.ones(3, dtype=torch.float16), torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    "func, args, wanted",
    [
        (A.mul.Tensor, (F32, F32), True),
        (A.mul.Tensor, (I64, I64), False),
        (A.add_.Tensor, (F32, F32), True),
        (A.addmm.default, (torch.ones(2), torch.ones(2, 2), torch.ones(2, 2)), True),
        (A._softmax.default, (F32, 0, False), True),
        (A.relu_.default, (F32.clone(),), False),
        (A.argmax.default, (F32,), False),
        (A.cat.default, ([F32, F32],), False),
        (A.view.default, (F32, [3, 1]), False),
        (A.copy_.default, (F32.clone(), F16), False),
        (A.copy_.default, (F16.clone(), F32), True),
        (A._to_copy.default, (F16,), False),
        (A.index_put_.default, (F32.clone(), [I64[:1]], F32[:1]), False),
        (A.index_put_.default, (F32.clone(), [I64[:1]], F32[:1], True), True),
        (A.masked_fill_.Scalar, (F32.clone(), F32 > 0, 2.0), False),
        (A.zero_.default, (F32.clone(),), False),
        (A.uniform_.default, (F32.clone(),), False),
        (A.full.default, ([2], 1.5), False),
        (A.prod.default, (I64,), False),
        (A.prod.default, (F32,), True),
        (A.div.Tensor_mode, (F32, F32), True),
        (A.i0.default, (F32,), True),
        (A._local_scalar_dense.default, (torch.ones(()),), False),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_which_operators_round(func: Any, args: tuple[Any, ...], wanted: bool) -> None:
    kwargs = {"dtype": torch.float64} if func is A._to_copy.default else {"rounding_mode": "floor"}
    kwargs = kwargs if func in (A._to_copy.default, A.div.Tensor_mode) else {}
    assert rounds(func, args, kwargs, func(*args, **kwargs)) is wanted


@pytest.mark.long
def test_a_transformers_model_generates_with_the_rounded_forward() -> None:
    pytest.importorskip("transformers")
    transformers = hugging_face()
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).eval()
    compiled = fxround.compile(model, "bfloat16")
    assert compiled.config is config and compiled.device == torch.device("cpu")
    ids = torch.tensor([[3, 1, 4]])
    settings = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0, "use_cache": False}
    found = compiled.generate(ids, output_logits=True, return_dict_in_generate=True, **settings)
    tokens = ids
    with torch.no_grad():
        for logits in found.logits:
            wanted = compiled(tokens, use_cache=False).logits[:, -1]
            assert same(logits, wanted)
            tokens = torch.cat([tokens, wanted.argmax(-1, keepdim=True)], -1)
    assert torch.equal(found.sequences, tokens)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("rng", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.rng
        return y

    def shifted(self, x: Tensor) -> Tensor:
        return self(x) + 1


def test_a_model_with_a_buffer_of_fxrounds_name_is_exported_and_so_is_a_method(tmp_path: Path) -> None:
    model = Scaled()
    for compiled in (fxround.compile(model, "stochastic"), fxround.compile(model.shifted, "stochastic")):
        compiled.export(tmp_path / "model.pt2", X)
        with torch.no_grad():
            assert same(fxround.load(tmp_path / "model.pt2")(X), compiled(X))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x).tanh()
        return result


@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4)), Layered])
def test_torch_compile_never_traces_the_model_inside_of_a_compiled_module(build: Any) -> None:
    """Dynamo takes a module's ``__class__`` for the class whose ``forward`` it traces, and that is the model's."""
    compiled, x = fxround.compile(build(), "bfloat16"), torch.randn(3, 4)
    calls: list[Any] = [compiled, lambda x: compiled(x) + 1, lambda x: compiled.forward(x)]
    for call in calls:
        with pytest.raises(FxroundError, match=r"torch\.compile traces a compiled module"):
            torch.compile(call, backend="eager")(x)
