"""How long transfers over each edge of a rank take, and how full its queue is."""

from dataclasses import dataclass

from dflash.profiling.spans import EDGE_PREFIX, NONE, SpanWriter


@dataclass(slots=True)
class _Sums:
    count: int = 0
    total_s: float = 0.0
    num_bytes: int = 0


class EdgeTimes:
    """Sums of a target's transfers by drafter, from the posting of a send until its confirmation was seen.

    A rank sees a confirmation when it next looks after its edges, so these times bound the transfers from above.
    """

    def __init__(self, spans: SpanWriter | None = None) -> None:
        self._spans = spans
        self._sums: dict[str, _Sums] = {}

    def on_delivered(self, peer_name: str, index: int, start_s: float, end_s: float, num_bytes: int) -> None:
        """Add one transfer of micro-batch g; times in seconds of `time.perf_counter`."""
        sums = self._sums.setdefault(peer_name, _Sums())
        sums.count += 1
        sums.total_s += end_s - start_s
        sums.num_bytes += num_bytes
        if self._spans is not None:
            self._spans.on_span(EDGE_PREFIX + peer_name, start_s, end_s, (index, NONE))

    def take_interval(self) -> dict[str, float]:
        """Scalars `edge/<drafter>/transfer_ms` (mean) and `edge/<drafter>/bytes_per_s`; starts a new interval."""
        sums, self._sums = self._sums, {}
        scalars = {}
        for name, edge in sums.items():
            scalars[f"{EDGE_PREFIX}{name}/transfer_ms"] = edge.total_s / edge.count * 1e3
            scalars[f"{EDGE_PREFIX}{name}/bytes_per_s"] = edge.num_bytes / max(edge.total_s, 1e-9)
        return scalars


class QueueLevels:
    """How full a drafter's queue is whenever it takes a micro-batch: what a look now and then would miss."""

    def __init__(self) -> None:
        self._num_takes, self._num_empty, self._sum_ready = 0, 0, 0

    def on_take(self, num_ready: int) -> None:
        """Add a look at the queue: micro-batches that were ready before one was taken."""
        self._num_takes += 1
        self._num_empty += num_ready == 0
        self._sum_ready += num_ready

    def take_interval(self) -> dict[str, float]:
        """Scalars `queue/ready_at_take` (mean) and `queue/empty_at_take` (share); starts a new interval."""
        num_takes, num_empty, sum_ready = self._num_takes, self._num_empty, self._sum_ready
        self._num_takes, self._num_empty, self._sum_ready = 0, 0, 0
        if not num_takes:
            return {}
        return {"queue/ready_at_take": sum_ready / num_takes, "queue/empty_at_take": num_empty / num_takes}
