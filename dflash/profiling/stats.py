"""Named stages of a rank's life, timed so that every second belongs to exactly one of them."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import torch

OTHER = "other"  # the time between stages


@dataclass(slots=True)
class StageTotals:
    """Times of one stage over an interval or a run, in seconds."""

    count: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total_s += seconds
        self.max_s = max(self.max_s, seconds)

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0


class ProfileStats:
    """Times named stages of one rank: `with stats.stage("forward"): ...`.

    Top-level stages partition the rank's time: what lies between two of them is `other`, so totals sum to the wall
    time. A stage inside a stage is reported under its own name, `outer/inner`, and its time stays part of the outer.

    On the CPU the host clock is read at each boundary. On CUDA one event is recorded per boundary on the current
    stream and read only once it has completed, so nothing ever waits for the device; consecutive differences of events
    partition the device's time the same way. A wait of the host (starved, blocked) then shows as what it costs the
    device: the time from the end of its queued work to the next work.
    """

    def __init__(self, device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._uses_events = device is not None and device.type == "cuda"
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._stack: list[tuple[str, object]] = []
        self._boundary = self._mark()
        self.interval: dict[str, StageTotals] = {}
        self.run: dict[str, StageTotals] = {}

    def stage(self, name: str) -> "_Stage":
        return _Stage(self, name)

    def _mark(self) -> object:
        """Now: a host time, or an event that will know."""
        if not self._uses_events:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _enter(self, name: str) -> None:
        now = self._mark()
        if not self._stack:
            self._record(OTHER, self._boundary, now)
            self._boundary = now
        path = f"{self._stack[-1][0]}/{name}" if self._stack else name
        self._stack.append((path, now))

    def _exit(self) -> None:
        now = self._mark()
        path, start = self._stack.pop()
        self._record(path, start, now)
        if not self._stack:
            self._boundary = now

    def _record(self, path: str, start: object, end: object) -> None:
        if self._uses_events:
            self._pending.append((path, start, end))  # type: ignore[arg-type]
        else:
            self._add(path, end - start)  # type: ignore[operator]

    def _add(self, path: str, seconds: float) -> None:
        for totals in (self.interval, self.run):
            totals.setdefault(path, StageTotals()).add(seconds)

    def collect(self) -> None:
        """Read the stages whose events have completed; never waits."""
        while self._pending and self._pending[0][2].query():
            path, start, end = self._pending.popleft()
            self._add(path, start.elapsed_time(end) / 1e3)

    def take_interval(self) -> dict[str, StageTotals]:
        """Totals since the last call, the time up to now included; starts a new interval.

        A top-level stage that is under way is cut here, so that intervals sum to the wall time even while a rank
        waits; it counts once in each.
        """
        now = self._mark()
        if self._stack:
            path, start = self._stack[0]
            self._stack[0] = (path, now)
        else:
            path, start = OTHER, self._boundary
            self._boundary = now
        self._record(path, start, now)
        self.collect()
        totals, self.interval = self.interval, {}
        return totals


class _Stage:
    __slots__ = ("_name", "_stats")

    def __init__(self, stats: ProfileStats, name: str) -> None:
        self._stats, self._name = stats, name

    def __enter__(self) -> None:
        self._stats._enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stats._exit()


def wall_s(totals: dict[str, StageTotals]) -> float:
    """Sum of the top-level stages, in seconds."""
    return sum(stage.total_s for path, stage in totals.items() if "/" not in path)


def summary_line(name: str, totals: dict[str, StageTotals]) -> str:
    """One line: each top-level stage's share of the time, its mean and its count, the largest first."""
    whole = wall_s(totals) or 1.0
    top = sorted(((p, t) for p, t in totals.items() if "/" not in p), key=lambda item: -item[1].total_s)
    parts = [f"{p} {t.total_s / whole:.1%} ({t.mean_s * 1e3:.1f} ms x {t.count})" for p, t in top]
    return f"{name} {whole:.1f} s: " + ", ".join(parts)
