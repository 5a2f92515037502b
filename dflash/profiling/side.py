"""How long work takes on a stream of its own, beside the stages that partition the main stream's time."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dflash.profiling.spans import NONE, SIDE_PREFIX, SpanWriter
from dflash.profiling.stats import ProfileStats


class SideTimes:
    """Times one kind of work on a side stream of CUDA, of which the stage of its name shows the launching only.

    An event before the work and one behind it, both on its stream, are read once the device has reached them. No
    figure of a rank's stages contains these: the main stream works at the same time.
    """

    def __init__(
        self, name: str, role: str, device: torch.device, stream: torch.cuda.Stream, spans: SpanWriter | None = None
    ) -> None:
        self._name, self._tag, self._spans = name, f"{SIDE_PREFIX}{role}/{name}", spans
        self._timer = ProfileStats(device, on_span=self._on_span, stream=stream)
        self._ended_s: list[float] = []

    @contextmanager
    def timed(self, index: int) -> Iterator[None]:
        """What is enqueued on the stream inside is the work on micro-batch g."""
        self._timer.collect()
        self._timer.subject = (index, NONE)
        with self._timer.stage(self._name):
            yield

    def take_interval(self) -> dict[str, float]:
        """Scalars `side/<role>/<name>_ms` (mean) and `_max_ms` of what was found to have ended; starts a new interval.

        Empty when nothing has.
        """
        # What it sums up on its way is not wanted, and must not grow.
        self._timer.cut()
        self._timer.take_intervals()
        ended_s, self._ended_s = self._ended_s, []
        if not ended_s:
            return {}
        return {f"{self._tag}_ms": sum(ended_s) / len(ended_s) * 1e3, f"{self._tag}_max_ms": max(ended_s) * 1e3}

    def _on_span(self, path: str, start_s: float, end_s: float, subject: tuple[int, int]) -> None:
        self._ended_s.append(end_s - start_s)
        if self._spans is not None:
            self._spans.on_span(SIDE_PREFIX + path, start_s, end_s, subject)
