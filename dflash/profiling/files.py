"""Output that a run must not die of: log lines, charts and the console, on a disk that may be full or gone."""

import io
import os
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_MAX_WAITING_BYTES = 1 << 20


class AppendFile:
    """A file that grows by whole pieces (lines, records), for something that must go on whatever becomes of the file.

    No method raises OSError. A piece that cannot be written (full disk, quota, read-only or vanished folder) is told
    on stderr, once per file; it waits for the next attempt, beyond 1 MiB of waiting pieces new ones are dropped. What
    a failed attempt left is cut off again, so that no piece is ever in the file by half.
    """

    def __init__(self, path: Path, *, is_quiet: bool = False) -> None:
        """`is_quiet`: a neighbour in the same folder tells what cannot be written."""
        self._path = path
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._torn_at: int | None = None
        self._has_warned = is_quiet
        with suppress(OSError):  # then opening fails, too, and tells why
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, piece: bytes) -> None:
        """Add a piece that the next `flush` writes."""
        if self._num_waiting_bytes + len(piece) <= _MAX_WAITING_BYTES:
            self._waiting.append(piece)
            self._num_waiting_bytes += len(piece)

    def line(self, text: str) -> None:
        """Write a line now."""
        self.write(text.encode("utf-8", "replace") + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write what waits, or leave the file as it was."""
        if not self._waiting:
            return
        try:
            self._write_all(self._open(), b"".join(self._waiting))
        except OSError as error:
            self._warn(error)
        else:
            self._waiting.clear()
            self._num_waiting_bytes = 0

    def close(self) -> None:
        """Try once more to write what waits, and need no descriptor until the next piece."""
        self.flush()
        self._close()

    def _open(self) -> int:
        """Descriptor of the file, opened anew where somebody has deleted it, and without a piece's first half."""
        if self._descriptor is not None and os.fstat(self._descriptor).st_nlink == 0:
            self._close()
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._torn_at is not None:
            os.ftruncate(self._descriptor, self._torn_at)
            self._torn_at = None
        return self._descriptor

    def _write_all(self, descriptor: int, data: bytes) -> None:
        size_before = os.fstat(descriptor).st_size
        num_written = 0
        try:
            while num_written < len(data):
                num_written += os.write(descriptor, data[num_written:])
        except OSError:
            if num_written:
                self._torn_at = size_before
                with suppress(OSError):  # then it is tried again before the next piece
                    os.ftruncate(descriptor, size_before)
                    self._torn_at = None
            raise

    def _close(self) -> None:
        if self._descriptor is not None:
            with suppress(OSError):  # a network file system may tell only now that its disk is full
                os.close(self._descriptor)
        self._descriptor = self._torn_at = None

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        reason = error.strerror or error
        text = f"warning: {self._path} cannot be written: {reason}; training goes on, and writing is tried again"
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


class _LossyStream(io.TextIOBase):
    """Standard output or error, unbuffered, that loses what cannot be written instead of raising."""

    def __init__(self, stream: TextIO) -> None:
        self._descriptor = stream.fileno()
        self._encoding = stream.encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "replace")
        with suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]
        return len(text)


def protect_console() -> None:
    """Keep standard output and error from ending the run: a full disk under a log, a terminal or a pipe that is gone.

    Nothing stays in a buffer, which would fail once more when the interpreter ends.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, _LossyStream):
            with suppress(OSError, ValueError):
                stream.flush()
            setattr(sys, name, _LossyStream(stream))
