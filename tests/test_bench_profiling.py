"""tools/bench_profiling.py measures and prints, at sizes that take a moment."""

import re
import runpy
import sys

import pytest
from helpers_run import ROOT


def test_the_benchmark_prints_its_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--steps 2 --hidden-size 32 --layers 4 --tokens 64 --interval 30"
    monkeypatch.setattr(sys, "argv", ["bench_profiling.py", *sizes.split()])
    runpy.run_path(str(ROOT / "tools" / "bench_profiling.py"), run_name="__main__")
    figures = capsys.readouterr().out
    for pattern in (
        r"a stage costs [0-9.]+ us, [0-9.]+ us when profiling is off",
        r"the end of an interval costs [0-9.]+ ms, every 30 s",
        r"a step of [0-9.]+ ms has [0-9]+ stages: profiling is [0-9.]+% of it",
        r"when off: [0-9.]+%",
        r"steps in turns, with and without: [0-9.]+ and [0-9.]+ ms, ratio [0-9.]+ .* quartiles of 2\)",
    ):
        assert re.search(pattern, figures), pattern
    # Each of a step's twelve micro-batches has ten stages or so of its own.
    assert 100 < int(re.search(r"has ([0-9]+) stages", figures)[1]) < 200
