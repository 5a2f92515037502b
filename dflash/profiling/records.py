"""A rank's figures as lines of JSON in the run folder, for other ranks and for tools: `profile/<rank>.jsonl`.

Each launch of the rank begins with a line of kind "launch"; a line of kind "interval" follows for each interval, and
one of kind "run", for all of the launch, when the rank ends. They travel by file, since a file outlives its rank, needs
no peer that listens, and lies in a folder that all machines share anyway.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.profiling.files import AppendFile
from dflash.profiling.gauges import machine_facts
from dflash.profiling.totals import StageTotals

_TAIL_BYTES = 1 << 16
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank wrote last: totals by path, of an interval or of its whole launch."""

    name: str
    role: str
    stages: dict[str, StageTotals]


def record_path(run_dir: Path, name: str) -> Path:
    return run_dir / "profile" / f"{name}.jsonl"


class RecordFile:
    """The lines of one rank; a disk that is full costs lines, never the run."""

    def __init__(self, run_dir: Path, name: str, role: str, first_step: int, ranks: Sequence[str]) -> None:
        """`ranks`: names of all ranks of this launch, since the folder may hold files of ranks that are no more."""
        self._name, self._role = name, role
        self._file = AppendFile(record_path(run_dir, name))
        if not _ends_with_a_line(record_path(run_dir, name)):
            self._file.write(b"\n")  # behind half a line of a rank that was killed
        self._write("launch", {"first_step": first_step, "ranks": list(ranks), **machine_facts()})

    def interval(
        self, step: int, stages: dict[str, StageTotals], rates: dict[str, float], gauges: dict[str, float]
    ) -> None:
        self._write("interval", {"step": step, "stages": _plain(stages), "rates": rates, "gauges": gauges})

    def run(self, step: int, stages: dict[str, StageTotals]) -> None:
        self._write("run", {"step": step, "stages": _plain(stages)})

    def close(self) -> None:
        self._file.close()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        self._file.line(
            json.dumps({"kind": kind, "name": self._name, "role": self._role, "time": time.time()} | values)
        )


def _ends_with_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
    except OSError:  # there is none yet, or it is empty
        return True


def _plain(stages: dict[str, StageTotals]) -> dict[str, Any]:
    return {path: stage.as_json() for path, stage in stages.items()}


def last_figures(run_dir: Path, name: str, kind: str) -> RankFigures | None:
    """The newest line of a kind that a rank has written in its present launch, None while there is none."""
    for record in _newest_first(record_path(run_dir, name)):
        if record.get("kind") == "launch":
            return None
        if record.get("kind") == kind:
            stages = {path: StageTotals.from_json(stage) for path, stage in record["stages"].items()}
            return RankFigures(record["name"], record["role"], stages)
    return None


def wait_for_figures(run_dir: Path, names: Iterable[str], patience_s: float) -> list[RankFigures]:
    """Whole launches of the ranks of these names, without those that have not ended after `patience_s`."""
    names, deadline_s = list(names), time.monotonic() + patience_s
    while True:
        found = [figures for name in names if (figures := last_figures(run_dir, name, "run")) is not None]
        if len(found) == len(names) or time.monotonic() > deadline_s:
            return found
        time.sleep(_POLL_S)


def _newest_first(path: Path) -> Iterator[dict[str, Any]]:
    """The last lines of a file that another process may be writing; nothing when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return
    for line in reversed(lines[:-1]):  # behind the last line end there is nothing, or a line under way
        try:
            record = json.loads(line)
        except ValueError:  # the first one, cut in two
            continue
        if isinstance(record, dict):
            yield record
