"""The public module: shared state, (seed, sample), copies, pickles, exports and errors."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from models import DigitsCNN
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxround
from fxround.errors import CaptureError, FxroundError, PolicyError
from fxround.policy import Policy, Rule


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(3, 1, 10, 10, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return DigitsCNN().eval()


@pytest.fixture(scope="module")
def compiled(model: nn.Module) -> fxround.RoundedModule:
    return fxround.compile(model, "stochastic", seed=7)


# ---- it is the model ----


def test_state_is_shared_under_the_same_names(model: nn.Module, compiled: fxround.RoundedModule) -> None:
    assert list(compiled.state_dict()) == [*model.state_dict(), "fxround_rng"]
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert [n for n, _ in compiled.named_modules()] == [n for n, _ in model.named_modules()]


def test_changed_weights_are_seen(model: nn.Module, x: Tensor) -> None:
    other = copy.deepcopy(model)
    rounded = fxround.compile(other, "reproducible", example_inputs=x)
    before = rounded(x)
    with torch.no_grad():
        other.fc.bias += 1
    assert not torch.equal(rounded(x), before)
    rounded.load_state_dict(model.state_dict())
    assert torch.equal(rounded(x), before)


def test_train_and_eval_are_those_of_the_model(x: Tensor) -> None:
    source = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    rounded = fxround.compile(source, "identity")
    assert rounded.eval() is rounded and not source.training and not source[1].training
    source.train()
    assert rounded.training
    reference = copy.deepcopy(source)
    ours = rounded(x)
    with torch.no_grad():
        expected = reference(x)
    # A tolerance: the formula of batch norm orders its operations differently from the stock kernel.
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert int(source[1].num_batches_tracked) == 1
    for mine, theirs in zip(source.buffers(), reference.buffers(), strict=True):
        # A tolerance for the same reason: the running statistics are sums in another order.
        torch.testing.assert_close(mine, theirs)


def test_modules_of_other_dtypes_are_captured_again(model: nn.Module, x: Tensor) -> None:
    rounded = fxround.compile(copy.deepcopy(model), "reproducible")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        rounded.to(dtype)
        assert rounded(x.to(dtype)).dtype == dtype
    assert len(rounded.captures().rows) == 4


def test_arguments_that_the_model_changes_are_changed() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return x * 2

    value = torch.zeros(3)
    assert torch.equal(fxround.compile(Adds(), "reproducible")(value), torch.full((3,), 2.0))
    assert torch.equal(value, torch.ones(3))


# ---- a function of (seed, sample) ----


def test_a_change_in_place_that_another_argument_would_show_is_refused() -> None:
    def changes(a: Tensor, b: Tensor) -> Tensor:
        return a.add_(1) + b

    rounded = fxround.compile(changes, "reproducible")
    apart = torch.zeros(2, 8)
    assert torch.equal(rounded(apart[0], apart[1]), torch.ones(8))
    for other in (apart[0], apart.view(-1)[7:15]):
        with pytest.raises(FxroundError, match="changes argument 0 in place, and argument 1 shares its memory"):
            rounded(apart[0], other)
    assert torch.equal(apart, torch.stack([torch.ones(8), torch.zeros(8)]))


def test_numbers_are_distinguished_by_their_digits() -> None:
    rounded = fxround.compile(lambda x, k: x * k, "reproducible")
    positive, negative = (rounded(torch.ones(3), k) for k in (0.0, -0.0))
    assert not positive.signbit().any() and negative.signbit().all()
    rounded(torch.ones(3), float("nan"))
    first = rounded.graph
    assert rounded(torch.ones(3), float("nan")).isnan().all() and rounded.graph is first


def test_the_same_call_twice_gives_the_same_bits(compiled: fxround.RoundedModule, x: Tensor) -> None:
    first, text = compiled(x), compiled.graph_text()
    assert torch.equal(compiled(x), first)
    assert not torch.equal(compiled.reseed(7, sample=1)(x), first)
    assert not torch.equal(compiled.reseed(8)(x), first)
    assert torch.equal(compiled.reseed(7)(x), first)
    assert compiled.graph_text() == text and len(compiled.captures().rows) == 1


def test_a_row_does_not_depend_on_the_batch_under_deterministic_modes(model: nn.Module, x: Tensor) -> None:
    rounded = fxround.compile(model, "reproducible")
    assert torch.equal(rounded(x)[1:2], rounded(x[1:2]))


def test_neither_global_generator_nor_threads_matter(compiled: fxround.RoundedModule, x: Tensor) -> None:
    first, threads = compiled(x), torch.get_num_threads()
    try:
        torch.manual_seed(99)
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(compiled(x), first)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "seed, sample, error, message",
    [
        (1.5, 0, TypeError, "seed is a float; expected an int"),
        (-1, 0, ValueError, r"seed is -1; expected 0 to 2\^63 - 1"),
        (0, 2**32, ValueError, r"sample is 4294967296; expected 0 to 2\^32 - 1"),
    ],
)
def test_a_wrong_seed(compiled: fxround.RoundedModule, seed: Any, sample: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        compiled.reseed(seed, sample)


# ---- copies and files ----


def test_deepcopy_and_pickle_keep_the_bits(compiled: fxround.RoundedModule, x: Tensor) -> None:
    first = compiled(x)
    copied = copy.deepcopy(compiled)
    assert torch.equal(copied(x), first)
    assert next(copied.parameters()) is not next(compiled.parameters())
    assert torch.equal(pickle.loads(pickle.dumps(compiled))(x), first)


@pytest.fixture(scope="module")
def exported(compiled: fxround.RoundedModule, x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled.export(tmp_path_factory.mktemp("export") / "model.pt2", x[:1])


def test_an_exported_file_gives_the_same_bits(compiled: fxround.RoundedModule, exported: Path, x: Tensor) -> None:
    loaded, stock = fxround.load(exported), torch.export.load(exported).module()
    for batch in (x, x[:1], torch.cat([x, x])):
        assert torch.equal(loaded(batch), compiled(batch))
        assert torch.equal(stock(batch), compiled(batch))
    other = compiled.reseed(11, sample=5)(x)
    compiled.reseed(7)
    assert torch.equal(loaded.reseed(11, sample=5)(x), other)


def test_loading_in_a_fresh_process(compiled: fxround.RoundedModule, exported: Path, x: Tensor, tmp_path: Path) -> None:
    torch.save(x, tmp_path / "x.pt")
    body = f"""
        import torch, sys
        if len(sys.argv) > 1: import fxround
        x = torch.load({str(tmp_path / "x.pt")!r})
        torch.save(torch.export.load({str(exported)!r}).module()(x).detach(), {str(tmp_path / "y.pt")!r})
    """
    script = "\n".join(line.strip() for line in body.splitlines())
    without = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "torch.ops.fxround." in without.stderr and "import the custom op" in without.stderr
    subprocess.run([sys.executable, "-c", script, "import"], check=True, capture_output=True)
    assert torch.equal(torch.load(tmp_path / "y.pt"), compiled(x))


def test_loading_another_program_is_refused(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), tmp_path / "other.pt2")
    with pytest.raises(ValueError, match="holds no program of fxround"):
        fxround.load(tmp_path / "other.pt2")


# ---- gradients ----


def test_a_model_without_gradients_returns_plain_tensors(x: Tensor) -> None:
    assert not fxround.compile(nn.ReLU(), "identity")(x).requires_grad
    assert fxround.compile(nn.ReLU(), "identity")(x.clone().requires_grad_()).requires_grad


# ---- policies and strictness ----


def test_policies_in_every_form(model: nn.Module, x: Tensor, tmp_path: Path) -> None:
    policy = Policy("mine", (Rule(rounding="bfloat16/stochastic", accumulate="binary32"),))
    (tmp_path / "mine.toml").write_text(policy.to_toml())
    forms: list[Any] = [policy, policy.to_dict(), str(tmp_path / "mine.toml"), tmp_path / "mine.toml"]
    results = [fxround.compile(model, form)(x) for form in forms]
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(fxround.round(results[0], "bfloat16"), results[0])


@pytest.mark.part(without=("cestac", "binary16"))
@pytest.mark.parametrize("policy", list(fxround.policies))
def test_every_preset_runs(policy: str, model: nn.Module, x: Tensor) -> None:
    rounded = fxround.compile(model, policy, example_inputs=x)
    assert torch.isfinite(rounded(x)).all()
    # Recipes leave products to the stock kernels, by the policy's own word.
    native = ("identity", "fp8", "fp8_blocks", "fp8_delayed", "nvfp4_training")
    assert (rounded.coverage().unrounded == ()) == (policy not in native)


def test_strict_overrides_the_policy() -> None:
    class Inverse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.erfcx(x)

    example = torch.zeros(2)
    with pytest.raises(fxround.UnsupportedOperator, match="policy 'reproducible' is strict"):
        fxround.compile(Inverse(), "reproducible", example_inputs=example)
    assert fxround.compile(Inverse(), "reproducible", strict=False, example_inputs=example).coverage().unrounded
    with pytest.raises(fxround.UnsupportedOperator):
        fxround.compile(Inverse(), "stochastic", strict=True, example_inputs=example)


class Named(nn.Module):
    """A layer with two names, under both of which it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def test_wrong_arguments_are_reported(model: nn.Module, compiled: fxround.RoundedModule, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model is a str; expected a torch\.nn\.Module or a function"):
        fxround.compile("model", "identity")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="RoundedModule already"):
        fxround.compile(compiled, "identity")
    with pytest.raises(TypeError, match="TorchScript"):
        fxround.compile(torch.jit.trace(nn.ReLU(), torch.ones(1)), "identity")
    by_torch = torch.compile(nn.ReLU(), backend="eager")
    with pytest.raises(TypeError, match=r"torch\.compile returned: .* \(model\._orig_mod\)"):
        fxround.compile(by_torch, "identity")
    with pytest.raises(TypeError, match=r"torch\.compile returned"), fxround.perturb(by_torch):
        by_torch(torch.ones(1))
    with pytest.raises(TypeError, match="example_inputs is an int; expected a tensor"):
        fxround.compile(model, "identity", example_inputs=3)
    with pytest.raises(PolicyError, match="did you mean 'stochastic'"):
        fxround.compile(model, "stochastik")
    for name in ("strict", "fuse", "advance", "unroll_loops"):
        flag: Any = {name: "yes"}
        for given in ((model,), ()):
            with pytest.raises(TypeError, match=rf"^{name} is 'yes'; expected True or False"):
                fxround.compile(*given, policy="identity", **flag)
    with pytest.raises(TypeError, match="strict is 1; expected True or False or None"):
        compiled.with_policy("identity", strict=1)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="matches no operation"):
        fxround.compile(
            model, Policy("p", (Rule("conv9", rounding="bfloat16"),)), example_inputs=torch.ones(1, 1, 10, 10)
        )
    with pytest.raises(PolicyError, match=r"'second' is a module of the model, but no .* two names are listed under"):
        fxround.compile(Named(), Policy("p", (Rule("second", rounding="bfloat16"),)), example_inputs=torch.ones(1, 2))


def test_views_need_a_graph(model: nn.Module, compiled: fxround.RoundedModule, x: Tensor, tmp_path: Path) -> None:
    fresh = fxround.compile(model, "stochastic")
    for view in (fresh.graph_text, fresh.summary, fresh.coverage, fresh.to_networkx, lambda: fresh.captured):
        with pytest.raises(ValueError, match="nothing is captured yet"):
            view()
    assert "not captured yet" in fresh._repr_html_()
    assert fresh.prepare(x) is fresh and "fxround.convolution" in fresh.graph_text()
    with pytest.raises(ValueError, match="no backward graph"):
        fresh.graph_text(backward=True)
    fresh(x).sum().backward()
    assert "fxround.convolution_weight_gradient" in fresh.graph_text(backward=True)
    assert fresh.draw(tmp_path / "graph.svg").read_text().lstrip().startswith("<")
    assert fresh.to_networkx().number_of_nodes() == len(fresh.graph.graph.nodes)
    assert "<" in fresh._repr_html_() and len(str(fresh.summary())) > 100


def test_the_attributes_of_a_module_can_be_listed_before_a_call() -> None:
    """What no call has captured is no attribute yet; the model's attribute of that name does not take its place."""

    class Named(nn.Linear):
        graph = captured = backward_graph = "the model's"

    fresh, x = fxround.compile(Named(3, 3), "bfloat16"), torch.ones(2, 3)
    for name in ("graph", "lowered", "captured", "backward_graph"):
        assert not hasattr(fresh, name)
        for kind in (ValueError, AttributeError):
            with pytest.raises(kind, match="nothing is captured yet: call the module once"):
                getattr(fresh, name)
    names = {name for name, _ in inspect.getmembers(fresh)}
    assert "policy" in names and "in_features" in names and "graph" not in names
    with torch.no_grad():
        fresh(x)
    assert hasattr(fresh, "graph") and not hasattr(fresh, "backward_graph")
    with pytest.raises(ValueError, match="recorded no gradients, so there is no backward graph"):
        _ = fresh.backward_graph
    fresh(x)
    assert {"graph", "backward_graph"} <= {name for name, _ in inspect.getmembers(fresh)}


@pytest.mark.parametrize("called", [False, True])
def test_a_trace_of_a_compiled_module_is_refused_with_the_remedy(called: bool) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).eval(), torch.ones(4, 3)
    compiled = fxround.compile(model, "bfloat16", example_inputs=x if called else None)
    expected = compiled(x) if called else None
    remedy = r'torch\.compile\(model, backend="fxround", options='
    for backend in ("eager", "aot_eager"):
        torch.compiler.reset()
        with pytest.raises(FxroundError, match=remedy):
            torch.compile(compiled, backend=backend)(x)
        with pytest.raises(FxroundError, match=remedy):
            torch.compile(lambda x: compiled(x) + 1, backend=backend)(x)
    tracers = (
        lambda: torch.export.export(compiled, (x,), strict=False),
        lambda: make_fx(compiled)(x),
        lambda: make_fx(compiled, tracing_mode="symbolic")(x),
        lambda: torch.jit.trace(compiled, x),
    )
    for trace in tracers:
        with pytest.raises(FxroundError, match=r"compiled\.export\(path, example_inputs\) writes the rounded program"):
            trace()
    assert expected is None or torch.equal(compiled(x), expected)


def test_results_keep_their_structure() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], scale: float = 1.0) -> Any:
            return {"a": x * scale, "b": [pair[0] + pair[1], None, 3], "x": x}

    args = (torch.ones(2), (torch.ones(2), torch.ones(2)), 2.5)
    result = fxround.compile(Many(), "stochastic", example_inputs=args)(*args)
    assert torch.equal(result["a"], torch.full((2,), 2.5)) and result["b"][1:] == [None, 3]
    assert torch.equal(result["x"], args[0])


@pytest.mark.parametrize("shape", [(0, 1, 10, 10), (1, 1, 10, 10)])
def test_empty_and_single_batches(shape: tuple[int, ...], model: nn.Module) -> None:
    for policy in ("identity", "stochastic", "reproducible"):
        assert fxround.compile(model, policy)(torch.randn(shape)).shape == (shape[0], 10)


def test_a_group_norm_of_no_images() -> None:
    model = nn.GroupNorm(2, 6).train()
    assert fxround.compile(model, "reproducible")(torch.randn(2, 6, 3, 5)).shape == (2, 6, 3, 5)
    fxround.compile(model, "reproducible")(torch.randn(0, 6, 3, 5)).sum().backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, torch.zeros(6))


def test_non_contiguous_nan_and_infinite_inputs(model: nn.Module, x: Tensor) -> None:
    rounded = fxround.compile(model, "reproducible")
    turned = x.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)
    assert not turned.is_contiguous() and torch.equal(rounded(turned), rounded(x))
    assert torch.equal(rounded(x.to(memory_format=torch.channels_last)), rounded(x))
    bad = x.clone()
    bad[0, 0, 0, 0], bad[1, 0, 5, 5] = float("nan"), float("inf")
    result = rounded(bad)
    assert result[0].isnan().all() and torch.equal(result[2], rounded(x)[2])


def test_a_wrong_shape_is_reported_with_the_line(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=r"expected input.* to have 1 channels, but got 3") as raised:
        fxround.compile(model, "identity")(torch.randn(2, 3, 10, 10))
    assert any(str(frame.path).endswith("models.py") for frame in raised.traceback)


def test_attributes_and_hooks_changed_later_are_seen() -> None:
    model, x = nn.LeakyReLU(0.1), -torch.ones(2, 3)
    compiled = fxround.compile(model, "reproducible")
    assert compiled(x)[0, 0].item() == torch.tensor(-0.1).item()
    model.negative_slope = 0.5
    assert torch.equal(compiled(x), model(x))
    handle = model.register_forward_hook(lambda module, args, output: output * 0)
    assert torch.equal(compiled(x), model(x))
    handle.remove()
    assert torch.equal(compiled(x), model(x))


def test_arguments_that_the_model_refuses_are_refused() -> None:
    compiled = fxround.compile(nn.Linear(4, 3), "identity")
    compiled(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="dtype"):
        compiled(torch.ones(2, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"Linear\.forward: missing a required argument: 'input'"):
        compiled()
    with pytest.raises(CaptureError, match="expected a dense tensor"):
        compiled(torch.ones(2, 4).to_sparse())


def test_what_the_model_itself_refuses_is_reported_in_its_own_words(capfd: pytest.CaptureFixture[str]) -> None:
    wide, normed = nn.Linear(7, 3), nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).train()
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied \(4x8 and 7x3\)"):
        fxround.compile(wide, "stochastic")(torch.ones(4, 8))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fxround.compile(normed, "stochastic")(torch.ones(1, 8))
    assert normed[1].num_batches_tracked == 0
    assert capfd.readouterr().err == ""


def test_another_dtype_is_refused_for_computed_arguments_and_models_that_cannot_be_copied() -> None:
    model = nn.Linear(4, 3)
    with pytest.raises(RuntimeError, match="dtype"):
        fxround.compile(model, "identity")(torch.ones(2, 4, dtype=torch.float64, requires_grad=True) * 2)
    model.held = (n for n in range(3))  # type: ignore[assignment]
    with pytest.raises(CaptureError, match=r"float32 and arguments of torch\.float64.* copy, which cannot be done"):
        fxround.compile(model, "identity")(torch.ones(2, 4, dtype=torch.float64))


def test_a_model_that_computes_nothing_is_refused() -> None:
    class Three(nn.Module):
        def forward(self, x: Tensor) -> int:
            return 3

    with pytest.raises(CaptureError, match="Three computes no tensor"):
        fxround.compile(Three(), "stochastic")(torch.ones(2))


# ---- watching a call ----


def test_observed_values_are_those_of_the_call(compiled: fxround.RoundedModule, x: Tensor) -> None:
    seen = dict(compiled.observe(x))
    assert torch.equal(seen["output"], compiled(x))
    assert list(seen)[-1] == "output"
    assert {str(row["node"]) for row in compiled.summary()} <= set(seen)


class Bounded(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 1.5).clamp(-0.3, 0.3)
        return y + 1, torch.linalg.svdvals(y)


def test_observed_names_are_those_of_the_summary_and_a_rounded_selection_has_two() -> None:
    compiled, x = fxround.compile(Bounded(), "bfloat16"), torch.randn(4, 4)
    seen = dict(compiled.observe(x))
    listed = [o.node for o in compiled.coverage().operations]
    assert list(seen) == [*listed, "output"]
    before, after = seen["clamp"], seen["clamp_rounded"]
    assert before.max() == torch.tensor(0.3) and torch.equal(after, fxround.round(before, "bfloat16"))
    assert {"clamp", "clamp_rounded"} <= {o.node for o in compiled.summary().operations}


def test_observing_keeps_the_grad_mode_and_writes_no_buffer() -> None:
    source = nn.Sequential(nn.BatchNorm1d(3)).train()
    compiled = fxround.compile(source, "stochastic")
    steps = compiled.observe(torch.randn(4, 3))
    next(steps)
    assert torch.is_grad_enabled()
    list(steps)
    assert source[0].num_batches_tracked == 0 and not source[0].running_mean.any()


def test_another_policy_has_the_same_nodes_and_its_own_numbers(
    model: nn.Module, compiled: fxround.RoundedModule, x: Tensor
) -> None:
    compiled(x)
    nearest = compiled.with_policy("reproducible")
    assert [n.name for n in nearest.graph.graph.nodes] == [n.name for n in compiled.graph.graph.nodes]
    assert torch.equal(nearest(x), fxround.compile(model, "reproducible")(x))
    assert not torch.equal(nearest(x), compiled(x))
    with pytest.raises(PolicyError, match="matches no operation"):
        compiled.with_policy(Policy("lost", (Rule("nowhere", rounding="bfloat16"),)))


def test_a_hook_in_the_place_of_another_is_seen() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    compiled = fxround.compile(model, "reproducible")
    data = torch.rand(3, 1, 8, 8)
    for factor in (2.0, 3.0):
        handle = model[1].register_forward_hook(lambda module, args, result, by=factor: result * by)
        with torch.no_grad():
            assert torch.equal(compiled(data), fxround.compile(model, "reproducible")(data))
        handle.remove()


def test_autocast_is_part_of_what_a_graph_is_for() -> None:
    compiled, x = fxround.compile(nn.Linear(4, 4), "reproducible"), torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
    assert compiled(x).dtype == torch.float32


@pytest.mark.skipif(sys.version_info < (3, 14), reason="earlier versions evaluate annotations at once")
def test_annotations_for_type_checkers_alone_are_not_evaluated() -> None:
    names: dict[str, Any] = {"nn": nn}
    text = "class Net(nn.Module):\n    def forward(self, x: Missing) -> Missing:\n        return x + 1\n"
    exec(compile(text, "net.py", "exec", dont_inherit=True), names)
    assert torch.equal(fxround.compile(names["Net"](), "identity")(torch.ones(2)), torch.full((2,), 2.0))


def test_the_signature_is_the_models() -> None:
    def forward(self: Any, input_ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return input_ids * scale

    model = type("Model", (nn.Module,), {"forward": forward})()
    compiled = fxround.compile(model, "reproducible")
    for one in (compiled, copy.deepcopy(compiled), compiled.with_policy("identity")):
        assert type(one) is type(compiled) and isinstance(one, fxround.RoundedModule)
        assert inspect.signature(one.forward) == inspect.signature(model.forward)
        assert inspect.signature(type(one).forward) == inspect.signature(forward)
    assert list(inspect.signature(fxround.compile(lambda a, b=1: a, "identity").forward).parameters) == ["a", "b"]


def test_plain_state_of_every_kind_is_part_of_what_a_graph_is_for() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[str, float] = {}
            self.scale: float | None = None
            self.kinds: set[str] = set()

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.scale if self.scale is not None else x
            return x + self.table.get("offset", 0.0) + len(self.kinds)

    model, x = Choosing(), torch.rand(3, 2)
    compiled = fxround.compile(model, "reproducible")
    for name, value in (("table", {"offset": 1.0}), ("table", {"offset": 2.0}), ("kinds", {"a"}), ("scale", 3.0)):
        setattr(model, name, value)
        assert torch.equal(compiled(x), model(x))
    model.table["offset"] = 5.0
    assert torch.equal(compiled(x), model(x))
