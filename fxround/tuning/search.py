"""The search of ``tune``: which assignments run, in which order, and what is known at the end.

For a budget of the metric:

1. The finest assignment and the cheapest one run. If the finest one does not keep the budget, or the cheapest one does,
   nothing else is to be decided.
2. Between them, the noise that the budget allows is found by bisection: the cheapest assignment within a predicted
   noise runs, for a noise half way (by its logarithm) between the largest that passed and the least that failed.
3. An assignment that failed is repaired: the part whose noise is the largest gets a finer format, until it passes.
4. Delta debugging takes cheaper formats for several parts at a time, and then for single ones.
5. The assignment with the least predicted noise among those that are cheaper runs, until none is left that is not at
   least as coarse in every part as one that failed.
6. Each part gets its next cheaper format alone, in a run of its own. If that passes, the search goes on from there.
7. While there are few passes, or for the proof "all", the other cheaper assignments run.

For a budget of bits, the assignment with the least predicted noise within these bits runs, until none is left that is
not at least as coarse in every part as one that ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from fxround.choices import PASSES, Proof
from fxround.localization.delta_debugging import Units, halves, minimal, one_by_one
from fxround.tuning.goals import Goal
from fxround.tuning.parts import Assignment
from fxround.tuning.programs import Program
from fxround.tuning.trials import Stopped, Trials


@dataclass
class Search:
    """A search as far as it has come.

    best      the best assignment so far: the cheapest within the budget, or that of the best metric within the bits
    minimal   whether every part was run with its next cheaper formats, and none of these runs kept the budget
    proved    "all" if every assignment that would be better ran, "monotone" if each of them that did not run is at
              least as coarse in every part as one that ran and was no better, and no run contradicts that such
              assignments are no better; "" if neither is known
    reason    why no assignment meets the budget; "" if one does
    spent     passes over the data that were needed before this search
    """

    trials: Trials
    program: Program
    goal: Goal
    most: int | None
    proof: Proof
    spent: int = 0
    best: Assignment | None = None
    minimal: bool = False
    proved: Literal["", "monotone", "all"] = ""
    reason: str = ""
    interrupted: bool = False
    _parts: range = field(default_factory=lambda: range(0))

    def run(self) -> None:
        """Search until nothing is left to try, all allowed runs are done, or Ctrl-C comes."""
        self._parts = range(len(self.program.costs))
        try:
            self._for_bits() if self.most is not None else self._for_metric()
        except Stopped:
            self.interrupted = self.trials.stopping()
        if self.best is None:
            self.best = self._best_metric()

    # A budget of the metric.

    def _for_metric(self) -> None:
        finest, lowest = self.program.finest(), self.program.lowest()
        first = self._first(finest)
        if first is None:
            return
        self.reason = ""
        self._take(first)
        if self._passes(lowest):
            self._take(lowest)
        else:
            if first == finest:
                self._bisect(finest, lowest)
                self._repair()
            self._reduce()
        while True:
            self._improve()
            if not self._lower_one():
                break
        self.minimal = True
        while self._try_all():
            self.minimal = False
            while self._lower_one():
                pass
            self.minimal = True
        if self.proved == "monotone" and self._contradicted():
            self.proved = ""

    def _first(self, finest: Assignment) -> Assignment | None:
        """Return the finest assignment that keeps the budget: that of the least noise, or one format for all parts.

        If none of them does, others run as ``_try_all`` says. Returns None, and sets the reason, if none keeps it.
        """
        if self._passes(finest):
            return finest
        self.reason = f"the finest assignment does not keep the budget, {self.goal}: {self._said(finest)}"
        for i in range(len(self.trials.formats.names)):
            one = tuple(i for _ in self._parts)
            if self._passes(one):
                return one
        return next((one for one in self._others(self._highest) if self._passes(one)), None)

    def _contradicted(self) -> bool:
        """Whether an assignment that keeps the budget is at least as coarse in every part as one that does not."""
        failing = self._failing()
        passing = [one for one in self.trials.known if one not in failing]
        return any(self.program.is_coarser(one, other) for one in passing for other in failing)

    def _said(self, assignment: Assignment) -> str:
        trial = self.trials.run(assignment)
        return trial.error or f"{self.trials.metric.name} is {trial.value:.6g}"

    def _highest(self) -> int:
        return sum(max(row) for row in self.program.costs)

    def _passes(self, assignment: Assignment) -> bool:
        trial = self.trials.run(assignment)
        return not trial.error and self.goal.keeps(trial.value)

    def _failing(self) -> list[Assignment]:
        return [one for one in self.trials.known if not self._passes(one)]

    def _take(self, assignment: Assignment) -> None:
        """Keep an assignment that passes if it is cheaper than the best one."""
        if self.best is None or self._cost(assignment) < self._cost(self.best):
            self.best = assignment

    def _cost(self, assignment: Assignment) -> int:
        return self.program.cost(assignment)

    def _bisect(self, finest: Assignment, lowest: Assignment) -> None:
        """Find the noise that the budget allows."""
        low, high = self.program.predicted(finest), self.program.predicted(lowest)
        if not math.isfinite(high):
            ends = [max((v for v in row if math.isfinite(v)), default=0.0) for row in self.program.noise]
            high = 2 * math.fsum(ends)
        low = max(low, high * 1e-15)
        while low < high:
            middle = math.sqrt(low) * math.sqrt(high)
            assignment = self.program.cheapest_within(middle)
            if assignment is None or not low < middle < high:
                return
            noise = self.program.predicted(assignment)
            if self._passes(assignment):
                self._take(assignment)
                low = middle
            else:
                high = min(noise, middle)
            beyond = self.program.cheapest_within(high * (1 - 1e-9))
            if beyond is None or self.best is None or self._cost(beyond) >= self._cost(self.best):
                return

    def _repair(self) -> None:
        """Give the noisiest parts of the failing assignment with the least noise finer formats until it passes."""
        assert self.best is not None
        cheaper = [one for one in self._failing() if self._cost(one) < self._cost(self.best)]
        if not cheaper:
            return
        assignment = min(cheaper, key=self.program.predicted)
        while not self._passes(assignment):
            finer = [self._finer(assignment, part) for part in self._parts]
            gains = [(self.program.noise[p][assignment[p]], one) for p, one in enumerate(finer) if one is not None]
            if not gains:
                return
            assignment = max(gains, key=lambda gain: gain[0])[1]
            if self._cost(assignment) >= self._cost(self.best):
                return
        self._take(assignment)

    def _finer(self, assignment: Assignment, part: int) -> Assignment | None:
        """Return the assignment with the cheapest format that has less noise in one part; None if there is none."""
        noise, costs = self.program.noise[part], self.program.costs[part]
        less = [i for i in self.program.usable[part] if noise[i] < noise[assignment[part]]]
        return with_format(assignment, part, min(less, key=lambda i: (costs[i], noise[i]))) if less else None

    def _reduce(self) -> None:
        """Take cheaper formats for as many parts as delta debugging finds, running what may pass by its noise.

        A unit is a step of a part from a cheaper format to the next one. A set of units is kept by the search if the
        budget is kept; what it returns is minimal as far as the runs say.
        """
        assert self.best is not None
        start = self.best
        ladders = [self._ladder(part, start[part]) for part in self._parts]
        noisy = sorted(self._parts, key=lambda part: self.program.noise[part][start[part]])
        units = tuple(f"{part}:{step}" for part in noisy for step in range(1, len(ladders[part])))

        def assignment(some: Units) -> Assignment:
            steps = [0 for _ in self._parts]
            for unit in some:
                steps[int(unit.partition(":")[0])] += 1
            return tuple(ladder[step] for ladder, step in zip(ladders, steps, strict=True))

        def keeps(some: Units) -> bool:
            one = assignment(some)
            if one not in self.trials.known and not self._may_pass(one):
                return False
            return self._passes(one)

        if units:
            self._take(assignment(minimal(units, one_by_one(keeps), halves)) if not keeps(()) else assignment(()))

    def _ladder(self, part: int, given: int) -> list[int]:
        """Return formats of a part from the cheapest to ``given``, of each cost the one with the least noise."""
        costs, noise = self.program.costs[part], self.program.noise[part]
        by_cost: dict[int, int] = {}
        for i in sorted(self.program.usable[part], key=lambda i: -noise[i]):
            if costs[i] < costs[given]:
                by_cost[costs[i]] = i
        return [by_cost[cost] for cost in sorted(by_cost)] + [given]

    def _may_pass(self, assignment: Assignment) -> bool:
        """Whether an assignment has less predicted noise than every one that failed, and is no coarser than one."""
        failing = self._failing()
        noise = min(map(self.program.predicted, failing), default=math.inf)
        coarse = any(self.program.is_coarser(assignment, one) for one in failing)
        return not coarse and self.program.predicted(assignment) < noise

    def _improve(self) -> None:
        """Run cheaper assignments, those with the least predicted noise first, while the runs suffice."""
        assert self.best is not None
        while True:
            failing = self._failing()
            one = self.program.quietest(self._cost(self.best) - 1, failing, list(self.trials.known))
            if one is None:
                self.proved = "all" if self._cost(self.best) == self._cost(self.program.lowest()) else "monotone"
                return
            if not self._may_spend(len(self._open_steps())):
                self.proved = ""
                return
            if self._passes(one):
                self._take(one)
                self._reduce()

    def _may_spend(self, reserved: int) -> bool:
        """Whether there are runs for one more assignment beside those that are reserved."""
        runs = len(self.trials.known) + reserved + 1
        if self.trials.limit is not None:
            return runs <= self.trials.limit
        return self._is_short(runs)

    def _is_short(self, runs: int) -> bool:
        """Whether so many runs are at most 40 passes, with that of the unrounded model and those before."""
        return self.spent + 1 + runs * self.trials.passes_of_a_run <= PASSES

    def _open_steps(self) -> list[Assignment]:
        """Return the best assignment with one part in a next cheaper format, for each that did not run."""
        if self.best is None or self.most is not None:
            return []
        return [one for one in self._steps() if one not in self.trials.known]

    def _steps(self) -> Iterator[Assignment]:
        assert self.best is not None
        for part in self._parts:
            for given in self.program.cheaper(part, self.best[part]):
                yield with_format(self.best, part, given)

    def _lower_one(self) -> bool:
        """Run each single step to a next cheaper format; returns whether one passed, from which the search goes on."""
        for one in sorted(self._steps(), key=self.program.predicted):
            if self._passes(one):
                self._take(one)
                self._reduce()
                return True
        return False

    def _try_all(self) -> bool:
        """Run the cheaper assignments that did not run; returns whether one passed.

        Without the proof "all", only while there are few passes: then the assignments of a small model all run.
        """
        assert self.best is not None
        for one in self._others(lambda: self._cost(self.best or ()) - 1):
            if self._passes(one):
                self._take(one)
                return True
        return False

    def _others(self, most: Callable[[], int]) -> Iterator[Assignment]:
        """Yield the assignments of at most a cost that did not run, those with the least noise first."""
        whole = replace(self.program, whole=True)
        while (one := whole.quietest(most(), (), list(self.trials.known))) is not None:
            if self.proof != "all" and not self._is_short(len(self.trials.known) + len(self._open_steps()) + 1):
                return
            yield one
        self.proved = "all"

    # A budget of bits.

    def _for_bits(self) -> None:
        assert self.most is not None
        lowest = self.program.lowest()
        if self._cost(lowest) > self.most:
            self.reason = f"the cheapest assignment has more than {self.goal.most_bits:g} bits"
            self.trials.run(lowest)
            self.best = lowest
            return
        while (one := self.program.quietest(self.most, list(self.trials.known))) is not None:
            if self.best is not None and not self._may_spend(0):
                return
            self.trials.run(one)
            self.best = self._best_metric()
        self.proved = "monotone"
        most = self.most
        for other in self._others(lambda: most):
            self.trials.run(other)
            self.best = self._best_metric()

    def _best_metric(self) -> Assignment | None:
        """Return the assignment with the best metric among those within the bits, of equal ones the cheapest."""
        known = self.trials.known
        within = [one for one in known if self.most is None or self._cost(one) <= self.most]
        return max(within, key=lambda one: (self.goal.rank(known[one].value), -self._cost(one)), default=None)


def with_format(assignment: Assignment, part: int, given: int) -> Assignment:
    """Return an assignment with one part in another format."""
    return (*assignment[:part], given, *assignment[part + 1 :])


__all__ = ["Search", "with_format"]
