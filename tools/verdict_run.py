"""What a run has left of its ranks' figures, and which part of it shows the steady state."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

WAITING = ("starved", "blocked")
WARM_UP = ("prepare", "load", "connect")
_LARGEST = 1e18  # beyond it a line is damaged
ASIDE = ("torch_profiler",)  # neither work nor waiting: what a look at the run costs
_TOKENS = "throughput/tokens_per_s"
_CPU, _CORE_WAITS = "process/cpu_percent", "process/main_thread_waits_for_core_percent"
_MAIN_CPU = "process/thread_cpu_percent/main"


@dataclass(frozen=True, slots=True)
class Interval:
    """A stretch of one rank's time: seconds by top-level stage, and what else was written with it."""

    start_s: float  # time of day
    stages: dict[str, float]
    counts: dict[str, int]
    launch_s: dict[str, float]  # the host's part of each stage
    num_tokens: float
    gauges: dict[str, float]

    @property
    def wall_s(self) -> float:
        return sum(self.stages.values())

    @property
    def warm_up_s(self) -> float:
        return sum(self.stages.get(stage, 0.0) for stage in WARM_UP)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds by stage of all that is neither waiting nor warm-up nor aside, waits for a core taken off.

        A rank that sleeps hardly waits for a core, so those waits lie in the stages in which it is busy or warms up;
        and for as long as its main thread computed, it had one.
        """
        stages = {stage: s for stage, s in self.stages.items() if stage not in WAITING + WARM_UP + ASIDE}
        runnable_s = sum(stages.values()) + self.warm_up_s
        waits_s, computed_s = (self.gauges.get(tag, 0.0) / 100 * self.wall_s for tag in (_CORE_WAITS, _MAIN_CPU))
        had_s = min(max(runnable_s - waits_s, computed_s, 0.0), runnable_s)
        on_core = had_s / runnable_s if runnable_s > 0 else 1.0
        return {stage: s * on_core for stage, s in stages.items()}

    @property
    def cpu_s(self) -> float | None:
        """What all threads of the rank have computed on cores; None where the rank did not tell."""
        return self.gauges[_CPU] / 100 * self.wall_s if _CPU in self.gauges else None

    @property
    def middle_s(self) -> float:
        return self.start_s + self.wall_s / 2


@dataclass(slots=True)
class RankRun:
    """One rank in the run's last launch."""

    name: str
    role: str
    started_s: float
    ranks: tuple[str, ...]  # of that launch
    host: str
    cores: frozenset[int] | None  # of its host that it may run on
    core_quota: float | None
    intervals: list[Interval] = field(default_factory=list)
    has_ended: bool = False  # then its last interval holds the end of the run, not its course

    @property
    def rank(self) -> int:
        return int(self.name.rsplit("-", 1)[1])


@dataclass(slots=True)
class RunFigures:
    """The last launch of a run: `ranks` hold its steady intervals alone, unless there are none."""

    ranks: list[RankRun]
    is_steady: bool
    warm_up_share: float  # of all time of all ranks
    num_bad_lines: int
    config: dict[str, Any]

    def group(self, role: str) -> list[RankRun]:
        return [rank for rank in self.ranks if rank.role == role]

    @property
    def num_cores(self) -> float | None:
        """Cores of all machines together; None when some rank did not tell."""
        hosts: dict[str, set[int]] = {}
        quotas: dict[str, float] = {}
        for rank in self.ranks:
            if rank.cores is None:
                return None
            hosts.setdefault(rank.host, set()).update(rank.cores)
            quotas[rank.host] = math.inf if rank.core_quota is None else rank.core_quota
        return sum(min(len(cores), quotas[host]) for host, cores in hosts.items())


def read_run(run_dir: Path) -> RunFigures:
    """Figures of the last launch of a run; raises ValueError, with what lacks, when there are none."""
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such folder")
    paths = sorted((run_dir / "profile").glob("*.jsonl"))
    if not paths:
        raise ValueError(f"{run_dir}: has no profile/*.jsonl; a run writes them unless it has profiling=off")
    bad_lines = [0]
    ranks = [rank for path in paths if (rank := _read_rank(path, bad_lines)) is not None]
    if not any(rank.intervals for rank in ranks):
        raise ValueError(f"{run_dir}: no rank has ended an interval yet (profiling.interval_s says how long one is)")
    # A run that was resumed with other ranks has left files of ranks that are no more.
    present = max(ranks, key=lambda rank: rank.started_s).ranks
    ranks = sorted((rank for rank in ranks if rank.name in present), key=lambda rank: rank.rank)
    silent = [name for name in present if not any(rank.name == name and rank.intervals for rank in ranks)]
    if silent:
        raise ValueError(f"{run_dir}: {', '.join(silent)} has ended no interval yet")
    _check_roles(run_dir, ranks)
    whole_s = sum(interval.wall_s for rank in ranks for interval in rank.intervals)
    warm_up_s = sum(interval.warm_up_s for rank in ranks for interval in rank.intervals)
    is_steady = _keep_steady(ranks)
    share = warm_up_s / max(whole_s, 1e-9)
    return RunFigures(ranks, is_steady, share, bad_lines[0], _read_config(run_dir))


def _check_roles(run_dir: Path, ranks: list[RankRun]) -> None:
    roles = {rank.role for rank in ranks}
    if roles not in ({"target", "drafter"}, {"colocated"}):
        raise ValueError(f"{run_dir}: profile/ has figures of {', '.join(sorted(roles))} ranks only")


def _read_rank(path: Path, bad_lines: list[int]) -> RankRun | None:
    """The last launch in one rank's file; None when it holds none."""
    rank: RankRun | None = None
    for record in _records(path, bad_lines):
        try:
            kind = record["kind"]
            if kind == "launch":
                rank = _launch(record)
            elif kind == "interval" and rank is not None:
                rank.intervals.append(_interval(record))
            elif kind == "run" and rank is not None:
                rank.has_ended = True
        except (KeyError, TypeError, ValueError, AttributeError):
            bad_lines[0] += 1
    return rank


def _records(path: Path, bad_lines: list[int]) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:  # the last one of a killed rank, cut in two
            bad_lines[0] += 1
            continue
        yield record


def _launch(record: dict[str, Any]) -> RankRun:
    cores = None if record["cores"] is None else _core_numbers(record["cores"])
    started_s, ranks = _amount(record["time"]), tuple(record["ranks"])
    return RankRun(record["name"], record["role"], started_s, ranks, record["host"], cores, record["core_quota"])


def _core_numbers(text: str) -> frozenset[int]:
    """Numbers of a list such as 0-3,8."""
    ends = [part.partition("-") for part in text.split(",")]
    return frozenset(n for first, _, last in ends for n in range(int(first), int(last or first) + 1))


def _interval(record: dict[str, Any]) -> Interval:
    stages = {path: stage for path, stage in record["stages"].items() if "/" not in path}
    totals = {path: _amount(stage["total_s"]) for path, stage in stages.items()}
    wall_s = sum(totals.values())
    return Interval(
        start_s=_amount(record["time"]) - wall_s,
        stages=totals,
        counts={path: int(_amount(stage["count"])) for path, stage in stages.items()},
        launch_s={path: _amount(stage["launch_s"]) for path, stage in stages.items()},
        num_tokens=_amount(record["rates"].get(_TOKENS, 0.0)) * wall_s,
        gauges={tag: _amount(value) for tag, value in record["gauges"].items()},
    )


def _amount(value: Any) -> float:
    """A number of a record; raises ValueError for what cannot be one."""
    amount = float(value)
    if not 0 <= amount < _LARGEST:
        raise ValueError(value)
    return amount


def _keep_steady(ranks: list[RankRun]) -> bool:
    """Drop what lies before the last rank has warmed up and after the first one has begun to end.

    Returns False, and drops nothing, when some rank would have nothing left.
    """
    begin_s = max(i.start_s + i.wall_s for rank in ranks for i in rank.intervals[:1])
    for rank in ranks:
        # A drafter without tokens yet still waits for the queue to fill up to where training starts.
        idle = takewhile(lambda interval: interval.num_tokens <= 0, rank.intervals)
        warm = [i.start_s + i.wall_s for i in [*(i for i in rank.intervals if i.warm_up_s > 0), *idle]]
        begin_s = max([begin_s, *warm])
    end_s = min((rank.intervals[-1].start_s for rank in ranks if rank.has_ended), default=float("inf"))
    steady = [[i for i in rank.intervals if begin_s <= i.middle_s <= end_s] for rank in ranks]
    if not all(steady):
        return False
    for rank, intervals in zip(ranks, steady, strict=True):
        rank.intervals = intervals
    return True


def _read_config(run_dir: Path) -> dict[str, Any]:
    """The run's configuration, {} when it cannot be read: without it some splits cannot be ruled out."""
    try:
        config = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}
