"""Stages partition a rank's time, and what is written can be read back."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers_profiling import Clock
from helpers_run import ROOT, scalars
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.custom_scalar import layout_pb2

from dflash.cli import one_line
from dflash.config import ProfilingConfig, ProfilingLevel, config_folder, register_schema, to_train_config
from dflash.profiling.charts import WHOLE_PLACE, Charts
from dflash.profiling.layout import stacked_shares
from dflash.profiling.records import RankFigures, last_figures, record_path
from dflash.profiling.report import GroupCharts, RankReport, final_tables
from dflash.profiling.stats import ProfileStats
from dflash.profiling.tables import group_tables, summary_line
from dflash.profiling.totals import OTHER, RunStage, StageTotals, Stretch, shares, wall_s


def cut(stats: ProfileStats) -> dict[str, StageTotals]:
    stats.cut()
    (totals,) = stats.take_intervals()
    return totals


def test_every_second_belongs_to_one_top_level_stage() -> None:
    clock = Clock()
    stats = ProfileStats(clock=clock)
    clock.now_s += 1
    for _ in range(3):
        with stats.stage("forward"):
            clock.now_s += 2
            with stats.stage("attention"):
                clock.now_s += 5
        clock.now_s += 0.5
    with pytest.raises(KeyError), stats.stage("pack"):
        clock.now_s += 4
        raise KeyError
    clock.now_s += 0.25
    totals = cut(stats)
    assert {path: stage.total_s for path, stage in totals.items()} == {
        OTHER: 1 + 3 * 0.5 + 0.25,
        "forward": 21,
        "forward/attention": 15,
        "pack": 4,
    }
    assert wall_s(totals) == clock.now_s - 100
    forward = totals["forward"]
    assert (forward.count, forward.mean_s, forward.max_s, forward.p95_s) == (3, 7, 7, 7)
    assert forward.launch_s == forward.total_s
    clock.now_s += 3
    assert {path: stage.total_s for path, stage in cut(stats).items()} == {OTHER: 3}
    assert wall_s(stats.run_totals()) == clock.now_s - 100
    line = summary_line("target-0", totals, {"throughput/tokens_per_s": 1234.0})
    assert line.startswith("target-0 27.8 s: forward 75.7% (7000.0 ms x 3, p95 7000.0), pack 14.4%")
    assert line.endswith("; tokens_per_s 1234")


def test_a_stage_that_outlasts_intervals_gives_each_its_time_and_counts_where_it_ends() -> None:
    clock = Clock()
    spans = []
    stats = ProfileStats(clock=clock, on_span=lambda *span: spans.append(span))
    stats.subject = (7, 2)
    intervals = []
    with stats.stage("starved"):
        clock.now_s += 4
        with stats.stage("inner"):
            stats.subject = (8, 2)
            clock.now_s += 1
            intervals.append(cut(stats))
            clock.now_s += 10
            intervals.append(cut(stats))
        clock.now_s += 2
    clock.now_s += 0.5
    intervals.append(cut(stats))
    assert [wall_s(totals) for totals in intervals] == [5, 10, 2.5]
    assert [totals["starved"].total_s for totals in intervals] == [5, 10, 2]
    assert [totals["starved"].count for totals in intervals] == [0, 0, 1]
    assert [totals.get("starved/inner", intervals[0]["starved"]).total_s for totals in intervals] == [1, 10, 0]
    ended = intervals[2]["starved"]
    assert (ended.mean_s, ended.max_s) == (17, 17)
    assert stats.run_totals()["starved"].total_s == 17 and stats.run_totals()["starved/inner"].max_s == 11
    assert spans == [("starved/inner", 104.0, 115.0, (7, 2)), ("starved", 100.0, 117.0, (7, 2))]
    assert "starved 100.0% (under way)" in summary_line("drafter-1", intervals[1])


def test_items_are_timed_until_the_last_was_asked_for() -> None:
    clock = Clock()

    def items():
        for number in range(3):
            clock.now_s += 2
            yield number
        clock.now_s += 5

    stats = ProfileStats(clock=clock)
    seen = []
    for number in stats.each("data", items()):
        clock.now_s += 10
        seen.append(number)
    totals = cut(stats)
    assert seen == [0, 1, 2]
    assert (totals["data"].total_s, totals["data"].count, totals[OTHER].total_s) == (11, 4, 30)


def test_each_may_be_left_early_whatever_is_under_way() -> None:
    stats = ProfileStats(clock=Clock())
    with stats.stage("outer"):
        for number in stats.each("data", range(9)):
            with stats.stage("forward"):
                if number == 2:
                    break
        items = stats.each("data", range(9))
        with stats.stage("inner"):
            next(items)
            items.close()
    totals = cut(stats)
    assert {path: stage.count for path, stage in totals.items() if path != OTHER} == {
        "outer": 1,
        "outer/data": 3,
        "outer/forward": 3,
        "outer/inner": 1,
        "outer/inner/data": 1,
    }


def test_a_stage_left_out_of_turn_and_a_name_that_is_a_path_are_told() -> None:
    stats = ProfileStats(clock=Clock())

    def items() -> Iterator[int]:
        with stats.stage("data"):
            yield 1
            yield 2

    generator = items()
    next(generator)
    with pytest.raises(AssertionError, match="'data' is left while .*'forward'"), stats.stage("forward"):
        generator.close()
    with pytest.raises(AssertionError, match="'pack' is left while"):
        ProfileStats(clock=Clock()).stage("pack").__exit__(None, None, None)
    for name in ("", "pack/copy"):
        with pytest.raises(AssertionError, match="cannot name a stage"):
            stats.stage(name)


def test_the_time_it_takes_to_come_to_an_item_is_spent_for_that_item() -> None:
    spans = []
    stats = ProfileStats(on_span=lambda path, start_s, end_s, subject: spans.append((path, subject)))
    stats.subject = (1, 1)  # of something before
    for number in stats.each("data", range(5, 7), lambda number: (number, 10 * number)):
        with stats.stage("forward"):
            assert stats.subject == (number, 10 * number)
    with stats.stage("blocked"):
        pass
    nothing = (-1, -1)
    assert spans == [
        *(("data", (5, 50)), ("forward", (5, 50)), ("data", (6, 60)), ("forward", (6, 60))),
        *(("data", nothing), ("blocked", nothing)),
    ]


def test_a_stage_that_began_before_anyone_listened_is_told_whole() -> None:
    clock, spans = Clock(), []
    stats = ProfileStats(clock=clock)
    with stats.stage("load"):
        clock.now_s += 1
    with stats.stage("prepare"):
        clock.now_s += 2
        stats.on_span = lambda *span: spans.append(span)
        clock.now_s += 3
    assert spans == [("prepare", 101.0, 106.0, (-1, -1))]


def test_quantiles_are_exact_in_an_interval_and_within_their_bound_over_a_run() -> None:
    generator = np.random.default_rng(0)
    run, everything = RunStage(), []
    for size in (1, 2, 19, 20, 21, 1000, 5000):
        seconds = generator.lognormal(-5, 2, size)
        everything.extend(seconds)
        stretch = Stretch.empty()
        stretch.ended.extend(seconds.tolist())
        assert stretch.totals().p95_s == np.sort(seconds)[math.ceil(0.95 * size) - 1]
        run.add(stretch)
    exact = np.sort(everything)[math.ceil(0.95 * len(everything)) - 1]
    totals = run.totals()
    assert totals.p95_s == pytest.approx(exact, rel=0.025)
    assert (totals.count, totals.max_s) == (len(everything), max(everything))
    assert totals.mean_s == pytest.approx(np.mean(everything))


def test_what_is_off_times_nothing(tmp_path: Path) -> None:
    stats = ProfileStats(is_on=False)
    assert stats.stage("forward") is stats.stage("pack")
    report = RankReport(
        tmp_path, "drafter-1", "drafter", stats, interval_s=0.001, sample=lambda: pytest.fail("sampled")
    )
    with stats.stage("forward"):
        pass
    report.count("throughput/tokens_per_s", 3)
    report.poll(step=3)
    report.scalars({"train/loss": 2.5}, step=3)
    assert report.step == 3, "what is written under the last step is written without profiling, too"
    report.close()
    assert stats.run_totals() == {}
    assert scalars(tmp_path, "drafter-1") == {"train/loss": [(3, 2.5)]}
    assert not (tmp_path / "profile").exists() and not (tmp_path / "logs" / "drafter-1.log").exists()


def test_a_report_writes_stages_rates_and_lines(tmp_path: Path) -> None:
    clock = Clock()
    stats = ProfileStats(clock=clock)
    report = RankReport(
        tmp_path, "target-0", "target", stats, interval_s=0.0, sample=lambda: {"memory/resident_bytes": 5.0}
    )
    for seconds in (1, 2):
        with stats.stage("forward"):
            clock.now_s += seconds
    clock.now_s += 1
    report.count("throughput/tokens_per_s", 500)
    report.poll(step=7)
    report.close()
    written = scalars(tmp_path, "target-0")
    assert written["stage/target/forward_ms"] == [(7, 1500.0)]
    assert written["stage/target/forward_max_ms"] == [(7, 2000.0)]
    assert written["stage/target/forward_p95_ms"] == [(7, 2000.0)]
    assert written["share/target/forward"][0] == (7, 0.75)
    assert written["memory/resident_bytes"] == [(7, 5.0), (7, 5.0)]
    rates = written["throughput/tokens_per_s"]
    assert rates == [(7, 500 / 4), (7, 0.0)], "per second of the stages, which may have begun before the report"
    assert not any(tag.startswith("launch/") for tag in written)
    lines = (tmp_path / "logs" / "target-0.log").read_text().splitlines()
    assert "forward 75.0% (1500.0 ms x 2, p95 2000.0)" in lines[0]
    assert "whole run: target-0 4.0 s" in lines[-1] and len(lines) == 3
    records = [json.loads(line) for line in record_path(tmp_path, "target-0").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["launch", "interval", "interval", "run"]
    assert records[1]["stages"]["forward"]["max_s"] == 2 and records[1]["gauges"] == {"memory/resident_bytes": 5.0}


def closed_report(run_dir: Path, name: str, forward_s: float, group: GroupCharts | None = None) -> None:
    """A launch of one rank: three seconds, `forward_s` of them in that stage."""
    clock = Clock()
    stats = ProfileStats(clock=clock)
    report = RankReport(run_dir, name, name[:-2], stats, interval_s=1e9, group=group)
    with stats.stage("forward"):
        clock.now_s += forward_s
    clock.now_s += 3 - forward_s
    report.poll(step=5)
    report.close()


def test_one_rank_lays_out_the_page_and_stacks_the_groups_shares(tmp_path: Path) -> None:
    roles = {"target-0": "target", "target-1": "target", "drafter-2": "drafter"}
    closed_report(tmp_path, "target-0", 3.0)
    closed_report(tmp_path, "target-1", 1.5)
    group = GroupCharts(tmp_path, roles, first_step=1)
    closed_report(tmp_path, "drafter-2", 0.75, group)
    assert scalars(tmp_path, "stack/target/forward") == {"stack/target_from": [(5, 0.0)], "stack/target": [(5, 0.75)]}
    assert scalars(tmp_path, "stack/target/other") == {"stack/target_from": [(5, 0.75)], "stack/target": [(5, 1.0)]}
    assert scalars(tmp_path, "stack/drafter/forward")["stack/drafter"] == [(5, 0.25)]

    events = EventAccumulator(str(tmp_path / "tensorboard" / "drafter-2"))
    events.Reload()
    assert events.Tags()["tensors"] == ["custom_scalars__config__"]
    assert events.summary_metadata["custom_scalars__config__"].plugin_data.plugin_name == "custom_scalars"
    (event,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {chart.title: chart for category in layout.category for chart in category.chart}
    assert not any(category.closed for category in layout.category)
    bands = [chart.margin.series[0] for chart in charts.values() if chart.HasField("margin")]
    assert [(band.lower, band.value, band.upper) for band in bands] == [
        (f"stack/{role}_from", f"stack/{role}", f"stack/{role}") for role in ("drafter", "target")
    ]  # last first, as the page shows them
    tags = [tag for chart in charts.values() for tag in chart.multiline.tag]
    assert {"queue/depth$", "queue/bytes$", "throughput/tokens_per_s$", "memory/resident_bytes$"} <= set(tags)
    assert len(charts) == 6 and all(len(title) <= 48 for title in charts)


def stage(total_s: float) -> StageTotals:
    return StageTotals(1, total_s, total_s, total_s, total_s, total_s)


@pytest.mark.parametrize("num_left", [0, 1, 40])
def test_a_launch_is_told_apart_from_half_a_line_before_it(tmp_path: Path, num_left: int) -> None:
    closed_report(tmp_path, "target-0", 1.0)
    path = record_path(tmp_path, "target-0")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:num_left])
    closed_report(tmp_path, "target-0", 2.0)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines() if line.endswith("}")]
    assert kinds == 2 * ["launch", "interval", "run"]


def test_bands_keep_their_places() -> None:
    first, second = {"b": stage(1), "b/x": stage(1), "c": stage(3)}, {"c": stage(2), "d": stage(1.94), "e": stage(0.06)}
    bands = stacked_shares([first, second], known=["a", "rest"])
    assert list(bands) == ["a", "b", "c", "d", "rest"]
    assert bands["a"] == (0, 0) and bands["b"] == (0, 0.125) and bands["c"] == (0.125, 0.75)
    assert bands["d"] == pytest.approx((0.75, 0.9925)) and bands["rest"] == pytest.approx((0.9925, 1))
    # What the group waits lies lowest; what only occurs at the start is not kept apart.
    waiting = stacked_shares([{"backward": stage(1), "load": stage(2), "other": stage(4), "starved": stage(1)}])
    assert list(waiting) == ["starved", "backward", "other", "rest"]
    assert waiting["starved"] == (0, 0.125) and waiting["rest"] == (0.75, 1)
    assert stacked_shares([{}]) == {}
    assert shares({}) == {}


def test_runs_get_their_colours_in_the_order_of_the_stack(tmp_path: Path) -> None:
    Charts(tmp_path / "tensorboard" / "all", 1, WHOLE_PLACE).close()
    group = GroupCharts(tmp_path, {"target-0": "target", "drafter-1": "drafter"}, first_step=1)
    for step, path in enumerate(("optimizer", "layers"), 1):  # a band that comes later, and lies lower
        group.show(RankFigures("drafter-1", "drafter", {path: stage(3), "starved": stage(1)}), step)
    group.show(RankFigures("target-0", "target", {"forward": stage(3), "blocked": stage(1)}), 3)
    RankReport(tmp_path, "drafter-1", "drafter", ProfileStats(), interval_s=1e9).close()
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard")).Reload()
    late = runs.Scalars("stack/drafter/layers", "stack/drafter_from")
    assert [(event.step, event.value) for event in late] == [(1, 0.25), (2, 0.25)]
    assert runs.Scalars("stack/drafter/layers", "stack/drafter")[0].value == 0.25, "it had no share"
    begun = {runs.Scalars(f"stack/drafter/{stage}", "stack/drafter")[0].wall_time for stage in ("layers", "optimizer")}
    assert len(begun) == 1, "or else a relative axis would shift them"
    order = sorted(runs.Runs(), key=lambda run: (runs.FirstEventTimestamp(run), run))  # as TensorBoard does
    bands = ["target/blocked", "target/forward", "target/rest"]
    bands += ["drafter/starved", "drafter/layers", "drafter/optimizer", "drafter/rest"]
    assert order == ["all", "drafter-1", *(f"stack/{band}" for band in bands)]


def test_tables_show_both_groups_and_name_who_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.profiling.report._RANKS_PATIENCE_S", 0.0)
    closed_report(tmp_path, "target-0", 3.0)
    closed_report(tmp_path, "target-1", 1.5)
    closed_report(tmp_path, "drafter-2", 0.75)
    text = final_tables(tmp_path, ["target-0", "target-1", "drafter-2", "drafter-3"])
    lines = text.splitlines()
    assert lines[0] == "where the target group's time went (2 ranks, 3.0 s)"
    stage, share, low, _, high, mean_ms, p95_ms, max_ms, count, longest = lines[2].split()
    assert (stage, share, low, high, count, longest) == ("forward", "75.0%", "50.0%", "100.0%", "2", "target-0")
    assert (mean_ms, max_ms) == ("2250.0", "3000.0") and float(p95_ms) == pytest.approx(3000, rel=0.025)
    assert "where the drafter group's time went (drafter-2, 3.0 s)" in lines
    assert lines[-1] == "no figures came from drafter-3"
    # A rank that is in its next launch has not ended it: what is left of the one before does not count.
    RankReport(tmp_path, "target-1", "target", ProfileStats(), interval_s=1e9)
    assert last_figures(tmp_path, "target-1", "run") is None
    with record_path(tmp_path, "target-0").open("a") as file:
        file.write('{"kind": "run", "sta')  # a line under way
    assert last_figures(tmp_path, "target-0", "run").stages["forward"].total_s == 3.0


def test_tables_put_inner_stages_under_their_outer_ones() -> None:
    inner = StageTotals(4, 1.0, 1.0, 0.25, 0.5, 0.5)
    stages = {"evaluate": StageTotals(1, 1.5, 1.5, 1.5, 1.5, 1.5), "evaluate/layers": inner, "backward": inner}
    lines = group_tables([RankFigures("colocated-0", "colocated", stages)]).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["evaluate", "layers", "backward"]
    assert lines[2].split()[1] == "60.0%" and lines[3].startswith("  layers")


def test_levels_compose_and_a_wrong_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    register_schema()
    monkeypatch.setenv("DFLASH_PROFILE_INTERVAL", "2.5")

    def composed(*overrides: str) -> ProfilingConfig:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            return to_train_config(compose("config", list(overrides))).profiling

    assert composed() == ProfilingConfig(level=ProfilingLevel.summary, interval_s=2.5)
    assert composed("profiling=off").level is ProfilingLevel.off
    assert composed("profiling=full", "profiling.interval_s=9") == ProfilingConfig(ProfilingLevel.full, 9.0)
    assert composed("profiling.level=off").level is ProfilingLevel.off
    with pytest.raises(HydraException) as caught:
        composed("profiling.level=some")
    assert one_line(caught.value).startswith("profiling.level: ") and "off" in one_line(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="process names are Linux's")
def test_a_process_bears_its_name() -> None:
    script = (
        "from dflash.profiling.report import name_process\n"
        "name_process('drafter-1234567890')\n"
        "print(open('/proc/self/comm').read().strip())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "drafter-1234567"
