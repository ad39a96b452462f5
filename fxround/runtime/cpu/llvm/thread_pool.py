"""Threads that share tasks in machine code: what a caller does, and what each thread of the pool does all its life.

A caller opens the pool's gate, works on the task itself, closes the gate, and waits for the threads that are inside. A
thread that comes too late finds the gate closed, so a caller never waits for a thread that has not begun: if the
system gives the processors to other processes, the caller does the work alone. A pool serves one caller at a time;
another caller finds it taken and works alone.
"""

from __future__ import annotations

from typing import Final

from fxround.runtime.cpu.llvm.environment import Architecture

# The words of a pool (int64), each in a cache line of its own, since threads read them again and again; then the two
# semaphores ``work`` and ``done``, which take four words in glibc and musl. ``post`` and ``wait`` are the addresses of
# sem_post and sem_wait.
_STATE: Final = ("gate", "generation", "asleep", "taken", "stopping", "function", "task")
_WORDS: Final = (*_STATE, "post", "wait", "work", "done")
LINE: Final = 8
PLACE: Final = {name: LINE * i for i, name in enumerate(_WORDS)}
SIZE: Final = LINE * len(_WORDS)

# Bits 0 to 15 of the gate count the threads that are inside, bits 16 to 31 those that entered since it was opened;
# bits 40 and up say how many may enter.
MOST: Final = (1 << 15) - 1
_INSIDE: Final = (1 << 16) - 1
_ENTER: Final = 1 + (1 << 16)
_OPEN: Final = 1 << 32
_AWAITED: Final = 1 << 33
_LIMIT: Final = 40
# How long a thread with nothing to do pauses and looks again before it sleeps, in cycles of the time stamp counter. To
# wake a thread takes 5 to 50 us, the latter in a virtual machine, so a thread of the pool waits some 100 us for the
# next task (more slows down PyTorch's own threads, which may need the processor), and a caller waits for the last
# pieces of its own. A thread that was disturbed (the system gave its processor to others for longer than an interrupt
# takes) sleeps at once, has little patience the next time, and twice as much each time after that.
_PATIENCE: Final = 250_000
_LITTLE: Final = 50_000
_CALLER: Final = 400_000
_DISTURBED: Final = 1 << 17
_PAUSE: Final[dict[str, tuple[str, str]]] = {
    "x86-64": ("call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()"),
    "aarch64": ("call void @llvm.aarch64.isb(i32 15)", "declare void @llvm.aarch64.isb(i32)"),
}
# On other processors a turn of the loop counts as 100 cycles: no thread sees that it was disturbed, so that all have
# little patience.
_READ_CLOCK: Final = "call i64 @llvm.readcyclecounter()"

_NUMBERS: Final = {
    "inside": _INSIDE,
    "enter": _ENTER,
    "open": _OPEN,
    "shut": ~_OPEN,
    "awaited": _AWAITED,
    "limit": _LIMIT,
    "alone": _INSIDE | _AWAITED,
    "last": 1 | _AWAITED,
    "little": _LITTLE,
}

# What a thread does as long as it is patient before it sleeps: it pauses, and looks again.
_STAY: Final = """\
stay:
  %clock = {clock}
  %gap = sub i64 %clock, %previous
  %calm = icmp ult i64 %gap, {disturbed}
  %waited = sub i64 %clock, %began
  %early = icmp ult i64 %waited, {patience}
  %patient = and i1 %calm, %early
  br i1 %patient, label %pause, label %{otherwise}
pause:
  {pause}
  %turn.next = add i64 %turn, 1
  br label %look"""
# A thread that enters adds to the gate by a compare-and-exchange of an open gate, so none enters after it was closed.
# ``task`` is written before the gate opens and read after entering. A sleeper first says so and then looks at
# ``generation``; the caller first advances ``generation`` and then looks for sleepers: one of them sees the other. A
# post too many only wakes a thread that then sleeps again.
_TEXT: Final = """\
; ModuleID = "thread pool"
{declaration}
declare i64 @llvm.readcyclecounter()
declare i64 @llvm.umin.i64(i64, i64)

define void @share(i64 %pool, i64 %function, i64 %task, i64 %members) {{
entry:
  {places}
  %run = inttoptr i64 %function to ptr
  %exchange = cmpxchg ptr %taken.at, i64 0, i64 1 seq_cst seq_cst
  %free = extractvalue {{ i64, i1 }} %exchange, 1
  br i1 %free, label %open, label %alone
alone:
  call void %run(i64 %task)
  ret void
open:
  store atomic i64 %function, ptr %function.at seq_cst, align 8
  store atomic i64 %task, ptr %task.at seq_cst, align 8
  %others = sub i64 %members, 1
  %limit = shl i64 %others, {limit}
  %opened = or i64 %limit, {open}
  store atomic i64 %opened, ptr %gate.at seq_cst, align 8
  %generation = atomicrmw add ptr %generation.at, i64 1 seq_cst
  %asleep = load atomic i64, ptr %asleep.at seq_cst, align 8
  %fewer = icmp slt i64 %asleep, %others
  %needed = select i1 %fewer, i64 %asleep, i64 %others
  br label %wake
wake:
  %woken = phi i64 [ 0, %open ], [ %woken.next, %waken ]
  %enough = icmp sge i64 %woken, %needed
  br i1 %enough, label %work, label %waken
waken:
  %posted = call i32 %post(ptr %work.at)
  %woken.next = add i64 %woken, 1
  br label %wake
work:
  call void %run(i64 %task)
  %closed = atomicrmw and ptr %gate.at, i64 {shut} seq_cst
  %began = {began}
  br label %look
look:
  %turn = phi i64 [ 0, %work ], [ %turn.next, %pause ]
  %previous = phi i64 [ %began, %work ], [ %clock, %pause ]
  %now = load atomic i64, ptr %gate.at seq_cst, align 8
  %inside = and i64 %now, {inside}
  %empty = icmp eq i64 %inside, 0
  br i1 %empty, label %done, label %stay
{stay_or_ask}
ask:
  %asked = atomicrmw or ptr %gate.at, i64 {awaited} seq_cst
  %left = and i64 %asked, {inside}
  %late = icmp eq i64 %left, 0
  br i1 %late, label %done, label %sleep
sleep:
  %interrupted = call i32 %wait(ptr %done.at)
  %again = icmp ne i32 %interrupted, 0
  br i1 %again, label %sleep, label %done
done:
  store atomic i64 0, ptr %gate.at seq_cst, align 8
  store atomic i64 0, ptr %taken.at seq_cst, align 8
  ret void
}}

define void @serve(i64 %pool) {{
entry:
  {places}
  br label %next
next:
  %seen = phi i64 [ 0, %entry ], [ %seen, %awake ], [ %now, %served ]
  %patience = phi i64 [ {most}, %entry ], [ %patience.left, %awake ], [ %patience.grown, %served ]
  %patience.double = shl i64 %patience, 1
  %patience.grown = call i64 @llvm.umin.i64(i64 %patience.double, i64 {most})
  %began = {began}
  %stopping = load atomic i64, ptr %stopping.at seq_cst, align 8
  %stop = icmp ne i64 %stopping, 0
  br i1 %stop, label %end, label %look
look:
  %turn = phi i64 [ 0, %next ], [ %turn.next, %pause ]
  %previous = phi i64 [ %began, %next ], [ %clock, %pause ]
  %now = load atomic i64, ptr %generation.at seq_cst, align 8
  %new = icmp ne i64 %now, %seen
  br i1 %new, label %try, label %stay
{stay_or_rest}
rest:
  %patience.left = select i1 %calm, i64 %patience.grown, i64 {little}
  %sleepers = atomicrmw add ptr %asleep.at, i64 1 seq_cst
  %missed = load atomic i64, ptr %generation.at seq_cst, align 8
  %idle = icmp eq i64 %missed, %seen
  br i1 %idle, label %sleep, label %awake
sleep:
  %slept = call i32 %wait(ptr %work.at)
  %woken.to = load atomic i64, ptr %generation.at seq_cst, align 8
  %nothing = icmp eq i64 %woken.to, %seen
  %ending = load atomic i64, ptr %stopping.at seq_cst, align 8
  %going.on = icmp eq i64 %ending, 0
  %surplus = and i1 %nothing, %going.on
  br i1 %surplus, label %sleep, label %awake
awake:
  %sleepers.left = atomicrmw sub ptr %asleep.at, i64 1 seq_cst
  br label %next
try:
  %gate = load atomic i64, ptr %gate.at seq_cst, align 8
  %flag = and i64 %gate, {open}
  %is.open = icmp ne i64 %flag, 0
  br i1 %is.open, label %admitted, label %served
admitted:
  %shifted = lshr i64 %gate, 16
  %entered = and i64 %shifted, {inside}
  %limit = lshr i64 %gate, {limit}
  %room = icmp ult i64 %entered, %limit
  br i1 %room, label %enter, label %served
enter:
  %more = add i64 %gate, {enter}
  %exchange = cmpxchg ptr %gate.at, i64 %gate, i64 %more seq_cst seq_cst
  %in = extractvalue {{ i64, i1 }} %exchange, 1
  br i1 %in, label %work, label %try
work:
  %function = load atomic i64, ptr %function.at seq_cst, align 8
  %task = load atomic i64, ptr %task.at seq_cst, align 8
  %run = inttoptr i64 %function to ptr
  call void %run(i64 %task)
  br label %leave
leave:
  %before = atomicrmw sub ptr %gate.at, i64 1 seq_cst
  %only.one = and i64 %before, {alone}
  %is.last = icmp eq i64 %only.one, {last}
  br i1 %is.last, label %last, label %served
last:
  %answered = call i32 %post(ptr %done.at)
  br label %served
served:
  br label %next
end:
  ret void
}}
"""


def build_thread_pool(architecture: Architecture) -> str:
    """The LLVM text of ``share`` and ``serve`` over a pool: SIZE words, zero but for ``post``, ``wait``, semaphores.

    ``share(pool, function, task, members)`` calls function(task) here and in at most ``members`` - 1 threads of the
    pool, and returns when all of them have returned. ``serve(pool)`` is such a thread; it returns when ``stopping`` is
    not zero and it is awake.
    """
    pause, declaration = _PAUSE.get(architecture, ("", ""))
    has_clock = architecture == "x86-64"
    began, clock = (_READ_CLOCK, _READ_CLOCK) if has_clock else ("add i64 0, 0", "mul i64 %turn, 100")
    addresses = [f"%{name}.at = getelementptr i64, ptr %pool.at, i64 {place}" for name, place in PLACE.items()]
    functions = [
        line
        for name in ("post", "wait")
        for line in (f"%{name}.word = load i64, ptr %{name}.at", f"%{name} = inttoptr i64 %{name}.word to ptr")
    ]
    places = "\n  ".join(("%pool.at = inttoptr i64 %pool to ptr", *addresses, *functions))
    patience = {"ask": _CALLER if has_clock else _LITTLE, "rest": "%patience"}
    stay = {
        f"stay_or_{name}": _STAY.format(clock=clock, patience=limit, disturbed=_DISTURBED, pause=pause, otherwise=name)
        for name, limit in patience.items()
    }
    numbers = {**_NUMBERS, "most": _PATIENCE if has_clock else _LITTLE, "began": began}
    return _TEXT.format(places=places, declaration=declaration, **stay, **numbers)
