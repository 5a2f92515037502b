"""A clock and a CUDA device that only go on when told to, and heads of spans files."""

from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

from dflash.profiling.spans import ClockOffset, Span, SpansHead, read_blocks


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeEvent:
    """A CUDA event on a device that works when told to: `queues` holds what each stream has still to reach."""

    num_made = 0
    device_ms = 50.0
    has_failed = False
    queues: defaultdict[str, deque["FakeEvent"]] = defaultdict(deque)

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        FakeEvent.num_made += 1
        self.reached_ms: float | None = None

    def record(self, stream: str) -> None:
        FakeEvent._raise_if_failed()
        self.reached_ms = None
        FakeEvent.queues[stream].append(self)

    def query(self) -> bool:
        FakeEvent._raise_if_failed()
        return self.reached_ms is not None

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query() and end.query()
        return end.reached_ms - self.reached_ms

    @classmethod
    def work(cls, *milliseconds: float, stream: str = "main") -> None:
        """The device takes so long to each of the stream's next events."""
        for duration in milliseconds:
            cls.device_ms += duration
            cls.queues[stream].popleft().reached_ms = cls.device_ms

    @classmethod
    def _raise_if_failed(cls) -> None:
        if cls.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def head(rank: int, role: str, offset_s: float = 0.0, epoch_s: float = 1000.0, launch: int = 7) -> SpansHead:
    return SpansHead(f"{role}-{rank}", role, rank, 4000 + rank, launch, ClockOffset(offset_s, 2e-6, epoch_s))


def read_spans(path: Path) -> Iterator[tuple[SpansHead, list[Span]]]:
    """(head, spans) of every launch's stretch of a file."""
    stretch: tuple[SpansHead, list[Span]] | None = None
    for head, spans in read_blocks(path):
        if stretch is None or head is not stretch[0]:
            if stretch is not None:
                yield stretch
            stretch = head, []
        stretch[1].extend(spans)
    if stretch is not None:
        yield stretch
