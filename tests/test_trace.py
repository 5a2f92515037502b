"""Clocks are brought together, and a timeline follows each micro-batch across ranks."""

import gzip
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import time
import tracemalloc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_profiling import head
from helpers_run import ROOT, launch, make_rows, make_target, overrides

from dflash.profiling.clock import best_offset, host_key, measure_offset
from dflash.profiling.edges import EdgeTimes
from dflash.profiling.spans import NONE, ClockOffset, SpanWriter
from dflash.profiling.window import ProfilerWindow

# By its path, since a module of the standard library has its name.
_SPEC = importlib.util.spec_from_file_location("tools_trace", ROOT / "tools" / "trace.py")
assert _SPEC is not None and _SPEC.loader is not None
tool = importlib.util.module_from_spec(_SPEC)
sys.modules["tools_trace"] = tool
_SPEC.loader.exec_module(tool)


def trace(run_dir: Path, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Events and console text of the tool."""
    output = run_dir / "trace.json"
    command = [sys.executable, "tools/trace.py", str(run_dir), "--output", str(output), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())["traceEvents"], done.stdout


def test_the_shortest_round_knows_the_offset_best() -> None:
    # The other clock is 1 s ahead; ways take 10+10, 40+10 and 5+9 us.
    rounds = [(0, 10_000, 20_000), (0, 40_000, 50_000), (0, 5_000, 14_000)]
    offset_s, error_s = best_offset([(sent, other + 10**9, received) for sent, other, received in rounds])
    assert offset_s == pytest.approx(1 - 2e-6, abs=1e-12) and error_s == pytest.approx(7e-6)
    assert abs(offset_s - 1) <= error_s


def _measure(rank: int, folder: str, is_one_host: bool, results: Any) -> None:
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    ahead_ns = 0 if is_one_host else -2_500_000_000 * rank
    host = host_key() if is_one_host else rank + 1
    offset, launch_id = measure_offset(rank, 3, clock_ns=lambda: time.perf_counter_ns() + ahead_ns, host=host)
    results.put((rank, offset, launch_id))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("is_one_host", [True, False])
def test_ranks_find_their_offsets(tmp_path: Path, is_one_host: bool) -> None:
    """Three processes, whose clocks differ by 2.5 s each unless they are one machine's."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_measure, args=(r, str(tmp_path), is_one_host, results)) for r in range(3)]
    for process in ranks:
        process.start()
    reported = [results.get(timeout=60) for _ in ranks]
    found: dict[int, ClockOffset] = {rank: offset for rank, offset, _ in reported}
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert len({offset.epoch_s for offset in found.values()}) == 1
    (launch_id,) = {launch_id for _, _, launch_id in reported}
    assert 0 <= launch_id < 1 << 62
    assert launch_id != measure_offset(0, 1)[1] != measure_offset(0, 1)[1]
    for rank, offset in found.items():
        if is_one_host or rank == 0:
            assert (offset.offset_s, offset.error_s) == (0.0, 0.0)
        else:
            assert 0 < offset.error_s < 0.05
            assert abs(offset.offset_s - 2.5 * rank) <= offset.error_s


def write_two_ranks(run_dir: Path) -> None:
    """A target whose clock is 100 s behind the drafter's, and three micro-batches on their way."""
    target = SpanWriter(run_dir, head(0, "target"))
    drafter = SpanWriter(run_dir, head(1, "drafter", offset_s=-100.0))
    edges = EdgeTimes(target)
    for g in range(3):
        begin = 10.0 + g
        target.on_span("forward/attention", begin + 0.1, begin + 0.2, (g, 1))
        target.on_span("forward", begin, begin + 0.5, (g, 1))
        target.on_span("side/pack", begin + 0.45, begin + 0.55, (g, NONE))
        target.on_span("send", begin + 0.5, begin + 0.6, (g, 1))
        edges.on_delivered("drafter-1", g, begin + 0.55, begin + 0.7, 1000)
        there = begin + 100.7
        drafter.on_span("starved", there - 0.5, there, (g, 1))
        drafter.on_span("anchors", there, there + 0.1, (g, 1))
        drafter.on_span("backward", there + 0.1, there + 0.3, (g, 1))
    drafter.on_span("optimizer", there + 0.3, there + 0.4, (NONE, 1))
    target.close()
    drafter.close()
    assert edges.take_interval() == pytest.approx(
        {
            "edge/drafter-1/transfer_ms": 150.0,
            "edge/drafter-1/bytes_per_s": 3000 / 0.45,
        }
    )
    assert edges.take_interval() == {}


def test_a_timeline_follows_micro_batches_from_target_to_drafter(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    events, text = trace(tmp_path)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert names[1, 0] == "target-0" and names[2, 0] == "drafter-1" and names[1, 10] == "transfers to drafter-1"
    assert names[1, 11] == "pack on its own stream"
    beside = [(e["name"], e["args"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 11)]
    assert beside == [(f"g {g}", {"g": g}) for g in range(3)]
    slices = [e for e in events if e["ph"] == "X"]
    arrows = {phase: {e["id"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert arrows["s"].keys() == arrows["f"].keys() and len(arrows["s"]) == 3
    for number, start in arrows["s"].items():
        end = arrows["f"][number]
        assert start["ts"] < end["ts"] and start["name"] == end["name"] and end["bp"] == "e"
        (source,) = [e for e in slices if is_on(e, start) and e["name"] == "send"]
        (taken,) = [e for e in slices if is_on(e, end) and e["name"] == "anchors"]
        assert source["args"] == taken["args"] == {"g": number, "step": 1}
        # 0.7 s after the forward began, whatever the drafter's clock says.
        assert taken["ts"] - source["ts"] == pytest.approx(0.2e6, abs=1)
    inner = [e for e in slices if e["name"] == "attention"]
    outer = [e for e in slices if e["name"] == "forward"]
    assert all(any(o["ts"] <= i["ts"] and i["ts"] + i["dur"] <= o["ts"] + o["dur"] for o in outer) for i in inner)
    (step,) = [e for e in slices if e["pid"] == 2 and e["name"] == "step 1"]
    assert step["dur"] == pytest.approx(2.4e6, abs=1)  # from the first anchors to the end of the optimizer
    own = [e for e in slices if e["pid"] == 2 and e["tid"] == 2]
    assert [(e["name"], round(e["dur"])) for e in own] == [("g 0", 300_000), ("g 1", 300_000), ("g 2", 300_000)]
    counts = [e["args"]["count"] for e in events if e["ph"] == "C"]
    assert counts == [1, 0] * 3
    assert "3 micro-batches followed" in text and "within 2 us" in text and "warning" not in text
    assert "first work: 100.0 ms in the median, 100.0 ms to 100.0 ms" in text


def test_a_real_run_is_followed_and_judged(tmp_path: Path) -> None:
    """Two ranks train with profiling=full: every micro-batch has its arrow, and the verdict has its figures."""
    run_dir, steps, per_step = tmp_path / "run", 8, 6
    more = {"profiling": "full", "profiling__interval_s": 0.2, "train__max_steps": steps}
    data = make_rows(tmp_path / "rows.jsonl", 60)
    launch(2, overrides(make_target(tmp_path / "target"), data, run_dir, train__eval_interval_steps="null", **more))
    events, text = trace(run_dir)
    assert "warning" not in text and "clocks agree to within 0 us" in text
    slices = [e for e in events if e["ph"] == "X"]
    trained = {e["args"]["g"] for e in slices if e["pid"] == 2 and e["name"] == "backward"}
    assert trained == set(range(steps * per_step))
    arrows = {phase: {e["name"]: e for e in events if e["ph"] == phase} for phase in "sf"}
    assert {int(name.removeprefix("g ")) for name in arrows["s"]} >= trained
    for name, start in arrows["s"].items():
        end = arrows["f"][name]
        assert (start["pid"], end["pid"]) == (1, 2) and start["ts"] < end["ts"]
        assert any(is_on(e, start) and e["name"] == "send" and f"g {e['args']['g']}" == name for e in slices)
        assert any(is_on(e, end) and f"g {e['args'].get('g')}" == name for e in slices)
    assert [e["name"] for e in slices if e["pid"] == 2 and e["tid"] == 3] == [f"step {s + 1}" for s in range(steps)]
    # Times of one track nest: a viewer shows a slice under the one that holds it.
    for pid in (1, 2):
        open_until: list[float] = []
        for e in sorted((e for e in slices if (e["pid"], e["tid"]) == (pid, 1)), key=lambda e: (e["ts"], -e["dur"])):
            while open_until and open_until[-1] <= e["ts"] + 1e-3:
                open_until.pop()
            assert not open_until or e["ts"] + e["dur"] <= open_until[-1] + 1e-3
            open_until.append(e["ts"] + e["dur"])
    done = subprocess.run(
        [sys.executable, "tools/verdict.py", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith("verdict on 1+1"), done.stdout + done.stderr


def is_on(event: dict[str, Any], arrow: dict[str, Any]) -> bool:
    is_there = (event["pid"], event["tid"]) == (arrow["pid"], arrow["tid"])
    return is_there and event["ts"] <= arrow["ts"] <= event["ts"] + event["dur"]


def test_a_part_of_a_run_can_be_cut_out(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    events, text = trace(tmp_path, "--from-s", "0.9", "--seconds", "1")
    assert {e["args"].get("g") for e in events if e["ph"] == "X"} == {1}
    assert "1 micro-batches followed" in text
    # As much as one that is cut out of the whole.
    whole, _ = trace(tmp_path)
    kept = [e for e in whole if e["ph"] == "X" and e["tid"] in (1, 10, 11) and 0.9e6 <= e["ts"] < 1.9e6]
    assert [e for e in events if e["ph"] == "X" and e["tid"] in (1, 10, 11)] == kept


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--from-s", "1000"], "nothing began between 1000 and inf s"),
        (["--from-s", "nan"], "invalid _seconds value"),
        (["--seconds", "-1"], "invalid _seconds value"),
    ],
)
def test_a_part_that_holds_nothing_replaces_no_timeline(tmp_path: Path, arguments: list[str], expected: str) -> None:
    write_two_ranks(tmp_path)
    trace(tmp_path)
    before = (tmp_path / "trace.json").read_bytes()
    command = [sys.executable, "tools/trace.py", str(tmp_path), "--output", str(tmp_path / "trace.json"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and expected in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "trace.json").read_bytes() == before


def test_a_damaged_file_costs_its_own_ranks_part_only(tmp_path: Path) -> None:
    write_two_ranks(tmp_path)
    path = tmp_path / "spans" / "drafter-1.spans"
    path.write_bytes(path.read_bytes()[:-40] + bytes(40))
    command = [sys.executable, "tools/trace.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("1 ranks, ")
    assert done.stderr.startswith("warning: ") and "drafter-1.spans: is damaged" in done.stderr


def test_a_send_that_lost_its_core_still_has_an_arrow_forward_in_time(tmp_path: Path) -> None:
    target, drafter = SpanWriter(tmp_path, head(0, "target")), SpanWriter(tmp_path, head(1, "drafter"))
    target.on_span("send", 10.0, 10.9, (0, 1))
    drafter.on_span("anchors", 10.1, 10.2, (0, 1))
    target.close()
    drafter.close()
    events, _ = trace(tmp_path)
    (start,), (end,) = ([e for e in events if e["ph"] == phase] for phase in "sf")
    (send,), (anchors,) = ([e for e in events if e["ph"] == "X" and e["name"] == name] for name in ("send", "anchors"))
    assert start["ts"] <= end["ts"] and is_on(send, start) and is_on(anchors, end)


def test_a_part_of_a_long_run_takes_memory_of_its_size_only(tmp_path: Path) -> None:
    writer = SpanWriter(tmp_path, head(0, "target"))
    for number in range(20_000):
        writer.on_span("forward", number, number + 0.5, (number, 1))
    writer.close()
    tracemalloc.start()
    try:
        peaks, sizes = [], []
        for seconds in (10.0, 20_000.0):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            (rank,) = tool.read_run(tmp_path, 1000.0, seconds)
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
            sizes.append(len(rank.spans))
    finally:
        tracemalloc.stop()
    assert sizes == [10, 19_000]
    # The file itself is held as it is, one rank's after another's.
    assert peaks[0] < 2 * 26 * 20_000 and (peaks[1] - peaks[0]) / 19_000 < 300


def test_launches_are_told_apart_where_clocks_and_ranks_are_the_same(tmp_path: Path) -> None:
    """Resumed with another split: both launches share one epoch, and ranks their numbers."""
    splits = {9: (10.0, ["target", "drafter"]), 3: (20.0, ["target", "target", "drafter"])}
    for number, (first, roles) in splits.items():
        for rank, role in enumerate(roles):
            writer = SpanWriter(tmp_path, head(rank, role, launch=number))
            name, later = ("send", 0.0) if role == "target" else ("anchors", 0.5)
            for g in range(3):
                if role == "drafter" or g % (len(roles) - 1) == rank:
                    writer.on_span(name, first + g + later, first + g + later + 0.1, (g, 1))
            writer.close()
    idle = SpanWriter(tmp_path, head(0, "target", launch=1))
    idle.close()
    ranks = tool.read_run(tmp_path)
    assert [(rank.pid, rank.head.rank_name) for rank in ranks] == [
        (1, "target-0"),
        (2, "drafter-1"),
        (3, "target-1"),
        (4, "drafter-2"),
    ]
    assert {span.launch for span in ranks[1].spans} == {0} and {span.launch for span in ranks[3].spans} == {1}
    ways = [(way.taken.launch, way.index, way.source, way.destination) for way in tool.journeys(ranks)]
    assert ways == [(0, g, 1, 2) for g in range(3)] + [(1, 0, 1, 4), (1, 1, 3, 4), (1, 2, 1, 4)]
    events, text = trace(tmp_path)
    assert "6 micro-batches followed" in text and "warning" not in text
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert len(names) == len(set(names)) == len({e["pid"] for e in events})


@pytest.mark.parametrize("what", ["missing", "empty", "no spans", "other file"])
def test_a_folder_without_spans_is_told_in_one_line(tmp_path: Path, what: str) -> None:
    run_dir = tmp_path / "run"
    if what != "missing":
        run_dir.mkdir()
    if what == "no spans":
        SpanWriter(run_dir, head(0, "target")).close()
    if what == "other file":
        (run_dir / "spans").mkdir()
        (run_dir / "spans" / "target-0.spans").write_text("this is something else, and rather longer than a piece")
    done = subprocess.run(
        [sys.executable, "tools/trace.py", str(run_dir)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and str(run_dir) in done.stderr


def test_torch_profiler_records_its_window_once(tmp_path: Path) -> None:
    window = ProfilerWindow(tmp_path, "drafter-1", torch.device("cpu"), start_step=3, num_steps=2)
    told = []
    for step in range(1, 8):
        assert window.is_due(step) == (step in (3, 5))
        told.append(window.move(step))
        torch.ones(step, 11).sum()
    assert [place + 1 for place, line in enumerate(told) if line] == [3, 5] and window.close() is None
    with gzip.open(tmp_path / "torch_profiler" / "drafter-1.json.gz", "rt") as file:
        dims = [event["args"].get("Input Dims") for event in json.load(file)["traceEvents"] if "args" in event]
    assert {number for number in range(1, 8) if [[number, 11]] in dims or [[number, 11], []] in dims} == {3, 4}
    late = ProfilerWindow(tmp_path, "drafter-2", torch.device("cpu"), start_step=3, num_steps=2)
    assert "recorded nothing" in (late.move(9) or "") and not late.is_due(10) and late.close() is None
    assert os.listdir(tmp_path / "torch_profiler") == ["drafter-1.json.gz"]
    early = ProfilerWindow(tmp_path, "drafter-2", torch.device("cpu"), start_step=3, num_steps=2)
    assert early.move(2) is None and early.close() == "torch.profiler recorded nothing: the run ended before step 3"
