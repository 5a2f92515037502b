"""Stages partition a rank's time, and what is written can be read back."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers_run import ROOT, scalars

from dflash.profiling.report import RankReport
from dflash.profiling.stats import OTHER, ProfileStats, summary_line, wall_s


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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
    totals = stats.take_interval()
    assert {path: stage.total_s for path, stage in totals.items()} == {
        OTHER: 1 + 3 * 0.5 + 0.25,
        "forward": 21,
        "forward/attention": 15,
        "pack": 4,
    }
    assert wall_s(totals) == clock.now_s - 100
    assert (totals["forward"].count, totals["forward"].mean_s, totals["forward"].max_s) == (3, 7, 7)
    clock.now_s += 3
    assert {path: stage.total_s for path, stage in stats.take_interval().items()} == {OTHER: 3}
    assert wall_s(stats.run) == clock.now_s - 100
    assert summary_line("target-0", totals).startswith("target-0 27.8 s: forward 75.7% (7000.0 ms x 3), pack 14.4%")


def test_a_report_writes_stages_rates_and_lines(tmp_path: Path) -> None:
    clock = Clock()
    stats = ProfileStats(clock=clock)
    report = RankReport(tmp_path, "target-0", "target", stats, interval_s=0.0)
    with stats.stage("forward"):
        clock.now_s += 3
    clock.now_s += 1
    report.count("throughput/tokens_per_s", 500)
    report.poll(step=7)
    report.close()
    written = scalars(tmp_path, "target-0")
    assert written["stage/target/forward_ms"][0] == (7, 3000.0)
    assert written["share/target/forward"][0] == (7, 0.75)
    assert written["throughput/tokens_per_s"][0][0] == 7 and written["throughput/tokens_per_s"][0][1] > 0
    lines = (tmp_path / "logs" / "target-0.log").read_text().splitlines()
    assert "forward 75.0% (3000.0 ms x 1)" in lines[0] and "whole run: target-0 4.0 s" in lines[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="process names are Linux's")
def test_a_process_bears_its_name() -> None:
    script = (
        "from dflash.profiling.report import name_process\n"
        "name_process('drafter-1234567890')\n"
        "print(open('/proc/self/comm').read().strip())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "drafter-1234567"
