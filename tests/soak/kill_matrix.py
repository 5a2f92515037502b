"""Moments at which a rank is killed, freezes or fails, times victims: `python tests/soak/kill_matrix.py [times]`.

Prints a Markdown table of who was told and how soon; exits with 1 if a survivor hangs, ends with 0, needs more than ten
seconds, or does not name the victim in its one line.
"""

import functools
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent
if str(TESTS) not in sys.path:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from helpers_faults import SERVER, Launched, Setting, complaints, launch_direct  # noqa: E402

from dflash.groups import Topology  # noqa: E402

TIMES = 3
LIMIT_S = 10.0
PEER_TIMEOUT_S = 2.0
_SHORT = {"train__max_steps": 4}
_SAVING = {"checkpoint__interval_steps": 2}
_EVALUATING = {"train__eval_interval_steps": 2}
_FROZEN = {"pipeline__peer_timeout_s": PEER_TIMEOUT_S}
_SHALLOW = {"pipeline__queue__depth": 1}


@dataclass(frozen=True, slots=True)
class Cell:
    """One deed; with `killed_at_note` the harness kills the victim while another rank is in the noted moment."""

    moment: str
    victim: str
    fault: str
    options: dict[str, object] = field(default_factory=dict)
    topology: Topology = Topology(2, 2)
    killed_at_note: bool = False
    is_large: bool = False
    pattern: str = ""

    @property
    def expected(self) -> str:
        return self.pattern or rf"^error: \w+-\d+: lost {self.victim}: "

    @property
    def limit_s(self) -> float:
        return LIMIT_S + (PEER_TIMEOUT_S if self.fault.startswith("freeze") else 0.0)


def cells() -> list[Cell]:
    five = Topology(2, 3)
    kills = [
        Cell("waits for credit", "target-0", "kill target-0 idle 5; sleep=0.05 drafter-3 forward 1+", _SHALLOW),
        Cell("waits for input", "drafter-2", "kill drafter-2 idle 5; sleep=0.05 target-0 forward 1+", _SHALLOW),
        Cell("after isend", "target-1", "kill target-1 isend 5"),
        Cell("after isend", "target-0", "kill target-0 isend 7", topology=five),
        Cell("after irecv", "drafter-3", "kill drafter-3 isend 5", topology=five),
        Cell("forward", "target-0", "kill target-0 forward 5"),
        Cell("forward and backward", "drafter-2", "kill drafter-2 forward 5"),
        Cell("sends 100 MB", "target-0", "kill target-0 payload 1", topology=Topology(1, 2), is_large=True),
        Cell("receives 100 MB", "drafter-1", "kill drafter-1 payload 1", topology=Topology(1, 2), is_large=True),
        Cell("all-reduce", "drafter-2", "kill drafter-2 allreduce 3"),
        Cell("all-reduce", "drafter-4", "kill drafter-4 allreduce 3", topology=five),
        Cell("others in the all-reduce", "target-1", during("drafter-2 allreduce 3"), killed_at_note=True),
        Cell("optimizer step", "drafter-3", "kill drafter-3 optimizer 3"),
        Cell("evaluation", "drafter-2", "kill drafter-2 evaluate 1", _EVALUATING),
        Cell("writes a checkpoint", "drafter-2", "kill drafter-2 save 1", _SAVING),
        Cell("writes a checkpoint", "drafter-3", "kill drafter-3 save 1", _SAVING, five),
        Cell("drafters write a checkpoint", "target-0", during("drafter-2 save 1"), _SAVING, killed_at_note=True),
        Cell("EOS", "target-1", "kill target-1 eos 1", _SHORT),
        Cell("EOS", "drafter-2", "kill drafter-2 eos 1", _SHORT),
        Cell("EOS", "drafter-4", "kill drafter-4 eos 1", _SHORT, five),
    ]
    frozen = [
        Cell(f"frozen, limit {PEER_TIMEOUT_S:.0f} s", victim, f"freeze {victim} forward 5", _FROZEN)
        for victim in ("target-1", "drafter-2")
    ]
    failing = [
        Cell("exception", victim, f"fail {victim} {moment}", pattern=f"{victim} ended: no good at {moment}$")
        for victim, moment in (("target-0", "forward 5"), ("drafter-3", "forward 5"), ("drafter-2", "optimizer 3"))
    ]
    return kills + frozen + failing


def during(moment: str) -> str:
    """Keeps a rank in a moment for long enough that the harness can kill another one meanwhile."""
    return f"note {moment}; sleep=0.3 {moment}"


def kill(victim: int, pids: list[int]) -> None:
    os.kill(pids[victim], signal.SIGKILL)


def play(cell: Cell, setting: Setting) -> Launched:
    more = {**(setting.large_payloads if cell.is_large else {}), **cell.options}
    arguments = setting.arguments(cell.topology, setting.new_run(), **more)
    on_note: Callable[[list[int]], None] = lambda pids: None  # noqa: E731
    if cell.killed_at_note:
        on_note = functools.partial(kill, int(cell.victim.split("-")[1]))
    return launch_direct(cell.topology, arguments, cell.fault, on_note=on_note, limit_s=cell.limit_s + 5.0)


def judge(cell: Cell, setting: Setting, times: int) -> bool:
    """Plays a cell so many times, prints its line of the table, and says whether all was well."""
    seconds: list[float] = []
    problems: list[str] = []
    num_survivors, num_cut = 0, 0
    for _ in range(times):
        launched = play(cell, setting)
        wrong = complaints(launched, cell.victim, cell.expected, cell.limit_s)
        problems += wrong
        num_survivors += cell.topology.world_size - 1
        num_cut += launched.share is not None and 0 < launched.share < 1
        if launched.done_s is not None:
            seconds += [rank.ended_s - launched.done_s for rank in launched.others(cell.victim)]
    if cell.is_large and num_cut == 0:
        problems.append("the payload was never cut: it had not begun, or was whole")
    split = f"{cell.topology.num_targets}+{cell.topology.num_drafters}"
    cut = f" (cut {num_cut} times)" if cell.is_large else ""
    median, most = (f"{value * 1e3:.0f}" for value in (statistics.median(seconds or [0]), max(seconds, default=0)))
    told = num_survivors - len(problems)
    print(
        f"| {cell.moment}{cut} | {cell.victim} | {split} | {told} of {num_survivors} | {median} | {most} |", flush=True
    )
    for problem in problems:
        print(f"    {problem}", file=sys.stderr, flush=True)
    return not problems


def main() -> int:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else TIMES
    print("| moment | victim | ranks | survivors told | median, ms | maximum, ms |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="kill-matrix-") as folder:
        for name in ("small", "wide"):
            (Path(folder) / name).mkdir()
        small, wide = Setting.make(Path(folder) / "small"), Setting.make_wide(Path(folder) / "wide")
        is_well = [judge(cell, wide if cell.is_large else small, times) for cell in cells()]
        SERVER.close()
    return 0 if all(is_well) else 1


if __name__ == "__main__":
    sys.exit(main())
