"""Named stages of a rank's life, timed so that every second belongs to exactly one of them."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TypeVar

import torch

from dflash.profiling.spans import NO_SUBJECT
from dflash.profiling.totals import OTHER, RunStage, StageTotals, Stretch

T = TypeVar("T")
Subject = tuple[int, int]  # micro-batch g and step; -1 where there is none
OnSpan = Callable[[str, float, float, Subject], None]
_NOTHING: AbstractContextManager[None] = nullcontext()


class _Kind(Enum):
    """What happens at a boundary between stages."""

    ENTER = 0
    EXIT = 1
    CUT = 2  # an interval ends


@dataclass(slots=True)
class _Open:
    """A stage under way: when it began, and since when its time is not yet accounted for."""

    path: str
    began_s: float
    since_s: float
    host_since_s: float
    subject: Subject


@dataclass(slots=True)
class _Boundary:
    """A boundary that the device has yet to reach; `host_s` is when the host came by."""

    kind: _Kind
    name: str
    subject: Subject
    event: torch.cuda.Event
    host_s: float


class ProfileStats:
    """Times named stages of one rank: `with stats.stage("forward"): ...`.

    Top-level stages partition the rank's time: what lies between two of them is `other`, so totals sum to the wall
    time. A stage inside a stage is reported under its own name, `outer/inner`, and its time stays part of the outer.

    On the CPU the host clock is read at each boundary. On CUDA one event is recorded per boundary, on the stream that
    was current at the start, and read only once it has completed, so nothing ever waits for the device; differences of
    consecutive events partition the device's time the same way. A wait of the host (starved, blocked) then shows as
    what it costs the device: the time from the end of its queued work to the next work. The host's own time in a stage
    is kept beside it: a stage in which both are about the same is bound by launches, not by its computation.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        is_on: bool = True,
        on_span: OnSpan | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`on_span(path, start_s, end_s, subject)` is told of every stage that ended, in order of their ends.

        Times are those of `clock`; `subject` is what the attribute of that name was when the stage was entered, or
        when it ended if there was none before. On CUDA times are the device's on the host's clock, known only once
        `collect` finds them, and never out of the bounds that the host knows, however far the two clocks drift apart.
        `stream` is the one whose work is timed. The attribute `on_span` may be set later: stages that have ended by
        then are not told.
        """
        self.is_on, self.on_span = is_on, on_span
        self.subject: Subject = NO_SUBJECT
        self._clock = clock
        self._stages: dict[str, _Stage] = {}
        self._entered: list[str] = []  # ahead of `_open` by what the device has yet to reach
        self._open: list[_Open] = []
        self._interval: dict[str, Stretch] = {}
        self._intervals: deque[dict[str, StageTotals]] = deque()
        self._run: dict[str, RunStage] = {}
        self._pending: deque[_Boundary] = deque()
        self._free_events: list[torch.cuda.Event] = []
        self._reached: torch.cuda.Event | None = None
        now_s = clock()
        self._reached_s = now_s
        self._between = _Open(OTHER, now_s, now_s, now_s, self.subject)
        if is_on and device is not None and device.type == "cuda":
            self._stream = torch.cuda.current_stream(device) if stream is None else stream
            self._reached = self._record_event()

    @property
    def has_device_clock(self) -> bool:
        """Whether times are the device's, beside which the host's own say something."""
        return self._reached is not None

    def stage(self, name: str) -> AbstractContextManager[None]:
        """The time inside belongs to the stage `name`."""
        if not self.is_on:
            return _NOTHING
        stage = self._stages.get(name)
        if stage is None:
            stage = self._stages[name] = _Stage(self, name)
        return stage

    def each(
        self, name: str, items: Iterable[T], subject_of: Callable[[T], Subject] = lambda item: NO_SUBJECT
    ) -> Iterator[T]:
        """Yields `items`; the time it takes to come to the next one belongs to the stage `name`.

        `subject_of(item)` is the subject from then on, and that of the time it took; behind the last there is none.
        """
        iterator = iter(items)
        while True:
            self.subject = NO_SUBJECT  # known when the item is there
            with self.stage(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                self.subject = subject_of(item)
            yield item

    def cut(self) -> None:
        """End the interval here, also in the middle of stages: each interval then sums to its own wall time.

        A stage under way gives every interval the time spent in it, and counts once, where it ends.
        """
        if self.is_on:
            self._pass(_Kind.CUT, "")

    def collect(self) -> None:
        """Read the boundaries that the device has reached; never waits for one."""
        while self._pending and self._pending[0].event.query():
            boundary = self._pending.popleft()
            assert self._reached is not None
            # From neighbour to neighbour: an event gives a difference in fp32 milliseconds, too coarse for hours.
            reached_s = self._reached_s + self._reached.elapsed_time(boundary.event) / 1e3
            # Not before the host came by, nor later than now: whenever the device is idle, its clock, which drifts
            # against the host's, is set right by this. Never back, since both bounds only grow.
            self._reached_s = min(max(reached_s, boundary.host_s), self._clock())
            self._free_events.append(self._reached)
            self._reached = boundary.event
            self._apply(boundary.kind, boundary.name, boundary.subject, self._reached_s, boundary.host_s)

    def finish(self, patience_s: float) -> None:
        """Let the device reach the last boundary, but wait no longer than `patience_s`: it may be stuck."""
        deadline_s = time.monotonic() + patience_s
        self.collect()
        while self._pending and time.monotonic() < deadline_s:
            time.sleep(1e-3)
            self.collect()

    def take_intervals(self) -> list[dict[str, StageTotals]]:
        """Totals by path of the intervals that have been cut and not yet taken, as far as the device has come."""
        self.collect()
        taken = list(self._intervals)
        self._intervals.clear()
        return taken

    def run_totals(self) -> dict[str, StageTotals]:
        """Totals by path of all intervals that were cut; p95 is within 2.5 %."""
        return {path: stage.totals() for path, stage in self._run.items()}

    def _pass(self, kind: _Kind, name: str) -> None:
        """Come by a boundary now."""
        now_s = self._clock()
        if self._reached is None:
            self._apply(kind, name, self.subject, now_s, now_s)
        else:
            self._pending.append(_Boundary(kind, name, self.subject, self._record_event(), now_s))

    def _record_event(self) -> torch.cuda.Event:
        event = self._free_events.pop() if self._free_events else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def _apply(self, kind: _Kind, name: str, subject: Subject, now_s: float, host_s: float) -> None:
        if kind is _Kind.ENTER:
            if self._open:
                path = f"{self._open[-1].path}/{name}"
            else:
                path = name
                self._end(self._between, now_s, host_s)
            self._open.append(_Open(path, now_s, now_s, host_s, subject))
        elif kind is _Kind.EXIT:
            ended = self._open.pop()
            self._end(ended, now_s, host_s)
            if self.on_span is not None:
                known = subject if ended.subject == NO_SUBJECT else ended.subject
                self.on_span(ended.path, ended.began_s, now_s, known)
            if not self._open:
                self._between = _Open(OTHER, now_s, now_s, host_s, subject)
        else:
            for stage in self._open or (self._between,):
                self._account(stage, now_s, host_s)
            self._close_interval()

    def _account(self, stage: _Open, now_s: float, host_s: float) -> Stretch:
        stretch = self._interval.get(stage.path)
        if stretch is None:
            stretch = self._interval[stage.path] = Stretch.empty()
        stretch.total_s += now_s - stage.since_s
        stretch.launch_s += host_s - stage.host_since_s
        stage.since_s, stage.host_since_s = now_s, host_s
        return stretch

    def _end(self, stage: _Open, now_s: float, host_s: float) -> None:
        self._account(stage, now_s, host_s).ended.append(now_s - stage.began_s)

    def _close_interval(self) -> None:
        for path, stretch in self._interval.items():
            self._run.setdefault(path, RunStage()).add(stretch)
        self._intervals.append({path: stretch.totals() for path, stretch in self._interval.items()})
        self._interval = {}


class _Stage:
    """One per name, entered as often as one likes, within itself too: what is under way is in the stats."""

    __slots__ = ("_name", "_stats")

    def __init__(self, stats: ProfileStats, name: str) -> None:
        assert name and "/" not in name, f"{name!r} cannot name a stage: it would be a path"
        self._stats, self._name = stats, name

    def __enter__(self) -> None:
        self._stats._pass(_Kind.ENTER, self._name)
        self._stats._entered.append(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        entered = self._stats._entered
        # Such as a generator's that was closed, or never exhausted, inside another stage.
        assert entered and entered[-1] == self._name, f"stage {self._name!r} is left while {entered} are under way"
        entered.pop()
        self._stats._pass(_Kind.EXIT, self._name)
