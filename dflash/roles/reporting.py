"""A rank's report, as its configuration wants it, and what the console shows of all ranks at the end."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from dflash.config import ProfilingConfig, ProfilingLevel
from dflash.profiling.clock import measure_offset
from dflash.profiling.gauges import Gauges
from dflash.profiling.report import GroupCharts, RankReport, final_tables
from dflash.profiling.spans import SpansHead, SpanWriter
from dflash.profiling.stats import ProfileStats
from dflash.profiling.window import ProfilerWindow
from dflash.roles.agreement import OwnError
from dflash.roles.peers import LOADING_S
from dflash.roles.setup import Run


def start_stats(config: ProfilingConfig, device: torch.device) -> ProfileStats:
    """The clock of a rank's stages: its time runs from here on."""
    return ProfileStats(device, is_on=config.level is not ProfilingLevel.off)


def open_report(run: Run, stats: ProfileStats) -> RankReport:
    """The report of this rank; that of the console's rank shows the groups, too. All ranks call it together."""
    spans, topology = None, run.topology
    roles = {topology.name(rank): topology.role(rank).value for rank in range(topology.world_size)}
    role = topology.role(run.rank).value
    if run.config.profiling.level is ProfilingLevel.full:
        try:
            clock, launch = measure_offset(run.rank, topology.world_size)
        except ConnectionError as error:
            raise OwnError(f"{run.name}: {error}") from error
        spans = SpanWriter(run.run_dir, SpansHead(run.name, role, run.rank, os.getpid(), launch, clock))
        stats.on_span = spans.on_span
    shows_groups = stats.is_on and _is_console(run)
    return RankReport(
        run.run_dir,
        run.name,
        role,
        stats,
        run.config.profiling.interval_s,
        first_step=run.first_step,
        sample=Gauges(run.device).sample if stats.is_on else dict,
        spans=spans,
        group=GroupCharts(run.run_dir, roles, run.first_step) if shows_groups else None,
        window=_window(run),
        ranks=tuple(roles),
    )


def _window(run: Run) -> ProfilerWindow | None:
    """torch.profiler's part of the run, on the ranks that are to have one."""
    wanted = run.config.profiling.torch
    if wanted.start_step is None or (wanted.ranks is not None and run.rank not in wanted.ranks):
        return None
    return ProfilerWindow(run.run_dir, run.name, run.device, wanted.start_step, wanted.num_steps)


def move_window(report: RankReport, step: int, busy: Callable[[float], AbstractContextManager[None]]) -> None:
    """Start or end torch.profiler's window if it is time; `busy` lets peers know, since writing it takes a while."""
    window = report.window
    if window is not None and window.is_due(step):
        with busy(LOADING_S), report.stats.stage("torch_profiler"):
            told = window.move(step)
        if told is not None:
            report.line(told)


def show_tables(run: Run) -> None:
    """Print where both groups' time went, on the console's rank, once this rank's report is closed."""
    if run.config.profiling.level is ProfilingLevel.off or not _is_console(run):
        return
    names = [run.topology.name(rank) for rank in range(run.topology.world_size)]
    print(final_tables(run.run_dir, names), flush=True)


def _is_console(run: Run) -> bool:
    """Whether this is the rank with the progress bar."""
    return run.rank == run.topology.drafter_rank(0)
