"""Stop signals times moments and ranks: `python tests/soak/stop_matrix.py [times]`.

Each run is stopped and resumed, and has to end in the metrics and bits of an undisturbed one. Prints a Markdown table
of the seconds from the signal to the checkpoint and to the last rank's exit; exits with 1 if a promise is broken.
"""

import os
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent
if str(TESTS) not in sys.path:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from helpers_faults import SERVER, Launched, Setting, launch_direct, launch_torchrun  # noqa: E402
from helpers_stops import OPTIONS, TOPOLOGY, differences, saved_after_s, stop_complaints  # noqa: E402

from dflash.checkpoints.finding import list_checkpoints  # noqa: E402

TIMES = 1
SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP}


@dataclass(frozen=True, slots=True)
class Cell:
    """Who gets a signal when; `meanwhile` are faults that bring the moment about."""

    name: str
    rank: str
    moment: str
    kind: str = "term"
    meanwhile: str = ""

    @property
    def fault(self) -> str:
        return f"{self.kind} {self.rank} {self.moment}; {self.meanwhile}"


CELLS = (
    Cell("a target computes", "target-0", "forward 9"),
    Cell("a target computes", "target-1", "forward 20", "int"),
    Cell("a drafter computes", "drafter-2", "forward 20"),
    Cell("a drafter computes", "drafter-3", "forward 21", "int"),
    Cell("starved", "drafter-3", "idle 5", "term", "sleep=0.1 target-1 forward 1+"),
    Cell("starved", "drafter-2", "idle 5", "int", "sleep=0.1 target-0 forward 1+"),
    Cell("blocked", "target-0", "idle 5", "term", "sleep=0.1 drafter-3 forward 1+"),
    Cell("blocked", "target-1", "idle 5", "hup", "sleep=0.1 drafter-3 forward 1+"),
    Cell("all-reduce", "drafter-2", "allreduce 4"),
    Cell("all-reduce, last of the plan", "drafter-3", "allreduce 14", "int"),
    Cell("evaluation", "drafter-2", "evaluate 2"),
    Cell("evaluation", "drafter-3", "evaluate 1", "int"),
    Cell("writes a checkpoint", "drafter-2", "save 1"),
    Cell("writes a checkpoint", "drafter-3", "save 2", "hup"),
)
UNDER_TORCHRUN = (
    Cell("torchrun, while it trains", "drafter-2", "forward 20"),
    Cell("torchrun, while it trains", "target-1", "forward 9", "int"),
)


def judge(cell: Cell, setting: Setting, undisturbed: Path, times: int, is_torchrun: bool) -> bool:
    """Plays a cell so many times, prints its line of the table, and says whether all was well."""
    saved_s: list[float] = []
    gone_s: list[float] = []
    problems: list[str] = []
    for _ in range(times):
        run_dir = setting.new_run()
        arguments = setting.arguments(TOPOLOGY, run_dir, **OPTIONS)
        stopped = (
            under_torchrun(cell, arguments)
            if is_torchrun
            else launch_direct(TOPOLOGY, arguments, cell.fault, limit_s=60.0)
        )
        if is_torchrun:
            problems += [f"told: {rank.told}" for rank in stopped.ranks if rank.told] + list(stopped.left_over)
        else:
            problems += stop_complaints(stopped, run_dir, 128 + SIGNALS[cell.kind])
        if stopped.done_s is None or not list_checkpoints(run_dir):
            problems.append("nothing was saved")
            continue
        saved_s.append(max(saved_after_s(stopped, run_dir), 0.0))
        gone_s.append(stopped.latest_s(""))
        resumed = launch_direct(TOPOLOGY, [*arguments, "resume=auto"])
        problems += [f"resumed: {rank}" for rank in resumed.ranks if rank.exit_code != 0]
        problems += differences(run_dir, undisturbed)
    saved, gone = (f"{statistics.median(s or [0]):.1f} / {max(s, default=0):.1f}" for s in (saved_s, gone_s))
    verdict = "exact" if not problems else "WRONG"
    print(f"| {cell.name} | {cell.rank} | {cell.kind} | {saved} | {gone} | {verdict} |", flush=True)
    for problem in problems:
        print(f"    {problem}", file=sys.stderr, flush=True)
    return not problems


def under_torchrun(cell: Cell, arguments: list[str]) -> Launched:
    """The signal goes to torchrun, which sends SIGTERM to its ranks, when the rank comes to the moment."""
    fault = f"note {cell.rank} {cell.moment}; {cell.meanwhile}"
    return launch_torchrun(TOPOLOGY, arguments, fault, on_note=lambda pid: os.kill(pid, SIGNALS[cell.kind]))


def main() -> int:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else TIMES
    print("| where | who | signal | saved after, s (median / maximum) | all gone after, s | resumed |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="stop-matrix-") as folder:
        setting = Setting.make(Path(folder))
        undisturbed = setting.new_run()
        launch_direct(TOPOLOGY, setting.arguments(TOPOLOGY, undisturbed, **OPTIONS))
        is_well = [judge(cell, setting, undisturbed, times, False) for cell in CELLS]
        is_well += [judge(cell, setting, undisturbed, 1, True) for cell in UNDER_TORCHRUN]
        SERVER.close()
    return 0 if all(is_well) else 1


if __name__ == "__main__":
    sys.exit(main())
