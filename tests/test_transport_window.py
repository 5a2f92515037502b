"""The credit window against its definition, and whole systems of ranks that use it, at random speeds."""

import random
from collections import deque
from types import SimpleNamespace

import pytest

from dflash.groups import Topology
from dflash.transport.window import CreditWindow, num_to_start


def schedule_of(sizes: list[int], indices: list[int]) -> list[tuple[int, SimpleNamespace]]:
    return [(index, SimpleNamespace(num_bytes=size)) for index, size in zip(indices, sizes, strict=True)]


def naive_num_admitted(sizes: list[int], num_consumed: int, depth: int, max_bytes: int | None) -> int:
    """The rule read off the page: how many of the schedule may have been sent when so many have been consumed."""
    for place in range(num_consumed, len(sizes)):
        num_between = place - num_consumed
        num_bytes = sum(sizes[num_consumed : place + 1])
        is_due = place == num_consumed
        if not is_due and (num_between >= depth or (max_bytes is not None and num_bytes > max_bytes)):
            return place
    return len(sizes)


@pytest.mark.parametrize("seed", range(300))
def test_window_is_its_definition(seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, 16, rng.randint(1, 1000)]) for _ in range(rng.randint(0, 40))]
    indices = sorted(rng.sample(range(200), len(sizes)))
    depth = rng.randint(1, 8)
    max_bytes = rng.choice([None, 1, 500, 2000])
    window = CreditWindow(schedule_of(sizes, indices), depth=depth, max_bytes=max_bytes)
    admitted = [index for index, _ in window.admit()]
    for num_consumed in range(len(sizes)):
        expected = naive_num_admitted(sizes, num_consumed, depth, max_bytes)
        assert admitted == indices[:expected]
        assert window.watermark == indices[expected - 1]
        assert len(window) == expected - num_consumed
        assert window.num_bytes == sum(sizes[num_consumed:expected])
        assert window.next_index == indices[num_consumed] and not window.is_finished
        assert window.consume() == indices[num_consumed]
        admitted += [index for index, _ in window.admit()]
    assert window.is_finished and window.next_index is None and window.num_bytes == 0


@pytest.mark.parametrize("last", [-1, 0, 4, 5, 9, 30])
def test_stop_ends_the_schedule(last: int) -> None:
    window = CreditWindow(schedule_of([10] * 10, list(range(0, 20, 2))), depth=3, max_bytes=None)
    window.admit()
    window.stop_after(last)
    served = []
    while not window.is_finished:
        window.admit()
        served.append(window.consume())
    assert served == [index for index in range(0, 20, 2) if index <= last]
    assert window.num_bytes == 0


class NothingIsAlwaysAdmitted(CreditWindow):
    """The rule without its last sentence; the simulation has to see that it hangs."""

    def _has_room(self, num_bytes: int) -> bool:
        return super()._has_room(num_bytes) and (self._max_bytes is None or num_bytes <= self._max_bytes)


class System:
    """T targets and D drafters as a set of possible moves; a move is drawn at random, so any speeds can occur."""

    def __init__(self, rng: random.Random, window_class: type[CreditWindow] = CreditWindow) -> None:
        self.topology = Topology(rng.randint(1, 5), rng.randint(1, 4))
        self.num_entries = rng.randint(1, 90)
        self.step_entries = rng.randint(1, 4) * self.topology.num_drafters
        self.sizes = [rng.choice([1, rng.randint(1, 100)]) for _ in range(self.num_entries)]
        self.depth = rng.choice([1, 2, 3, 8])
        self.max_bytes = rng.choice([None, 1, 60, 150])
        self.min_ready = rng.choice([1, self.depth, 2 * self.depth])
        self.free_buffers = [rng.randint(1, 4) for _ in range(self.topology.num_targets)]
        self.next_of_target = list(range(self.topology.num_targets))
        self.waiting = {edge: deque() for edge in self.topology.edges}
        self.in_flight = dict.fromkeys(self.topology.edges)
        self.windows, self.watermarks, self.num_to_start = [], [], []
        limits = {"depth": self.depth, "max_bytes": self.max_bytes}
        for drafter in range(self.topology.num_drafters):
            window = window_class(self._schedule_of(drafter), **limits)
            window.admit()
            self.windows.append(window)
            self.watermarks.append(window.watermark)
            self.num_to_start.append(self._gate(drafter, limits))
        self.ready = [set() for _ in self.windows]
        self.taken = [None] * len(self.windows)
        self.has_started = [False] * len(self.windows)
        self.step = [0] * len(self.windows)
        self.max_depth = 0
        # Some ranks and edges are slow: their moves are drawn a hundred times less often.
        self.is_slow = {move: rng.random() < 0.3 for move in self._all_moves()}

    def _schedule_of(self, drafter: int) -> list[tuple[int, SimpleNamespace]]:
        own = list(range(drafter, self.num_entries, self.topology.num_drafters))
        return schedule_of([self.sizes[index] for index in own], own)

    def _gate(self, drafter: int, limits: dict) -> int:
        num_drafters = self.topology.num_drafters
        return num_to_start(self._schedule_of, drafter, num_drafters, **limits, min_ready=self.min_ready)

    def _all_moves(self) -> list[tuple]:
        moves = [("compute", target) for target in range(self.topology.num_targets)]
        for edge in self.topology.edges:
            moves += [("start", edge), ("arrive", edge)]
        return moves + [(kind, d) for d in range(self.topology.num_drafters) for kind in ("take", "consume", "reduce")]

    def moves(self) -> list[tuple]:
        return [move for move in self._all_moves() if getattr(self, f"_may_{move[0]}")(move[1])]

    def play(self, move: tuple) -> None:
        getattr(self, f"_{move[0]}")(move[1])
        for drafter, window in enumerate(self.windows):
            receiving = [g for (_, d), g in self.in_flight.items() if d == drafter and g is not None]
            held = receiving + list(self.ready[drafter]) + [g for g in [self.taken[drafter]] if g is not None]
            self.max_depth = max(self.max_depth, len(held))
            assert len(held) <= self.depth
            num_bytes = sum(self.sizes[g] for g in held)
            assert self.max_bytes is None or num_bytes <= self.max_bytes or len(held) == 1
            assert num_bytes <= window.num_bytes

    @property
    def is_done(self) -> bool:
        return all(window.is_finished for window in self.windows) and len(set(self.step)) == 1

    def _may_compute(self, target: int) -> bool:
        return self.free_buffers[target] > 0 and self.next_of_target[target] < self.num_entries

    def _compute(self, target: int) -> None:
        index = self.next_of_target[target]
        self.next_of_target[target] += self.topology.num_targets
        self.free_buffers[target] -= 1
        self.waiting[target, self.topology.drafter_of(index)].append(index)

    def _may_start(self, edge: tuple[int, int]) -> bool:
        waiting = self.waiting[edge]
        return self.in_flight[edge] is None and bool(waiting) and waiting[0] <= self.watermarks[edge[1]]

    def _start(self, edge: tuple[int, int]) -> None:
        self.in_flight[edge] = self.waiting[edge].popleft()

    def _may_arrive(self, edge: tuple[int, int]) -> bool:
        return self.in_flight[edge] is not None

    def _arrive(self, edge: tuple[int, int]) -> None:
        self.ready[edge[1]].add(self.in_flight[edge])
        self.in_flight[edge] = None
        self.free_buffers[edge[0]] += 1

    def _is_step_over(self, drafter: int) -> bool:
        next_index = self.windows[drafter].next_index
        return next_index is None or next_index // self.step_entries > self.step[drafter]

    def _may_take(self, drafter: int) -> bool:
        window = self.windows[drafter]
        is_here = window.next_index in self.ready[drafter]
        may_start = self.has_started[drafter] or len(self.ready[drafter]) >= self.num_to_start[drafter]
        return self.taken[drafter] is None and not self._is_step_over(drafter) and is_here and may_start

    def _take(self, drafter: int) -> None:
        self.has_started[drafter] = True
        self.taken[drafter] = self.windows[drafter].next_index
        self.ready[drafter].remove(self.taken[drafter])

    def _may_consume(self, drafter: int) -> bool:
        return self.taken[drafter] is not None

    def _consume(self, drafter: int) -> None:
        assert self.windows[drafter].consume() == self.taken[drafter]
        self.taken[drafter] = None
        self.windows[drafter].admit()
        self.watermarks[drafter] = self.windows[drafter].watermark

    def _may_reduce(self, drafter: int) -> bool:
        # The all-reduce of a step: it ends for everybody when the last has come; drafter 0 stands for all.
        is_over = all(self._is_step_over(d) and self.taken[d] is None for d in range(len(self.windows)))
        return drafter == 0 and is_over and not self.is_done

    def _reduce(self, drafter: int) -> None:
        self.step = [step + 1 for step in self.step]


def run(system: System, rng: random.Random) -> bool:
    """Plays moves until nothing can move; says whether everything was trained on."""
    while moves := system.moves():
        if system.is_done:
            return True
        weights = [0.01 if system.is_slow[move] else 1.0 for move in moves]
        system.play(rng.choices(moves, weights)[0])
    return system.is_done


def test_no_system_deadlocks_or_exceeds_its_bounds() -> None:
    depths = set()
    for seed in range(400):
        rng = random.Random(seed)
        system = System(rng)
        assert run(system, rng), f"seed {seed} hangs"
        depths.add(system.max_depth)
    assert {1, 2, 3, 8} <= depths  # the bound is reached, not only kept


def test_simulation_sees_a_window_that_admits_nothing() -> None:
    outcomes = []
    for seed in range(40):
        rng = random.Random(seed)
        system = System(rng, NothingIsAlwaysAdmitted)
        if system.max_bytes is not None and max(system.sizes) > system.max_bytes:
            outcomes.append(run(system, rng))
    assert outcomes and not any(outcomes)


class GatedByOwnWindow(System):
    """Starts when its own window is full, without regard to the others'; the simulation has to see that it hangs."""

    def _gate(self, drafter: int, limits: dict) -> int:
        return min(self.min_ready, len(self.windows[drafter]))


def test_simulation_sees_a_gate_that_waits_for_too_much() -> None:
    outcomes = []
    for seed in range(60):
        rng = random.Random(seed)
        outcomes.append(run(GatedByOwnWindow(rng), rng))
    assert any(outcomes) and not all(outcomes)


def test_gate_waits_for_the_whole_window_where_windows_are_alike() -> None:
    schedules = [[(g, SimpleNamespace(num_bytes=1)) for g in range(d, 100, 3)] for d in range(3)]
    for drafter in range(3):
        gate = [
            num_to_start(schedules.__getitem__, drafter, 3, depth=20, max_bytes=None, min_ready=min_ready)
            for min_ready in (1, 4, 20, 50)
        ]
        assert gate == [1, 4, 20, 20]
