"""Where a rank's figures go: its TensorBoard run and its summary lines."""

import ctypes
import sys
import time
from pathlib import Path

from dflash.profiling.charts import Charts
from dflash.profiling.files import AppendFile
from dflash.profiling.stats import ProfileStats, summary_line, wall_s

_PR_SET_NAME = 15


def name_process(name: str) -> None:
    """Give this process a name (15 bytes at most) that `top` and `ps -o comm` show; does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


class RankReport:
    """One rank's TensorBoard run and its stage summary every `interval_s` seconds.

    Stage scalars have the tags `stage/<role>/<stage>_ms` and `share/<role>/<stage>`, against the wall clock; a run
    per rank lets ranks overlay in one chart. The summary line goes to `<run_dir>/logs/<name>.log`. Neither raises
    when its file cannot be written.
    """

    def __init__(
        self, run_dir: Path, name: str, role: str, stats: ProfileStats, interval_s: float, first_step: int = 1
    ) -> None:
        """`first_step`: what an earlier launch of the same run wrote from there on is dropped from the charts."""
        self.stats = stats
        self._name, self._role, self._interval_s = name, role, interval_s
        self._charts = Charts(run_dir / "tensorboard" / name, first_step)
        self._log = AppendFile(run_dir / "logs" / f"{name}.log")
        self._started = time.monotonic()
        self._due = self._started + interval_s
        self._step = first_step
        self._counts: dict[str, float] = {}

    def scalars(self, values: dict[str, float], step: int) -> None:
        for tag, value in values.items():
            self._charts.add(tag, value, step)
        self._charts.flush()

    def count(self, tag: str, amount: float) -> None:
        """Add to a rate, written as `tag` per second with the next stage summary."""
        self._counts[tag] = self._counts.get(tag, 0.0) + amount

    def line(self, text: str) -> None:
        """Add a line to this rank's log."""
        self._log.line(f"{time.strftime('%H:%M:%S')} {text}")

    def poll(self, step: int | None = None) -> None:
        """Write the stage summary if the interval is over; without a step, under the one last named."""
        self._step = step or self._step
        self.stats.collect()
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval_s
            self._write_interval(self._step)

    def _write_interval(self, step: int) -> None:
        now = time.monotonic()
        for tag, amount in self._counts.items():
            self._charts.add(tag, amount / max(now - self._started, 1e-9), step)
        self._started, self._counts = now, {}
        totals = self.stats.take_interval()
        whole = wall_s(totals) or 1.0
        for path, stage in totals.items():
            self._charts.add(f"stage/{self._role}/{path}_ms", stage.mean_s * 1e3, step)
            if "/" not in path:
                self._charts.add(f"share/{self._role}/{path}", stage.total_s / whole, step)
        self._charts.flush()
        self.line(summary_line(self._name, totals))

    @property
    def step(self) -> int:
        """The step last named."""
        return self._step

    def close(self) -> None:
        """Write what is left, and the totals of the whole run."""
        self._write_interval(self._step)
        self.line("whole run: " + summary_line(self._name, self.stats.run))
        self._charts.close()
        self._log.close()
