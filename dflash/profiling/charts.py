"""TensorBoard scalars without TensorBoard's writer, whose thread dies of the first full disk."""

import os
import re
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from dflash.profiling.files import AppendFile

WHOLE_PLACE, RANKS_PLACE, BANDS_PLACE = range(3)  # the order of runs on TensorBoard's pages
_FILE_VERSION = "brain.Event:2"


class Charts:
    """Scalars of one rank in an event file of its own; a disk that is full costs scalars, never the run."""

    def __init__(self, folder: Path, first_step: int, place: int = RANKS_PLACE) -> None:
        """`first_step`: TensorBoard hides what earlier files of the folder hold from this step on.

        `place`: of this run among all, and so the turn in which it gets its colour; by name within one place.
        """
        self._file = AppendFile(folder / _file_name(folder), is_quiet=place != RANKS_PLACE)
        self._records = RecordWriter(self._file)
        # TensorBoard orders runs by the time of their first event, which says nothing else. With a clock's time, a run
        # would have another colour in each launch, and two neighbours in a chart by chance the same.
        self._write(Event(file_version=_FILE_VERSION), wall_time=float(place))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, tag: str, value: float, step: int, wall_time: float | None = None) -> None:
        """Add a scalar that the next `flush` writes; `wall_time`: Unix time it belongs to, by default now."""
        self.add_summary(Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step, wall_time)

    def add_summary(self, summary: Summary, step: int, wall_time: float | None = None) -> None:
        """Add something else than a scalar, such as a layout."""
        self._write(Event(step=step, summary=summary), wall_time)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event, wall_time: float | None = None) -> None:
        event.wall_time = time.time() if wall_time is None else wall_time
        self._records.write(event.SerializeToString())


def _file_name(folder: Path) -> str:
    """Name that sorts behind those of earlier launches, whatever the clock says: TensorBoard reads in that order."""
    known = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.glob("events.out.tfevents.*")]
    latest = max((int(found[1]) for found in known if found), default=0)
    return f"events.out.tfevents.{max(int(time.time()), latest + 1):010d}.{socket.gethostname()}.{os.getpid()}.0"
