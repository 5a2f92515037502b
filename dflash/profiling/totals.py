"""What becomes of the times of a stage: exact figures of one interval, bounded memory over a run."""

import math
from array import array
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

OTHER = "other"  # the time between stages
QUANTILE = 0.95

# Buckets of a run's durations, each 5 % wider than the one before: a quantile read from their middles is off by at most
# 2.5 % between 1 us and 11 days.
_GROWTH = 1.05
_SHORTEST_S, _LONGEST_S = 1e-6, 1e6
_NUM_BUCKETS = math.ceil(math.log(_LONGEST_S / _SHORTEST_S) / math.log(_GROWTH)) + 1


@dataclass(frozen=True, slots=True)
class StageTotals:
    """One stage over an interval or a run.

    `total_s` is the time spent in it, parts of occurrences under way included; `launch_s` is what the host spent
    in it, which on CUDA is the launching of its work, and on CPU the same as `total_s`. `count`, `mean_s`, `max_s` and
    `p95_s` are of the occurrences that ended, each in its whole length: zeros when none did.
    """

    count: int
    total_s: float
    launch_s: float
    mean_s: float
    max_s: float
    p95_s: float

    def as_json(self) -> dict[str, float]:
        """Its fields by name, to a tenth of a microsecond."""
        return {name: round(value, 7) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "StageTotals":
        """The reverse of `as_json`; raises KeyError when a field is missing."""
        return cls(**{f.name: record[f.name] for f in fields(cls)})


@dataclass(slots=True)
class Stretch:
    """Times of one stage in the interval under way."""

    total_s: float
    launch_s: float
    ended: array  # seconds of each occurrence that ended

    @classmethod
    def empty(cls) -> "Stretch":
        return cls(0.0, 0.0, array("d"))

    def totals(self) -> StageTotals:
        ended = np.frombuffer(self.ended) if self.ended else np.zeros(0)
        if not ended.size:
            return StageTotals(0, self.total_s, self.launch_s, 0.0, 0.0, 0.0)
        place = math.ceil(QUANTILE * ended.size) - 1  # the nearest-rank definition
        p95_s = float(np.partition(ended, place)[place])
        return StageTotals(ended.size, self.total_s, self.launch_s, float(ended.mean()), float(ended.max()), p95_s)


class RunStage:
    """Times of one stage over a run; its memory does not grow."""

    def __init__(self) -> None:
        self._count, self._total_s, self._launch_s, self._ended_s, self._max_s = 0, 0.0, 0.0, 0.0, 0.0
        self._buckets = np.zeros(_NUM_BUCKETS, dtype=np.int64)

    def add(self, stretch: Stretch) -> None:
        self._total_s += stretch.total_s
        self._launch_s += stretch.launch_s
        if not stretch.ended:
            return
        ended = np.frombuffer(stretch.ended)
        self._count += ended.size
        self._ended_s += float(ended.sum())
        self._max_s = max(self._max_s, float(ended.max()))
        places = np.log(np.clip(ended, _SHORTEST_S, _LONGEST_S) / _SHORTEST_S) / math.log(_GROWTH)
        self._buckets += np.bincount(places.astype(np.int64), minlength=_NUM_BUCKETS)

    def totals(self) -> StageTotals:
        mean_s = self._ended_s / self._count if self._count else 0.0
        return StageTotals(self._count, self._total_s, self._launch_s, mean_s, self._max_s, self._p95_s())

    def _p95_s(self) -> float:
        if not self._count:
            return 0.0
        place = math.ceil(QUANTILE * self._count)
        if place == self._count:
            return self._max_s
        bucket = int(np.searchsorted(np.cumsum(self._buckets), place))
        return min(_SHORTEST_S * _GROWTH ** (bucket + 0.5), self._max_s)


def top_level(totals: dict[str, StageTotals]) -> dict[str, StageTotals]:
    """The stages that lie in no other, of which the time is a sum."""
    return {path: stage for path, stage in totals.items() if "/" not in path}


def wall_s(totals: dict[str, StageTotals]) -> float:
    """Sum of the top-level stages, in seconds."""
    return sum(stage.total_s for stage in top_level(totals).values())


def shares(totals: dict[str, StageTotals]) -> dict[str, float]:
    """Share of the wall time of each top-level stage; empty when no time has passed."""
    whole = wall_s(totals)
    return {path: stage.total_s / whole for path, stage in top_level(totals).items()} if whole else {}
