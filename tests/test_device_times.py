"""On CUDA stages are timed by events, which nobody waits for; an imitated device shows it on a CPU."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers_profiling import Clock, FakeEvent, head, read_spans
from helpers_run import scalars

from dflash.groups import choose_topology
from dflash.profiling.records import record_path
from dflash.profiling.report import GroupCharts, RankReport
from dflash.profiling.side import SideTimes
from dflash.profiling.spans import Span, SpanWriter, span_files
from dflash.profiling.stats import ProfileStats
from dflash.profiling.tables import summary_line
from dflash.profiling.totals import OTHER, StageTotals, wall_s
from dflash.roles.target import Producer
from dflash.target.packing import BufferPool, HiddenStatePacker


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A CUDA device of FakeEvents, of which `main` is the current stream."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "main")
    yield torch.device("cuda", 0)
    FakeEvent.queues.clear()
    FakeEvent.has_failed = False


def test_events_partition_the_devices_time_and_the_host_only_looks(fake_cuda: torch.device) -> None:
    clock = Clock()
    spans = []
    stats = ProfileStats(fake_cuda, clock, on_span=lambda *span: spans.append(span[:3]))
    FakeEvent.work(0)
    with stats.stage("forward"):
        clock.now_s += 0.001
        with stats.stage("layers"):
            clock.now_s += 0.002
    stats.cut()
    clock.now_s += 0.5
    assert stats.take_intervals() == [], "the device has not come to it"
    FakeEvent.work(1, 2, 40, 3)
    assert stats.take_intervals() == []
    FakeEvent.work(4)
    (totals,) = stats.take_intervals()
    assert {path: round(stage.total_s * 1e3, 6) for path, stage in totals.items()} == {
        "other": 5,
        "forward": 45,
        "forward/layers": 40,
    }
    assert wall_s(totals) == pytest.approx(0.050)
    assert totals["forward"].launch_s == pytest.approx(0.003) and totals[OTHER].launch_s == 0
    assert "host 7%" in summary_line("target-0", totals, has_launches=stats.has_device_clock)
    waiting = {"optimizer": StageTotals(3, 0.03, 1.2, 0.01, 0.01, 0.01)}  # of the host, for the device
    assert "host" not in summary_line("drafter-1", waiting, has_launches=True)
    assert spans[0] == ("forward/layers", pytest.approx(100.003), pytest.approx(100.043))
    num_made = FakeEvent.num_made
    for _ in range(50):
        with stats.stage("forward"):
            pass
        FakeEvent.work(1, 1)
        stats.collect()
    assert FakeEvent.num_made == num_made, "events are used again"


@pytest.mark.parametrize("rate", [0.5, 0.999, 1.0, 1.001, 2.0])
def test_a_device_clock_that_drifts_stays_within_what_the_host_knows(fake_cuda: torch.device, rate: float) -> None:
    """After hours, drift would show as arrows that lead back in time; here the device counts `rate` seconds each."""
    clock = Clock()
    moments_s: list[float] = []
    stats = ProfileStats(
        fake_cuda, clock, on_span=lambda path, start_s, end_s, subject: moments_s.extend((start_s, end_s))
    )
    began_ms = FakeEvent.device_ms

    def reach(at_s: float) -> None:
        FakeEvent.work(began_ms + rate * (at_s - 100.0) * 1e3 - FakeEvent.device_ms)

    reach(100.0)
    launched_s, reached_s, found_s = [], [], []
    for number in range(300):
        for is_entered in (True, False):
            launched_s.append(clock.now_s)
            reached_s.append(clock.now_s + (0.0003 if is_entered else 0.02))
            if is_entered:
                stage = stats.stage("pack" if number % 2 else "forward")
                stage.__enter__()
                clock.now_s += 0.001
            else:
                stage.__exit__(None, None, None)
        clock.now_s += 0.05  # it works, and is then idle
        if number % 3 == 2:  # several have been reached when the host looks
            for at_s in reached_s[len(found_s) :]:
                reach(at_s)
                found_s.append(clock.now_s)
            stats.collect()
    stats.cut()
    reach(clock.now_s)
    (totals,) = stats.take_intervals()
    assert wall_s(totals) == pytest.approx(clock.now_s - 100.0, abs=1e-9)
    assert totals["forward"].count == totals["pack"].count == 150
    assert moments_s == sorted(moments_s), "never back in time"
    for launched, moment, found in zip(launched_s, moments_s, found_s, strict=True):
        assert launched <= moment <= found
    if rate == 1.0:
        assert moments_s == pytest.approx(reached_s, abs=1e-9)


def test_a_device_that_is_idle_gets_its_clock_set_right(fake_cuda: torch.device) -> None:
    clock = Clock()
    spans = []
    stats = ProfileStats(fake_cuda, clock, on_span=lambda path, start_s, end_s, subject: spans.append(start_s))
    FakeEvent.work(0)
    for _ in range(10):
        clock.now_s += 3600  # nothing to do; its clock loses a second an hour
        with stats.stage("forward"):
            pass
        clock.now_s += 0.010
        FakeEvent.work(3599_000, 10)
        stats.collect()
        assert clock.now_s - 0.010 <= spans[-1] <= clock.now_s


def test_side_work_is_told_apart_from_the_stages(fake_cuda: torch.device, tmp_path: Path) -> None:
    writer = SpanWriter(tmp_path, head(0, "target"))
    stats = ProfileStats(fake_cuda)
    side = SideTimes("pack", "target", fake_cuda, "side", writer)
    FakeEvent.work(0)
    FakeEvent.work(0, stream="side")
    assert side.take_interval() == {}
    FakeEvent.work(0, stream="side")
    for index in (5, 6):
        with stats.stage("pack"), side.timed(index):
            pass
    assert side.take_interval() == {}, "nobody waits for the device"
    FakeEvent.work(1e-6, 3e-6, 2e-6, 5e-6, 0, stream="side")
    FakeEvent.work(*(0 for _ in FakeEvent.queues["main"].copy()))
    figures = side.take_interval()
    assert figures.keys() == {"side/target/pack_ms", "side/target/pack_max_ms"}
    stats.cut()
    FakeEvent.work(0)
    (totals,) = stats.take_intervals()
    assert set(totals) == {OTHER, "pack"} and totals["pack"].count == 2
    num_made = FakeEvent.num_made
    FakeEvent.work(0, stream="side")
    for index in range(7, 50):
        with side.timed(index):
            pass
        FakeEvent.work(1e-6, 1e-6, stream="side")
    assert FakeEvent.num_made <= num_made + 2, "events are used again"
    assert 0 < side.take_interval()["side/target/pack_ms"] < 1000
    writer.close()
    (path,) = span_files(tmp_path)
    ((_, spans),) = read_spans(path)
    assert {span.name for span in spans} == {"side/pack"}
    assert [(span.index, span.step) for span in spans] == [(index, -1) for index in range(5, 50)]
    assert all(one.start_ns + one.duration_ns <= other.start_ns for one, other in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize(("has_stream", "is_on"), [(True, True), (True, False), (False, True)])
def test_the_packers_stream_is_told_of_where_there_is_one(
    fake_cuda: torch.device, tmp_path: Path, has_stream: bool, is_on: bool
) -> None:
    packer = HiddenStatePacker(BufferPool(1, 8, torch.device("cpu")), torch.float32, torch.device("cpu"))
    if has_stream:
        packer.stream = "side"
    report = RankReport(tmp_path, "target-0", "target", ProfileStats(is_on=is_on), interval_s=1e9)
    topology = choose_topology(2, colocated=False, num_target_ranks=1)
    run = SimpleNamespace(topology=topology, rank=0, device=fake_cuda)
    Producer(None, packer._pool, packer).report_side(run, report)
    with packer.timed(3):
        pass
    assert len(FakeEvent.queues["side"]) == (3 if has_stream and is_on else 0)
    FakeEvent.work(*[1e-6] * len(FakeEvent.queues["side"]), stream="side")
    figures = {tag for source in report.sources for tag in source()}
    assert figures == ({"side/target/pack_ms", "side/target/pack_max_ms"} if has_stream and is_on else set())
    report.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_real_gpu_tells_of_a_side_stream_without_being_waited_for(tmp_path: Path) -> None:
    device, writer = torch.device("cuda", 0), SpanWriter(tmp_path, head(0, "target"))
    stream = torch.cuda.Stream(device)
    side, stats = SideTimes("pack", "target", device, stream, writer), ProfileStats(device)
    matrix = torch.randn(4096, 4096, device=device)
    matrix @ matrix  # the first one initialises cuBLAS
    torch.cuda.synchronize(device)
    began_s = time.perf_counter()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for index in range(20):
            with stats.stage("pack"):
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream), side.timed(index):
                    for _ in range(10):
                        matrix @ matrix
        side.take_interval()
        stats.cut()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize(device)
    whole_s = time.perf_counter() - began_s
    figures = side.take_interval()
    (totals,) = stats.take_intervals()
    writer.close()
    (path,) = span_files(tmp_path)
    ((_, spans),) = read_spans(path)
    assert [span.index for span in spans] == list(range(20))
    assert sum(span.duration_ns for span in spans) / 1e9 <= whole_s
    assert all(began_s <= span.start_ns / 1e9 <= began_s + whole_s for span in spans)
    assert figures["side/target/pack_ms"] > totals["pack"].mean_s * 1e3, "the main stream did nothing of it"


def fail_to_sample() -> dict[str, float]:
    raise RuntimeError("the gauges failed, too")


@pytest.mark.parametrize("sample", [dict, fail_to_sample])
def test_what_is_known_is_written_though_the_device_has_failed(
    fake_cuda: torch.device, tmp_path: Path, sample: Callable[[], dict[str, float]]
) -> None:
    clock = Clock()
    writer = SpanWriter(tmp_path, head(0, "target"))
    stats = ProfileStats(fake_cuda, clock, on_span=writer.on_span)
    group = GroupCharts(tmp_path, {"target-0": "target"}, first_step=1)
    report = RankReport(tmp_path, "target-0", "target", stats, interval_s=0.0, spans=writer, group=group)
    FakeEvent.work(0)
    with stats.stage("forward"):
        pass
    clock.now_s += 1
    report.poll(step=3)
    FakeEvent.work(0, 1000, 0)
    report.poll(step=4)  # finds the first interval
    with stats.stage("pack"):
        pass
    clock.now_s += 1
    FakeEvent.work(0, 0, 1000)
    stats.collect()
    report.sources.append(sample)
    FakeEvent.has_failed = True
    with pytest.raises(RuntimeError, match="CUDA error" if sample is dict else "gauges"):
        report.close()
    (path,) = span_files(tmp_path)
    ((_, spans),) = read_spans(path)
    assert [span.name for span in spans] == ["forward", "pack"]
    assert spans[0] == Span("forward", 100_000_000_000, 1_000_000_000, -1, -1)
    kinds = [json.loads(line)["kind"] for line in record_path(tmp_path, "target-0").read_text().splitlines()]
    assert kinds[0] == "launch" and "interval" in kinds and kinds[-1] == "run"
    assert "whole run: target-0" in (tmp_path / "logs" / "target-0.log").read_text().splitlines()[-1]
    assert scalars(tmp_path, "stack/target/forward")["stack/target"][0] == (3, pytest.approx(1.0))
