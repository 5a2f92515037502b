"""Merge the spans of all ranks of a run into one timeline for https://ui.perfetto.dev or chrome://tracing.

python tools/trace.py RUN_DIR [--output FILE] [--from-s S] [--seconds N]

Needs a run with profiling=full. Each rank is a process, with its stages, its micro-batches and its steps one under the
other; an arrow leads from the target's `send` of a micro-batch to the drafter's first work on it. The clocks of all
ranks are brought together by the offsets that were measured when they met.
"""

import argparse
import gzip
import json
import signal
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

# Run as a script, Python puts tools/ on the path, not the repository.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dflash.profiling.spans import EDGE_PREFIX, FOLDER, NONE, SIDE_PREFIX, SpansHead, read_blocks, span_files

SENDING = ("send", "pack")  # where a micro-batch leaves the target; in one process it is only packed
WAITING = ("starved", "blocked")
STAGES, MICRO_BATCHES, STEPS, FIRST_BESIDE = 1, 2, 3, 10
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlacedSpan:
    """A span on the clock that all ranks share, times in us since the first one."""

    name: str
    start_us: float
    duration_us: float
    index: int
    step: int
    launch: int

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(slots=True)
class RankSpans:
    """Spans of one rank, over all launches of the run, ordered by their starts, outer ones first.

    `pid` stands for the rank's name: its number may be another rank's in a launch with another split, and viewers do
    not take 0 for a process like others.
    """

    head: SpansHead
    pid: int
    spans: list[PlacedSpan]


def read_run(run_dir: Path, from_s: float = 0.0, seconds: float = inf) -> list[RankSpans]:
    """What began within a stretch of a run, of all its ranks; raises ValueError when there are no spans at all.

    Memory is that of what is kept: files are gone through once for the times at which launches begin, then once more.
    """
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir}: no such folder")
    files = span_files(run_dir)
    if not files:
        raise ValueError(f"{run_dir}: has no {FOLDER}/*.spans; a run writes them with profiling=full")
    starts_ns, files = _starts_of_launches(files)
    if not starts_ns:
        raise ValueError(f"{run_dir}: its spans files hold no spans yet; they are written once per interval")
    zero_ns = min(starts_ns.values())
    launches = {launch: place for place, launch in enumerate(sorted(starts_ns, key=lambda launch: starts_ns[launch]))}
    first_us, last_us = from_s * 1e6, (from_s + seconds) * 1e6
    ranks: dict[str, RankSpans] = {}
    for head, spans in (block for path in files for block in read_blocks(path)):
        rank = ranks.setdefault(head.rank_name, RankSpans(head, 0, []))
        rank.head = head
        shift_ns, launch = _shift_ns(head) - zero_ns, launches.get(head.launch)
        if launch is None:  # none of its ranks has any spans, or had when the files were gone through before
            continue
        for span in spans:
            start_us = (span.start_ns + shift_ns) / 1e3
            if first_us <= start_us < last_us:
                placed = (start_us, span.duration_ns / 1e3, span.index, span.step, launch)
                rank.spans.append(PlacedSpan(span.name, *placed))
    if not any(rank.spans for rank in ranks.values()):
        raise ValueError(f"{run_dir}: nothing began between {from_s:g} and {from_s + seconds:g} s of the run")
    in_order = sorted(ranks.values(), key=lambda rank: (rank.head.rank, rank.head.rank_name))
    for pid, rank in enumerate(in_order, start=1):
        rank.pid = pid
        rank.spans.sort(key=lambda span: (span.start_us, -span.duration_us))
    return in_order


def _starts_of_launches(files: list[Path]) -> tuple[dict[int, int], list[Path]]:
    """Time of day in ns of the first span of each launch that has any, and the files that are sound.

    What is damaged is told on stderr and left out; raises ValueError when nothing else is left.
    """
    starts_ns: dict[int, float] = {}
    sound, errors = [], []
    for path in files:
        found: dict[int, float] = {}
        try:
            for head, spans in read_blocks(path):
                start_ns = min((span.start_ns + _shift_ns(head) for span in spans), default=inf)
                found[head.launch] = min(start_ns, found.get(head.launch, inf))
        except ValueError as error:
            errors.append(error)
            continue
        sound.append(path)
        for launch, start_ns in found.items():
            starts_ns[launch] = min(start_ns, starts_ns.get(launch, inf))
    if errors and not sound:
        raise errors[0]
    for error in errors:
        print(f"warning: {error}; it is left out", file=sys.stderr)
    return {launch: int(start_ns) for launch, start_ns in starts_ns.items() if start_ns < inf}, sound


def _shift_ns(head: SpansHead) -> int:
    """What leads from a rank's clock to the time of day at the first rank."""
    return round((head.clock.offset_s + head.clock.epoch_s) * 1e9)


def trace_events(ranks: list[RankSpans], ways: list["Journey"]) -> Iterator[Event]:
    """Events in the Trace Event Format: https://perfetto.dev/docs/getting-started/other-formats."""
    for rank in ranks:
        yield from _names(rank)
        yield from _stage_slices(rank)
        yield from _group_slices(rank, MICRO_BATCHES, "g")
        yield from _group_slices(rank, STEPS, "step")
    yield from _arrows(ways)
    yield from _on_the_way(ways)


def _names(rank: RankSpans) -> Iterator[Event]:
    pid, error_us = rank.pid, rank.head.clock.error_s * 1e6
    yield _meta(pid, "process_name", {"name": rank.head.rank_name})
    yield _meta(pid, "process_sort_index", {"sort_index": pid})
    yield _meta(pid, "process_labels", {"labels": f"pid {rank.head.pid}, clock within {error_us:.0f} us"})
    tracks = {STAGES: "stages", MICRO_BATCHES: "micro-batches", STEPS: "steps"}
    tracks |= {tid: _beside(name) for name, tid in _tracks_beside(rank).items()}
    for tid, name in tracks.items():
        yield _meta(pid, "thread_name", {"name": name}, tid)
        yield _meta(pid, "thread_sort_index", {"sort_index": tid}, tid)


def _meta(pid: int, name: str, args: Event, tid: int = 0) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": args}


def _tracks_beside(rank: RankSpans) -> dict[str, int]:
    """Tracks of what runs beside the stages, by the name of its spans."""
    names = sorted({span.name for span in rank.spans if span.name.startswith((EDGE_PREFIX, SIDE_PREFIX))})
    return {name: FIRST_BESIDE + place for place, name in enumerate(names)}


def _beside(name: str) -> str:
    kind, _, what = name.partition("/")
    return f"transfers to {what}" if kind + "/" == EDGE_PREFIX else f"{what} on its own stream"


def _stage_slices(rank: RankSpans) -> Iterator[Event]:
    """A slice per span; one inside another is shown under it by its times."""
    beside = _tracks_beside(rank)
    for span in rank.spans:
        tid = beside.get(span.name, STAGES)
        name = f"g {span.index}" if span.name in beside else span.name.rsplit("/", 1)[-1]
        yield _slice(rank.pid, tid, name, span.start_us, span.duration_us, _subject(span))


def _subject(span: PlacedSpan) -> Event:
    return {key: value for key, value in (("g", span.index), ("step", span.step)) if value != NONE}


def _slice(pid: int, tid: int, name: str, start_us: float, duration_us: float, args: Event) -> Event:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start_us, "dur": duration_us, "args": args}


def _working(rank: RankSpans) -> Iterator[PlacedSpan]:
    """Top-level stages of work, in order of time."""
    return (span for span in rank.spans if "/" not in span.name and span.name not in WAITING)


def _group_slices(rank: RankSpans, tid: int, key: str) -> Iterator[Event]:
    """One slice around all neighbouring work on one micro-batch, or of one step."""
    group: list[PlacedSpan] = []
    for span in [*_working(rank), None]:
        number = NONE if span is None else (span.index if key == "g" else span.step)
        if group and number != (group[0].index if key == "g" else group[0].step):
            start_us, end_us = group[0].start_us, max(member.end_us for member in group)
            yield _slice(rank.pid, tid, _label(key, group[0]), start_us, end_us - start_us, _subject(group[0]))
            group = []
        if span is not None and number != NONE:
            group.append(span)


def _label(key: str, span: PlacedSpan) -> str:
    return f"{key} {span.index if key == 'g' else span.step}"


@dataclass(frozen=True, slots=True)
class Journey:
    """A micro-batch on its way: the target's last act on it, and the drafter's first."""

    index: int
    source: int
    sent: PlacedSpan
    destination: int
    taken: PlacedSpan


def journeys(ranks: list[RankSpans]) -> list[Journey]:
    """The way of every micro-batch of which both ends were recorded, in order of launches and g."""
    sent: dict[tuple[int, int], tuple[int, PlacedSpan]] = {}
    for rank in ranks:
        for span in _working(rank):
            # In order of time: `send` comes after `pack`, and takes its place.
            if span.name in SENDING and span.index != NONE:
                sent[span.launch, span.index] = (rank.pid, span)
    found: dict[tuple[int, int], Journey] = {}
    for rank in ranks:
        if rank.head.role == "target":
            continue
        for span in _working(rank):
            key = (span.launch, span.index)
            if key not in sent or key in found:
                continue
            source, departure = sent[key]
            # One process plays both roles: what it did before it packed was the target's work.
            if source != rank.pid or span.start_us >= departure.end_us:
                found[key] = Journey(span.index, source, departure, rank.pid, span)
    return [found[key] for key in sorted(found)]


def _arrows(ways: list[Journey]) -> Iterator[Event]:
    """Flow arrows; each end lies in the middle of its slice, which makes it that slice's beyond doubt.

    A `send` that lost its core may end after the drafter has begun: its arrow leaves earlier, but never its slice.
    """
    for number, journey in enumerate(ways):  # g alone is not one arrow: a resumed launch may do it again
        common = {"cat": "micro-batch", "name": f"g {journey.index}", "id": number, "tid": STAGES}
        sent, taken = journey.sent, journey.taken
        arrives_us = taken.start_us + taken.duration_us / 2
        leaves_us = max(sent.start_us, min(sent.start_us + sent.duration_us / 2, arrives_us))
        yield {**common, "ph": "s", "pid": journey.source, "ts": leaves_us}
        yield {**common, "bp": "e", "ph": "f", "pid": journey.destination, "ts": arrives_us}


def _on_the_way(ways: list[Journey]) -> Iterator[Event]:
    """Per drafter, a counter of micro-batches that have been sent and wait to be trained on."""
    changes: dict[int, list[tuple[float, int]]] = {}
    for journey in ways:
        changes.setdefault(journey.destination, []).append((journey.sent.end_us, 1))
        changes[journey.destination].append((max(journey.taken.start_us, journey.sent.end_us), -1))
    for pid, moves in changes.items():
        count = 0
        for at_us, change in sorted(moves):
            count += change
            yield {"ph": "C", "pid": pid, "tid": 0, "name": "sent and waiting", "ts": at_us, "args": {"count": count}}


def describe(ranks: list[RankSpans], ways: list[Journey]) -> str:
    """One line on what the timeline holds and how far its clocks can be trusted."""
    num_spans = sum(len(rank.spans) for rank in ranks)
    end_us = max((span.end_us for rank in ranks for span in rank.spans), default=0.0)
    error_us = max(rank.head.clock.error_s for rank in ranks) * 1e6
    backwards_us = max((way.sent.start_us - way.taken.start_us for way in ways), default=0.0)
    lines = [
        f"{len(ranks)} ranks, {num_spans} spans over {end_us / 1e6:.1f} s, {len(ways)} micro-batches followed from "
        f"target to drafter; clocks agree to within {error_us:.0f} us (measured at the start)"
    ]
    if ways:
        # Near 0 a drafter takes what has just come, so targets are awaited; else micro-batches wait in its queue.
        waits_s = sorted(max(way.taken.start_us - way.sent.end_us, 0.0) / 1e6 for way in ways)
        middle, least, most = map(_duration, (statistics.median(waits_s), waits_s[0], waits_s[-1]))
        leaving = f"from the end of `{ways[0].sent.name}` to the drafter's first work"
        lines.append(f"{leaving}: {middle} in the median, {least} to {most}")
    if backwards_us > 0:
        lines.append(
            f"warning: an arrow leads {backwards_us:.0f} us back in time, so the clocks have drifted by as much"
        )
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def write(path: Path, events: Iterable[Event]) -> None:
    """One event a line, so that a large trace needs no large memory; compressed if the name ends in .gz."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for place, event in enumerate(events):
            file.write((",\n" if place else "") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds >= 0:
        raise ValueError(text)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: RUN_DIR/trace.json.gz")
    parser.add_argument("--from-s", type=_seconds, default=0.0, help="leave out what began earlier in the run")
    parser.add_argument("--seconds", type=_seconds, default=inf, help="how much to keep (default: all)")
    arguments = parser.parse_args()
    output = arguments.output or arguments.run_dir / "trace.json.gz"
    try:
        ranks = read_run(arguments.run_dir, arguments.from_s, arguments.seconds)
        ways = journeys(ranks)
        write(output, trace_events(ranks, ways))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as `head` may have seen enough
    print(f"{describe(ranks, ways)}\nwrote {output}; open it in https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
