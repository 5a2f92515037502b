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

_FILE_VERSION = "brain.Event:2"


class Charts:
    """Scalars of one rank in an event file of its own; a disk that is full costs scalars, never the run."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """`first_step`: TensorBoard hides what earlier files of the folder hold from this step on."""
        self._file = AppendFile(folder / _file_name(folder))
        self._records = RecordWriter(self._file)
        self._write(Event(file_version=_FILE_VERSION))
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, tag: str, value: float, step: int) -> None:
        """Add a scalar that the next `flush` writes."""
        self._write(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())


def _file_name(folder: Path) -> str:
    """Name that sorts behind those of earlier launches, whatever the clock says: TensorBoard reads in that order."""
    known = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.glob("events.out.tfevents.*")]
    latest = max((int(found[1]) for found in known if found), default=0)
    return f"events.out.tfevents.{max(int(time.time()), latest + 1):010d}.{socket.gethostname()}.{os.getpid()}.0"
