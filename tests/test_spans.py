"""Spans survive their file, and cost a rank little."""

import json
import os
import struct
import time
from pathlib import Path

import pytest
from helpers_profiling import head, read_spans

from dflash.profiling.spans import NONE, Span, SpanWriter, span_files


def test_spans_come_back_as_they_were(tmp_path: Path) -> None:
    writer = SpanWriter(tmp_path, head(0, "target"))
    writer.on_span("forward", 1.5, 1.75, (7, 2))
    writer.on_span("forward/attention", 1.6, 1.7)
    writer.close()
    again = SpanWriter(tmp_path, head(0, "target", epoch_s=2000.0))  # a second launch of the same run
    again.on_span("send", 0.25, 0.5, (7, 2))
    again.close()
    (path,) = span_files(tmp_path)
    first, second = read_spans(path)
    assert first[0] == head(0, "target") and second[0].clock.epoch_s == 2000.0
    assert first[1] == [
        Span("forward", 1_500_000_000, 250_000_000, 7, 2),
        Span("forward/attention", 1_600_000_000, 100_000_000, NONE, NONE),
    ]
    assert second[1] == [Span("send", 250_000_000, 250_000_000, 7, 2)]


def test_a_killed_ranks_file_is_read_up_to_its_last_whole_piece(tmp_path: Path) -> None:
    writer = SpanWriter(tmp_path, head(0, "target"))
    for _ in range(2):
        writer.on_span("forward", 1.0, 2.0)
        writer.flush()
    (path,) = span_files(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    ((_, spans),) = read_spans(path)
    assert len(spans) == 1
    path.write_bytes(b"\x07" * 40)
    with pytest.raises(ValueError, match="target-0.spans"):
        list(read_spans(path))


def test_a_launch_goes_on_behind_the_last_whole_piece_of_the_one_before(tmp_path: Path) -> None:
    """Wherever a kill has torn the file, or a machine that went down has left zeros at its end."""
    writer = SpanWriter(tmp_path, head(0, "target"))
    ends, expected = [0], []
    (tmp_path / "spans" / "target-0.spans").touch()
    (path,) = span_files(tmp_path)
    for number, name in enumerate(("forward", "forward", "send"), start=1):
        writer.on_span(name, number, number + 0.5)
        writer.flush()
        ends.append(path.stat().st_size)
        expected.append(Span(name, number * 10**9, 500_000_000, NONE, NONE))
    writer.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        for torn in (whole[:size], whole[:size] + bytes(100))[: 1 + (size in ends)]:
            path.write_bytes(torn)
            again = SpanWriter(tmp_path, head(0, "target", launch=8))
            again.on_span("pack", 5.0, 6.0)
            again.close()
            *first, (second_head, second) = read_spans(path)
            assert second_head.launch == 8 and second == [Span("pack", 5 * 10**9, 10**9, NONE, NONE)]
            kept = [span for _, spans in first for span in spans]
            assert kept == expected[: sum(end <= size for end in ends[1:])]
    assert kept == expected


@pytest.mark.parametrize(
    "piece",
    [
        (3, struct.pack("<qqiiH", 1, 2, 3, 4, 99)),  # no such name
        (3, bytes(25)),
        (3, bytes(26)),  # what zeros make of a span
        (3, struct.pack("<qqiiH", 1, -2, 3, 4, 0)),
        (2, b"\0"),
        (2, b"\0\0\xff\xff"),
        (9, b""),
        (1, b"{}"),
        (1, b"[]"),
        (1, b'{"version": 1}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, piece: tuple[int, bytes]) -> None:
    writer = SpanWriter(tmp_path, head(0, "target"))
    writer.on_span("forward", 1.0, 2.0)
    writer.close()
    (path,) = span_files(tmp_path)
    kind, data = piece
    with path.open("ab") as file:
        file.write(struct.pack("<BI", kind, len(data)) + data)
    with pytest.raises(ValueError, match="target-0.spans: "):
        list(read_spans(path))


def test_spans_files_are_bounded_and_keep_the_latest(tmp_path: Path) -> None:
    max_bytes = 1 << 18
    writer = SpanWriter(tmp_path, head(0, "target"), max_bytes)
    count = 40_000
    for number in range(count):
        writer.on_span("even" if number % 2 == 0 else "odd", number, number + 0.5, (number, NONE))
    writer.close()
    older, newer = span_files(tmp_path)
    assert older.name == "target-0.old.spans" and newer.name == "target-0.spans"
    block = 2048 * 26 + 1000
    assert sum(path.stat().st_size for path in (older, newer)) <= max_bytes + 2 * block
    kept = [span for path in (older, newer) for _, spans in read_spans(path) for span in spans]
    assert [span.index for span in kept] == list(range(count - len(kept), count))
    assert len(kept) * 26 >= max_bytes // 2
    assert all(span.name == ("even" if span.index % 2 == 0 else "odd") for span in kept)


def test_a_full_disk_costs_spans_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spans").write_text("a file where the folder should be")
    writer = SpanWriter(tmp_path, head(0, "target"))
    for _ in range(5000):
        writer.on_span("forward", 1.0, 2.0)
    writer.close()
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_spans_cost_less_than_lines_of_json_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in turns on this machine, whatever its speed; and the file is touched once a block."""
    num_writes, original = 0, os.write

    def write(descriptor: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        return original(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    writer = SpanWriter(tmp_path, head(0, "target"))
    best_s, json_s = float("inf"), float("inf")
    for _ in range(10):
        started_s = time.perf_counter()
        for _ in range(4096):
            writer.on_span("forward", 1.0, 2.0, (3, 4))
        between_s = time.perf_counter()
        for _ in range(4096):
            json.dumps({"name": "forward", "start": 1.0, "end": 2.0, "g": 3, "step": 4})
        best_s, json_s = min(best_s, between_s - started_s), min(json_s, time.perf_counter() - between_s)
    writer.close()
    assert num_writes <= 20 and best_s < json_s
