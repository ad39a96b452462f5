"""Threads, signals and forks during a capture or a compilation: no wrong number, no hang, no changed model."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxround
from fxround.capture.dynamo import capturing
from fxround.errors import CaptureError
from fxround.locks import waited_for
from fxround.runtime.cpu.llvm import engine

SECONDS = 120.0  # a hang is told, not waited for


class Net(nn.Module):
    """Layers under several names, a buffer, a module that no attribute registers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.again = self.fc
        self.beside = [self.fc]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.norm(torch.tanh(self.beside[0](x))))


def state_of(model: nn.Module) -> list[tuple[str, int, type]]:
    """The model's tensors by identity, module by module."""
    found = []
    for name, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            found += [(f"{name}.{key}", id(tensor), type(tensor)) for key, tensor in held.items()]
    return found


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    barrier = threading.Barrier(len(calls))

    def started(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(started, call) for call in calls]]


def test_first_calls_from_several_threads_capture_once_and_leave_the_model_alone() -> None:
    torch.manual_seed(0)
    model, other, x = Net().eval(), nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.rand(5, 4)
    before, expected = state_of(model), model(x).detach()
    seen: list[Any] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            # A tolerance: capturing switches oneDNN off, so that an eager call beside it may add in another order.
            seen.append((state_of(model) == before, torch.allclose(model(x), expected)))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        one, two = (fxround.compile(model, "reproducible") for _ in range(2))
        third = fxround.compile(other, "reproducible")
        with torch.no_grad():
            results = at_once([lambda: one(x), lambda: one(x), lambda: two(x), lambda: third(x)])
    finally:
        done.set()
        watcher.join()
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(results[0], one(x)) and torch.equal(results[3], third(x))
    assert len(one.captures().rows) in (1, 2)
    assert len(seen) > 3 and all(same and near for same, near in seen)
    assert state_of(model) == before


BESIDE = """
import faulthandler, threading, time
faulthandler.dump_traceback_later(60, exit=True)
import torch, fxround
from torch import nn

torch.set_num_threads(1)
model, x = nn.Sequential(*[nn.Linear(2, 2) for _ in range(8)]), torch.rand(2, 2)
parameters = list(model.parameters())
compiled = fxround.compile(model, "reproducible")
compiled(x)

def beside():
    while not done.is_set():
        for parameter in parameters:
            parameter * 2

done = threading.Event()
thread = threading.Thread(target=beside)
thread.start()
for call in (compiled, compiled.eval(), lambda x: fxround.round(parameters[0], "e5m2")):
    end = time.monotonic() + 3
    while time.monotonic() < end:
        call(x)
done.set()
thread.join()
"""


def test_a_call_that_autograd_sees_beside_another_thread_that_computes_with_the_same_parameters() -> None:
    # In a process of its own, because a hang would hold the GIL. Without ``applied`` it hangs in most runs.
    subprocess.run([sys.executable, "-c", BESIDE], check=True, timeout=SECONDS)


@pytest.fixture
def alarm() -> Iterator[Callable[[Callable[[], Any], float], None]]:
    """Calls something from a signal handler, some time from now."""
    before = signal.getsignal(signal.SIGALRM)

    def arm(handler: Callable[[], Any], after: float) -> None:
        signal.signal(signal.SIGALRM, lambda *_: handler())
        signal.setitimer(signal.ITIMER_REAL, after)

    yield arm
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# Functions in the middle of a trace, of its derivative, of the passes, and of a schedule. A timer would also
# interrupt PyTorch's dispatcher, which rarely aborts the process then.
PLACES = [
    ("fxround.capture.readings", "Readings.read"),
    ("fxround.capture.repeated_blocks", "joint_of"),
    ("fxround.compiler.pipeline", "lower"),
    ("fxround.compiler.pipeline", "optimize"),
    ("fxround.compiler.pipeline", "schedule"),
]


@pytest.mark.part(2)
@pytest.mark.parametrize("module, name", PLACES, ids=[name for _, name in PLACES])
def test_ctrl_c_in_a_capture_leaves_the_model_and_the_lock(
    module: str, name: str, alarm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Net().eval(), torch.rand(5, 4)
    before = state_of(model)
    compiled = fxround.compile(model, "reproducible")
    expected = fxround.compile(model, "reproducible")(x)
    owner: Any = importlib.import_module(module)
    *outer, last = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    function, calls = getattr(owner, last), []

    def interrupt() -> None:
        raise KeyboardInterrupt

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGALRM)
        return function(*args, **kwargs)

    alarm(interrupt, 0)
    monkeypatch.setattr(owner, last, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fxround.compile(model, "reproducible")(x)
    assert len(calls) == 1 and state_of(model) == before
    assert torch.equal(at_once([lambda: compiled(x)])[0], expected)


def test_a_signal_handler_may_round_and_call_in_the_middle_of_a_capture(
    alarm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.rand(5, 4)
    captured, model = fxround.compile(Net().eval(), "reproducible"), Net().eval()
    fresh = fxround.compile(nn.Linear(4, 4), "reproducible")
    expected = captured(x), fxround.round(x, "e5m2"), fxround.compile(model, "reproducible")(x)
    told: list[Any] = []

    def handler() -> None:
        told.append((captured(x), fxround.round(x, "e5m2")))
        with pytest.raises(CaptureError, match="cannot be captured during another capture"):
            fresh(x)
        told.append(None)

    # In the middle for certain: when the trace has its fake tensors and modes.
    import fxround.capture.repeated_blocks as capturing_module

    joint = capturing_module.joint_of

    def interrupted(*arguments: Any) -> Any:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            signal.raise_signal(signal.SIGALRM)
        return joint(*arguments)

    alarm(handler, 0)
    monkeypatch.setattr(capturing_module, "joint_of", interrupted)
    result = fxround.compile(model, "reproducible")(x)
    assert len(told) == 2
    assert torch.equal(told[0][0], expected[0]) and torch.equal(told[0][1], expected[1])
    assert torch.equal(result, expected[2])


def test_a_signal_handler_may_compile_in_the_middle_of_a_link(alarm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two objects with one name, linked one during the other: each caller gets the address of its own."""
    text = 'target triple = "{}"\ndefine i64 @value() {{ ret i64 {} }}'
    texts = [text.format(engine.llvm.get_default_triple(), number) for number in (41, 42)]
    inner: list[int] = []
    alarm(lambda: inner.append(engine.compile_module(texts[1], ("value",))["value"]), 0)
    plain = engine.llvm.ObjectFileRef.from_data
    once: list[bool] = []

    def interrupted(code: bytes) -> Any:
        found = plain(code)
        if not once:
            once.append(True)
            signal.raise_signal(signal.SIGALRM)
        return found

    monkeypatch.setattr(engine.llvm.ObjectFileRef, "from_data", interrupted)
    outer = engine.compile_module(texts[0], ("value",))["value"]
    import ctypes

    assert [ctypes.CFUNCTYPE(ctypes.c_int64)(address)() for address in (outer, inner[0])] == [41, 42]


def in_child(work: Callable[[], bool]) -> bool:
    """Whether ``work`` is true in a forked child; a child that hangs is false."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_in_the_middle_of_another_threads_capture_or_compilation() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, x = Net().eval(), torch.rand(5, 4)
    ready = fxround.compile(model, "reproducible")
    expected, before = ready(x), state_of(model)
    started = threading.Event()

    def busy() -> None:
        started.set()
        fxround.compile(model, "bfloat16/up_down")(x)  # captures, then compiles kernels that no test has

    def work() -> bool:
        fresh = fxround.compile(model, "reproducible")
        rounded = fxround.round(x, "e4m3fn/up_down")
        return bool(
            torch.equal(ready(x), expected)
            and torch.equal(fresh(x), expected)
            and rounded.shape == x.shape
            and state_of(model) == before
        )

    thread = threading.Thread(target=busy)
    thread.start()
    started.wait()
    try:
        for pause in (0.05, 0.4):
            time.sleep(pause)
            assert in_child(work)
    finally:
        thread.join()
        torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_waits_for_each_lock_and_the_child_finds_it_free() -> None:
    from fxround.runtime.cpu import code

    for lock in (waited_for(), capturing(), code._LOCK, engine._LOCK, engine.llvm.ffi.lib._lock._lock):
        held, leave = threading.Event(), threading.Event()
        ended: list[float] = []

        def hold() -> None:
            with lock:  # noqa: B023 (joined below)
                held.set()  # noqa: B023
                leave.wait(SECONDS)  # noqa: B023
                ended.append(time.monotonic())  # noqa: B023

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        threading.Timer(0.1, leave.set).start()
        assert in_child(lambda: bool(lock.acquire(timeout=5)))  # noqa: B023
        thread.join()
        assert ended and lock.acquire(timeout=5)
        with lock:  # a fork of the thread that holds it leaves it held, in both
            assert in_child(lambda: lock._is_owned())  # noqa: B023
            assert lock._is_owned()
        lock.release()
