"""Threads: every item is done once, by any thread; forks, Ctrl-C, and concurrent callers."""

from __future__ import annotations

import _thread
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llvmlite import ir
from torch import Tensor

from fxround.runtime.cpu import threads
from fxround.runtime.cpu.code import native, signature
from fxround.runtime.cpu.llvm.loops import I64, PTR, at, count, define
from fxround.runtime.cpu.threads import piece_of, pieces_of, spread


def build_visits(_: None) -> str:
    """``visit(begin, end, rounds, out, member, piece)``: out[i] += 1, ``rounds`` times over, under two addresses."""
    module = ir.Module("visits")
    names = [("begin", I64), ("end", I64), ("rounds", I64), ("out", PTR), ("member", PTR), ("piece", PTR)]
    b, a = define(module, "visit", names)
    with count(b, a["begin"], a["end"]) as i, count(b, I64(0), a["rounds"]):
        for slot in (at(b, a["out"], i, I64), a["member"], a["piece"]):
            b.store(b.add(b.load(slot, typ=I64), I64(1)), slot)
    b.ret_void()
    return str(module)


def visits(items: range, pieces: int, rounds: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """How often each item was visited, and how many items each thread and each piece had."""
    visit = native("test of threads", build_visits, None, "visit", signature(3, 3))
    out = torch.zeros(items.stop, dtype=torch.int64)
    members, by_piece = (torch.zeros(n, dtype=torch.int64) for n in (torch.get_num_threads(), pieces))
    pointers = [t.data_ptr() for t in (out, members, by_piece)]
    spread(visit, items, pieces, [rounds, *pointers], {2: 8}, {3: 8})
    return out, members, by_piece


@pytest.fixture(params=[1, 2, 3])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("pieces", [1, 2, 3, 5, 24])
def test_every_item_is_visited_once(number: int, pieces: int) -> None:
    items = range(7, 107)
    out, members, by_piece = visits(items, pieces)
    assert out.tolist() == [0] * 7 + [1] * 100
    assert members.sum() == 100
    assert by_piece.tolist() == [len(piece_of(items, pieces, i)) for i in range(pieces)]


def test_callers_do_not_meet(number: int) -> None:
    found: list[bool] = []

    def call() -> None:
        for _ in range(50):
            out, members, _ = visits(range(100), 8, 100)
            found.append(out.eq(100).all().item() and members.sum().item() == 10000)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert found == [True] * 200


def test_threads_enter_only_while_there_is_room_for_them() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        visits(range(600), 600, 1000)
        torch.set_num_threads(2)
        for _ in range(300):
            # Six threads are awake or asleep; ``members`` has room for the counts of two.
            out, members, _ = visits(range(600), 600)
            assert out.eq(1).all() and members.sum() == 600
    finally:
        torch.set_num_threads(before)


def test_a_task_ends_without_threads_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = threads._Pool()
    monkeypatch.setattr(threads, "_POOL", [pool])
    # The pool believes to have threads, none of which will ever come.
    pool._threads.extend([threading.Thread()] * 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    out, members, _ = visits(range(100), 8)
    assert out.eq(1).all() and members.tolist() == [100, 0, 0, 0]


def test_threads_sleep_and_wake() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for pause in (0.0, 1e-5, 1e-4, 1e-3):
            for _ in range(100):
                time.sleep(pause)
                assert visits(range(24), 24, 10)[0].eq(10).all()
    finally:
        torch.set_num_threads(before)


def test_threads_without_work_leave_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for the next task, but not for ever."""
    pool = threads._Pool()
    monkeypatch.setattr(threads, "_POOL", [pool])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(20):
        assert visits(range(24), 24)[0].eq(1).all()
    try:
        end = time.monotonic() + 60
        while (asleep := pool._word("asleep").value) < 2 and time.monotonic() < end:
            time.sleep(0.001)
        assert asleep == len(pool._threads) == 2
        # A post without a task, as callers leave them while a thread is delayed, wakes none.
        work, left = ctypes.byref(pool._word("work")), ctypes.c_int(1)
        for _ in range(1000):
            pool._libc.sem_post(work)
        while left.value and time.monotonic() < end:
            assert pool._word("asleep").value == 2
            pool._libc.sem_getvalue(work, ctypes.byref(left))
        assert left.value == 0 and visits(range(24), 24)[0].eq(1).all()
    finally:
        pool.close()


def test_a_closed_pool_lets_its_callers_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = threads._Pool()
    monkeypatch.setattr(threads, "_POOL", [pool])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert visits(range(100), 8)[0].eq(1).all()
    assert len(pool._threads) == 2
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads)
    out, members, _ = visits(range(100), 8)
    assert out.eq(1).all() and members.tolist() == [100, 0, 0]


def test_a_system_without_semaphores_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_semaphores", lambda: None)
    monkeypatch.setattr(threads, "_POOL", [])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    out, members, _ = visits(range(100), 8)
    assert out.eq(1).all() and members.tolist() == [100, 0, 0]
    threads._close()


def test_a_process_at_its_limit_of_threads_works_with_those_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_POOL", [])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert visits(range(100), 8)[0].eq(1).all()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell starts background processes with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    # Python drops what is raised within a callback of the garbage collector, and Hypothesis has installed one.
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_comes_when_every_piece_has_ended() -> None:
    done: list[Tensor] = []
    rounds = 100_000
    interrupt = threading.Timer(0.02, _thread.interrupt_main)

    def work(interrupt: threading.Timer) -> None:
        interrupt.start()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            done.append(visits(range(100), 8, rounds)[0])

    with pytest.raises(KeyboardInterrupt):
        work(interrupt)
    interrupt.join()
    assert all(out.eq(rounds).all() for out in done)
    assert visits(range(100), 8)[0].eq(1).all()


def test_a_piece_is_worth_its_thread(number: int) -> None:
    assert pieces_of(10, 6) == 1
    assert pieces_of(0, 6) == pieces_of(1, 0) == 1
    for items, enough in ((100, 10), (13, 6), (1000, 0)):
        pieces = pieces_of(items, enough)
        assert pieces == 1 if number == 1 else 1 < pieces <= items
        assert pieces == 1 or all(len(piece_of(range(items), pieces, i)) >= enough for i in range(pieces))


FORKING = """
import os, torch, fxround
from fxround.runtime.cpu import threads
torch.set_num_threads(2)

x, rng = torch.randn(200, 300), torch.tensor([3, 4])
def product():
    return torch.ops.fxround.matmul(x, x.t(), "binary32/stochastic", "binary32/nearest_even", rng, 1)
want = product().tolist()
child = os.fork()
same = product().tolist() == want and len(threads._pool()._threads) == 1
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


FORKED_BEFORE = """
import os, signal, torch
torch.set_num_threads(2)

x, rng, large = torch.randn(200, 300), torch.tensor([3, 4]), torch.ones(1 << 20).add_(1)
child = os.fork()
if child == 0:
    signal.alarm(100)
    from fxround.runtime.cpu import threads
    torch.ops.fxround.matmul(x, x.t(), "binary32/stochastic", "binary32/nearest_even", rng, 1)
    os._exit(0 if len(threads._pool()._threads) == 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("program", [FORKING, FORKED_BEFORE], ids=["after the import", "before the import"])
def test_a_forked_child_has_threads_of_its_own(program: str) -> None:
    """Nor does it wait for ever for PyTorch's threads, which only its parent has."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=120)


WAITING = """
import os, torch, fxround
from fxround.runtime.cpu import threads
torch.set_num_threads(2)

x, rng, large = torch.randn(200, 300), torch.tensor([3, 4]), torch.ones(1 << 20)
def product():
    return torch.ops.fxround.matmul(x, x.t(), "binary32/stochastic", "binary32/nearest_even", rng, 1)
def tasks():
    return len(os.listdir("/proc/self/task"))
want = product().tolist()
assert threads._pool()._pause is not None
own = tasks()
for processors, left in ((2, 0), (3, 1)):
    threads._pool()._processors = processors
    for _ in range(2):
        large.add_(1)
        assert tasks() == own + 1
        assert product().tolist() == want
        assert tasks() == own + left, (processors, tasks(), own)
child = os.fork()
threads._pool()._processors = 2
same = product().tolist() == want and (threads._pool()._pause is None) == (child == 0)
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="fxround has threads of its own on Linux alone")
@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="this PyTorch was built without OpenMP")
def test_the_function_that_ends_threads_of_pytorch_is_found() -> None:
    """In the library of any maker: else two threads would be slow, and nothing would say so."""
    assert threads._pausing() is not None
    assert not threads._runs_no_program() or threads._pool()._pause is None


@pytest.mark.skipif(
    not any((Path(torch.__file__).parent / "lib").glob("libgomp*")), reason="this PyTorch does not bring GNU's OpenMP"
)
def test_threads_of_pytorch_that_wait_are_ended_where_they_need_a_processor() -> None:
    """GNU's OpenMP gives them up at once, and starts new ones; a forked child has none to wait for."""
    command = [sys.executable, "-W", "ignore", "-c", WAITING]
    subprocess.run(command, check=True, timeout=120)
