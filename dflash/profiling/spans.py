"""Every occurrence of every stage, in a compact file per rank that `tools/trace.py` turns into a timeline.

A file is a row of pieces: kind (u8), number of bytes (u32), bytes; all numbers little-endian. A HEAD (JSON) starts
each launch, a NAME (u16 id, text) comes before the first span that bears it, SPANS holds records of 26 bytes.
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dflash.profiling.files import AppendFile

FOLDER = "spans"
EDGE_PREFIX = "edge/"  # spans of transfers, which run beside the stages, are named edge/<the other rank>
SIDE_PREFIX = "side/"  # spans of work on a stream of its own are named side/<its stage>
DEFAULT_MAX_BYTES = 32 << 20  # 1.3 million spans
_VERSION = 1
_KINDS = _HEAD, _NAME, _SPANS = 1, 2, 3
_PIECE = struct.Struct("<BI")
_NAME_ID = struct.Struct("<H")
_SPAN = struct.Struct("<qqiiH")  # start and duration in ns, micro-batch g, step, id of the name
_SPANS_PER_BLOCK = 2048
NONE = -1
NO_SUBJECT = (NONE, NONE)  # no micro-batch, no step


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """What leads from a rank's clock to the first rank's: `t + offset_s`, right to within `error_s`.

    `epoch_s` leads on to the wall clock of the first rank, the same for all ranks of a launch.
    """

    offset_s: float
    error_s: float
    epoch_s: float


@dataclass(frozen=True, slots=True)
class SpansHead:
    """Whose spans follow, and how their clock stands against the first rank's.

    `launch` is a number that all ranks of one launch share, and no two launches of a run.
    """

    rank_name: str
    role: str
    rank: int
    pid: int
    launch: int
    clock: ClockOffset


@dataclass(frozen=True, slots=True)
class Span:
    """One occurrence of a stage; times in ns of the rank's own clock; g and step are -1 where there is none."""

    name: str
    start_ns: int
    duration_ns: int
    index: int
    step: int


class SpanWriter:
    """Appends one rank's spans to RUN_DIR/spans/<rank>.spans, a block at a time.

    A span costs its packing into a buffer of 52 KiB; one write a block is all the hot path sees of the file, and what
    cannot be written is lost, never raised. The file is cut in two halves: when the newer one is full it takes the
    place of the older, `<rank>.old.spans`, so at most `max_bytes` are kept, and at least the latest half of them.
    It goes on behind what an earlier launch of the run has left, less the piece which that launch was killed in.
    """

    def __init__(self, run_dir: Path, head: SpansHead, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._path = run_dir / FOLDER / f"{head.rank_name}.spans"
        self._head = head
        self._half_bytes = max_bytes // 2
        self._ids: dict[str, int] = {}
        self._block = bytearray(_SPAN.size * _SPANS_PER_BLOCK)
        self._num_in_block = 0
        self._num_bytes = _cut_torn_piece(self._path)
        self._file = AppendFile(self._path)
        self._begin()

    def on_span(self, path: str, start_s: float, end_s: float, subject: tuple[int, int] = NO_SUBJECT) -> None:
        """Record one occurrence of a stage, times in seconds of `time.perf_counter`; `subject` is (g, step)."""
        index, step = subject
        name = self._ids.get(path)
        if name is None:
            name = self._new_name(path)
        start_ns = round(start_s * 1e9)
        # Rounded at both ends alike, so that a stage never sticks out of the one around it.
        duration_ns = round(end_s * 1e9) - start_ns
        _SPAN.pack_into(self._block, self._num_in_block * _SPAN.size, start_ns, duration_ns, index, step, name)
        self._num_in_block += 1
        if self._num_in_block == _SPANS_PER_BLOCK:
            self.flush()

    def flush(self) -> None:
        """Write what is in the buffer."""
        if self._num_in_block:
            if self._num_bytes >= self._half_bytes:
                self._turn_over()
            self._piece(_SPANS, bytes(memoryview(self._block)[: self._num_in_block * _SPAN.size]))
            self._num_in_block = 0
        self._file.flush()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _begin(self) -> None:
        self._piece(_HEAD, json.dumps({"version": _VERSION, **asdict(self._head)}).encode())
        for path, name in self._ids.items():
            self._piece(_NAME, _NAME_ID.pack(name) + path.encode())

    def _new_name(self, path: str) -> int:
        name = self._ids[path] = len(self._ids)
        self._piece(_NAME, _NAME_ID.pack(name) + path.encode())
        return name

    def _turn_over(self) -> None:
        self._file.close()
        with suppress(OSError):  # then the newer half grows on, which is better than losing it
            self._path.replace(_old(self._path))
            self._num_bytes = 0
        self._file = AppendFile(self._path)
        self._begin()

    def _piece(self, kind: int, data: bytes) -> None:
        piece = _PIECE.pack(kind, len(data)) + data
        self._num_bytes += len(piece)
        self._file.write(piece)


def _cut_torn_piece(path: Path) -> int:
    """Shorten a file to its whole pieces, if there is one, so that more can follow; returns how many bytes it has."""
    num_bytes = 0
    with suppress(OSError), path.open("r+b") as file:  # most often there is none
        size = file.seek(0, os.SEEK_END)
        while num_bytes + _PIECE.size <= size:
            file.seek(num_bytes)
            kind, length = _PIECE.unpack(file.read(_PIECE.size))
            end = num_bytes + _PIECE.size + length
            # A machine that went down may leave zeros where it had yet to write.
            if kind not in _KINDS or end > size:
                break
            num_bytes = end
        file.truncate(num_bytes)
    return num_bytes


def _old(path: Path) -> Path:
    return path.with_suffix(".old.spans")


def span_files(run_dir: Path) -> list[Path]:
    """Files of all ranks, a rank's older half before its newer one."""
    return sorted(
        (run_dir / FOLDER).glob("*.spans"), key=lambda path: (path.name.split(".")[0], ".old." not in path.name)
    )


def read_blocks(path: Path) -> Iterator[tuple[SpansHead, Iterator[Span]]]:
    """(head, spans) of each block of a file, piece by piece; raises ValueError for what is no such file.

    A launch's head comes once without any spans first. Those of a block can be had until the next one is asked for. The
    last piece may be torn, since a rank can be killed in the middle of it: it is left out.
    """
    data = memoryview(path.read_bytes())
    if data and data[0] != _HEAD:
        raise ValueError(f"{path}: does not start as a spans file does")
    head: SpansHead | None = None
    names: dict[int, str] = {}
    for kind, payload in _pieces(data):
        if kind == _HEAD:
            head, names = _parse_head(path, bytes(payload)), {}
            yield head, iter(())
        elif kind == _NAME:
            _parse_name(path, payload, names)
        elif kind == _SPANS:
            assert head is not None
            yield head, _parse_spans(path, payload, names)
        else:
            raise ValueError(f"{path}: holds a piece of unknown kind {kind}")


def _pieces(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    place = 0
    while place + _PIECE.size <= len(data):
        kind, num_bytes = _PIECE.unpack_from(data, place)
        place += _PIECE.size
        if place + num_bytes > len(data):
            return
        yield kind, data[place : place + num_bytes]
        place += num_bytes


def _parse_spans(path: Path, payload: memoryview, names: dict[int, str]) -> Iterator[Span]:
    try:
        for start_ns, duration_ns, index, step, name in _SPAN.iter_unpack(payload):
            if duration_ns < 0 or start_ns == duration_ns == 0:  # zeros are what a lost page reads as
                raise ValueError(f"{path}: is damaged: it holds a span of {duration_ns} ns from {start_ns} ns on")
            yield Span(names[name], start_ns, duration_ns, index, step)
    except (struct.error, KeyError) as error:
        raise ValueError(f"{path}: is damaged: it holds spans of no whole length, or without a name") from error


def _parse_name(path: Path, payload: memoryview, names: dict[int, str]) -> None:
    try:
        names[_NAME_ID.unpack_from(payload)[0]] = bytes(payload[_NAME_ID.size :]).decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is damaged: it holds a name that is none") from error


def _parse_head(path: Path, text: bytes) -> SpansHead:
    try:
        values = json.loads(text)
        version = values.pop("version")
        if version != _VERSION:
            raise ValueError(f"version {version}, this program reads version {_VERSION}")
        return SpansHead(**{**values, "clock": ClockOffset(**values["clock"])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: does not start as a spans file does: {error}") from error
