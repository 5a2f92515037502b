"""Where a rank's figures go: its TensorBoard run, its log, and the records that other ranks and tools read."""

import ctypes
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dflash.profiling.charts import BANDS_PLACE, Charts
from dflash.profiling.files import AppendFile
from dflash.profiling.layout import band_place, edge_below, layout_summary, stack_run, stack_tags, stacked_shares
from dflash.profiling.records import RankFigures, RecordFile, last_figures, wait_for_figures
from dflash.profiling.spans import SpanWriter
from dflash.profiling.stats import ProfileStats
from dflash.profiling.tables import group_tables, summary_line
from dflash.profiling.totals import StageTotals, shares, wall_s
from dflash.profiling.window import ProfilerWindow

_PR_SET_NAME = 15
_DEVICE_PATIENCE_S = 5.0
_MAX_PAST_POINTS = 200  # beyond, every other one is dropped: memory must not grow with the run
_RANKS_PATIENCE_S = 10.0  # all have passed the last barrier: what is waited for is the disk


def name_process(name: str) -> None:
    """Give this process a name (15 bytes at most) that `top` and `ps -o comm` show; does nothing outside Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Point:
    """The bands of a group at the end of one interval."""

    step: int
    wall_time: float
    edges: dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Ended:
    """What was known on the host when an interval ended, which the device may still have been working on."""

    step: int
    counts: dict[str, float]
    gauges: Mapping[str, float]


class RankReport:
    """One rank's TensorBoard run, and the summary of its stages every `interval_s` seconds.

    Stages have the tags `stage/<role>/<stage>_ms`, `_max_ms` and `_p95_ms`, on CUDA `launch/<role>/<stage>_ms`, the
    host's part, and `share/<role>/<stage>`, against the wall clock; a run per rank lets ranks overlay in one chart. The
    summary line goes to `<run_dir>/logs/<name>.log`, the figures to `<run_dir>/profile/<name>.jsonl`. None of it raises
    when its file cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        name: str,
        role: str,
        stats: ProfileStats,
        interval_s: float,
        first_step: int = 1,
        *,
        sample: Callable[[], Mapping[str, float]] = dict,
        spans: SpanWriter | None = None,
        group: "GroupCharts | None" = None,
        window: ProfilerWindow | None = None,
        ranks: Sequence[str] = (),
    ) -> None:
        """`first_step`: what an earlier launch of the same run wrote from there on is dropped from the charts.

        `sample`, and all that is added to `sources`, give other scalars by tag, once per interval, at which `spans` are
        written, too; `group` is what one of the ranks shows of all; `window` is looked after by the loops; `ranks` are
        the names of all ranks of this launch.
        """
        self.stats, self.spans, self.window = stats, spans, window
        self.sources = [sample]
        self._name, self._role, self._interval_s = name, role, interval_s
        self._group = group
        self._charts = Charts(run_dir / "tensorboard" / name, first_step)
        self._log = AppendFile(run_dir / "logs" / f"{name}.log")
        self._records = RecordFile(run_dir, name, role, first_step, ranks or (name,)) if stats.is_on else None
        self._due = time.monotonic() + interval_s
        self._step = first_step
        self._counts: dict[str, float] = {}
        self._told_tags: set[str] = set()
        self._ended: deque[_Ended] = deque()
        if group is not None:
            self._charts.add_summary(group.layout, first_step)
            self._charts.flush()

    def scalars(self, values: dict[str, float], step: int) -> None:
        """Chart what the loop tells at steps of its own choice, and from now on nobody else does."""
        self._told_tags.update(values)
        self._chart(values, step)

    def _chart(self, values: dict[str, float], step: int) -> None:
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
        if not self.stats.is_on:
            return
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval_s
            self._end_interval()
        self._write_intervals()

    @property
    def step(self) -> int:
        """The step last named."""
        return self._step

    def close(self) -> None:
        """Write what is left, and the totals of the whole run.

        A device that has failed does not keep what is known without it from being written: the first error is raised
        at the end.
        """
        tasks: list[Callable[[], None]] = []
        if self._records is not None:
            finish = partial(self.stats.finish, _DEVICE_PATIENCE_S)
            tasks += [self._end_interval, finish, self._write_intervals, self._write_run]
        # Behind the totals, which the rank with the console waits for: writing a trace may take long.
        tasks.append(self._close_window)
        sinks = (self._records, self.spans, self._charts, self._log)
        _do_all([*tasks, *(sink.close for sink in sinks if sink is not None)])

    def _close_window(self) -> None:
        if self.window is not None and (told := self.window.close()) is not None:
            self.line(told)

    def _write_run(self) -> None:
        assert self._records is not None
        totals = self.stats.run_totals()
        self.line("whole run: " + summary_line(self._name, totals, has_launches=self.stats.has_device_clock))
        self._records.run(self._step, totals)

    def _end_interval(self) -> None:
        gauges = {tag: value for source in self.sources for tag, value in source().items()}
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        self.stats.cut()
        self._ended.append(_Ended(self._step, counts, gauges))  # only now: each has its interval, even if cutting fails

    def _write_intervals(self) -> None:
        for totals in self.stats.take_intervals():
            self._write_interval(totals, self._ended.popleft())

    def _write_interval(self, totals: dict[str, StageTotals], ended: _Ended) -> None:
        assert self._records is not None
        has_launches = self.stats.has_device_clock
        # Against the stages' own time, which in the first interval begins before this report does.
        rates = {tag: amount / max(wall_s(totals), 1e-9) for tag, amount in ended.counts.items()}
        self.line(summary_line(self._name, totals, rates, has_launches))
        self._records.interval(ended.step, totals, rates, dict(ended.gauges))
        untold = ended.gauges.keys() - self._told_tags
        values: dict[str, float] = {**rates, **{tag: ended.gauges[tag] for tag in sorted(untold)}}
        for path, stage in totals.items():
            if stage.count:  # no occurrence ended: there is a share of the time, but no length
                values[f"stage/{self._role}/{path}_ms"] = stage.mean_s * 1e3
                values[f"stage/{self._role}/{path}_max_ms"] = stage.max_s * 1e3
                values[f"stage/{self._role}/{path}_p95_ms"] = stage.p95_s * 1e3
                if has_launches:
                    values[f"launch/{self._role}/{path}_ms"] = stage.launch_s / stage.count * 1e3
        values |= {f"share/{self._role}/{path}": share for path, share in shares(totals).items()}
        self._chart(values, ended.step)
        if self.spans is not None:
            self.spans.flush()
        if self._group is not None:
            self._group.show(RankFigures(self._name, self._role, totals), ended.step)


def _do_all(tasks: Iterable[Callable[[], None]]) -> None:
    """Do each task, whatever becomes of those before it, then raise the first error that there was."""
    first_error: BaseException | None = None
    for task in tasks:
        try:
            task()
        except BaseException as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error


class GroupCharts:
    """What one rank shows of all: a layout for the page, mean stage shares of each group, tables at the end.

    Other ranks' figures are those of their last interval, as their records in the run folder have them.
    """

    def __init__(self, run_dir: Path, roles: Mapping[str, str], first_step: int) -> None:
        """`roles`: role by name of every rank."""
        self._run_dir, self._roles, self._first_step = run_dir, roles, first_step
        self._bands: dict[str, Charts] = {}
        self._past: dict[str, list[_Point]] = {}
        self._stages: dict[str, set[str]] = {}
        self.layout = layout_summary(dict.fromkeys(roles.values()))

    def show(self, own: RankFigures, step: int) -> None:
        """Add a point to each band of the groups' charts."""
        others = (last_figures(self._run_dir, name, "interval") for name in self._roles if name != own.name)
        ranks: Sequence[RankFigures] = [own, *(figures for figures in others if figures is not None)]
        for role in dict.fromkeys(figures.role for figures in ranks):
            known = self._stages.setdefault(role, set())
            edges = stacked_shares([figures.stages for figures in ranks if figures.role == role], known)
            known.update(edges)
            point, past = _Point(step, time.time(), edges), self._past.setdefault(role, [])
            for stage in edges:
                charts = self._bands.get(stack_run(role, stage)) or self._new_band(role, stage)
                _add_point(charts, role, stage, point)
                charts.close()  # until the next interval: bands come as stages do, and shall not cost a descriptor each
            if edges:
                past.append(point)
            if len(past) > _MAX_PAST_POINTS:
                del past[1::2]

    def _new_band(self, role: str, stage: str) -> Charts:
        """The run of a band, which is as long as those that came before: a relative axis counts from a run's start."""
        run = stack_run(role, stage)
        # As in the stack, so that the page's seven colours come by turns there.
        place = BANDS_PLACE + 3 * list(dict.fromkeys(self._roles.values())).index(role) + band_place(stage)
        charts = self._bands[run] = Charts(self._run_dir / "tensorboard" / run, self._first_step, place)
        for point in self._past[role]:
            _add_point(charts, role, stage, point)
        return charts


def _add_point(charts: Charts, role: str, stage: str, point: _Point) -> None:
    band = point.edges.get(stage) or (edge_below(stage, point.edges),) * 2
    for tag, edge in zip(stack_tags(role), band, strict=True):
        charts.add(tag, edge, point.step, point.wall_time)


def final_tables(run_dir: Path, names: Sequence[str]) -> str:
    """Where the time of both groups went, once all these ranks have closed their reports; waits seconds at most."""
    found = wait_for_figures(run_dir, names, _RANKS_PATIENCE_S)
    present = {figures.name for figures in found}
    return group_tables(found, [name for name in names if name not in present])
