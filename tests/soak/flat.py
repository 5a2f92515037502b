"""Whether memory, descriptors and threads of every rank stay flat: `python tests/soak/flat.py [micro-batches]`.

Runs the real command on 1 + 1 and on 2 + 2 ranks with the tiny model, looks at its processes from outside, prints a
table of each rank's figures in the second and in the last tenth of the run, and exits with 1 if anything grew.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
if str(TESTS) not in sys.path:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from helpers_run import ROOT, make_rows, make_target, overrides  # noqa: E402

NUM_MICRO_BATCHES = 10_000
MICRO_BATCHES_PER_STEP = 10
KIB_PER_MIB = 1024
_NAMES = ("target-", "drafter-")
# Samples by two that look at one rank within a second of a save: its threads and files come and go in that time.
_AROUND_A_SAVE_S = 1.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one rank: memory in KiB, counts, and the last step that the run had logged by then."""

    time_s: float
    step: int
    rss: int
    pss: int
    num_fds: int
    threads: tuple[str, ...]
    is_saving: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one rank's samples say; `problems` is empty for a flat one."""

    row: tuple[str, ...]
    problems: tuple[str, ...]


COLUMNS = ("rank", "samples", "RSS in MiB, 2nd to last tenth", "PSS, 2nd and last", "fds", "threads")


def command(num_targets: int, num_drafters: int, folder: Path, num_steps: int, **more: Any) -> list[str]:
    """The run: a few dozen tokens per micro-batch, many epochs, evaluations and checkpoints all along."""
    arguments = {
        "data__max_length": 32,
        "data__tokens_per_micro_batch": 40,
        "data__eval_max_documents": 12,
        "pipeline__num_target_ranks": num_targets,
        "pipeline__queue__depth": 8,
        "pipeline__queue__min_ready": 4,
        "train__micro_batches_per_step": MICRO_BATCHES_PER_STEP,
        "train__max_steps": num_steps,
        "train__log_interval_steps": max(1, num_steps // 200),
        "train__eval_interval_steps": max(1, num_steps // 25),
        "checkpoint__interval_steps": max(1, num_steps // 25),
        "profiling__interval_s": 1.0,
        **more,
    }
    target, rows = folder / "target", folder / "rows.jsonl"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_targets + num_drafters)]
    return [sys.executable, *torchrun, "-m", "dflash.train", *overrides(target, rows, folder / "run", **arguments)]


def watch(arguments: list[str], run_dir: Path, interval_s: float) -> tuple[int, str, dict[str, list[Sample]]]:
    """Runs a command to its end; returns its exit code, what it printed, and each rank's samples by its name."""
    samples: dict[str, list[Sample]] = {}
    output = run_dir.with_name("output.txt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with output.open("w") as file:
        process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                for pid in children(process.pid):
                    look(pid, run_dir, samples)
                time.sleep(interval_s)
        finally:
            process.terminate()  # torchrun takes its ranks along
            process.wait(60)
    return process.returncode, output.read_text(), samples


def children(pid: int) -> list[int]:
    """Processes that a process has started, as the kernel lists them for each of its threads."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(number) for number in task.read_text().split()]
        except OSError:  # the thread has just ended
            continue
    return found


def look(pid: int, run_dir: Path, samples: dict[str, list[Sample]]) -> None:
    """Adds one sample of a rank; a process without a rank's name, or one that just ends, is passed over."""
    process = Path(f"/proc/{pid}")
    try:
        name = (process / "comm").read_text().strip()
        if not name.startswith(_NAMES):
            return
        was_saving = is_saving(run_dir)
        lines = (line.split() for line in (process / "smaps_rollup").read_text().splitlines())
        memory = {words[0]: int(words[1]) for words in lines if words[-1] == "kB"}
        num_fds = len(os.listdir(process / "fd"))
        threads = tuple(sorted((task / "comm").read_text().strip() for task in (process / "task").iterdir()))
        saving = was_saving or is_saving(run_dir)
        sample = Sample(time.time(), last_step(run_dir), memory["Rss:"], memory["Pss:"], num_fds, threads, saving)
    except (OSError, KeyError):
        return
    samples.setdefault(name, []).append(sample)


def is_saving(run_dir: Path) -> bool:
    """Whether a checkpoint is being written, or was a moment ago."""
    folders = [folder for folder in (run_dir / "checkpoints").glob("*") if folder.name != "latest"]
    times = []
    for folder in folders:
        try:
            times.append(folder.stat().st_mtime)
        except OSError:  # pruned or renamed meanwhile
            return True
    is_partial = any(folder.name.startswith(".") for folder in folders)
    return is_partial or (bool(times) and time.time() - max(times) < _AROUND_A_SAVE_S)


def last_step(run_dir: Path) -> int:
    """The last step of the run's records; 0 before the first."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except ValueError:  # being written
            continue
    return 0


def judge(name: str, samples: list[Sample], num_steps: int, *, slack: float = 0.02, slack_mib: float = 4) -> Verdict:
    """Compares a rank's last tenth with its second; the first is for warming up.

    Medians of the memory, since a save holds a copy for a moment; descriptors and threads are compared over all tenths.
    """
    tenth = num_steps / 10
    early = [sample for sample in samples if tenth <= sample.step < 2 * tenth]
    late = [sample for sample in samples if 9 * tenth <= sample.step < num_steps]
    if len(early) < 2 or len(late) < 2:
        return Verdict((name, str(len(samples))), (f"{name}: too few samples: {len(early)} early, {len(late)} late",))
    by_tenth = [median_mib(samples, "rss", place * tenth, (place + 1) * tenth) for place in range(1, 10)]
    # PSS is told, not judged: it is shared with the other ranks, so it rises when one of them ends.
    pss = [median_mib(part, "pss", 0, num_steps) for part in (early, late)]
    memory = [" ".join(f"{value:.1f}" for value in values) for values in (by_tenth, pss)]
    problems, cells = [], [name, str(len(samples)), *memory]
    if by_tenth[-1] > by_tenth[0] * (1 + slack) + slack_mib:
        problems.append(f"{name}: RSS grew from {by_tenth[0]:.1f} to {by_tenth[-1]:.1f} MiB")
    for what in ("num_fds", "threads"):
        usual = [usual_of(samples, what, place * tenth, (place + 1) * tenth) for place in range(1, 10)]
        counts = [len(value) if isinstance(value, tuple) else value for value in usual]
        cells.append(", ".join(map(str, sorted({count for count in counts if count is not None}))))
        # Logs and charts are opened when they are first written; what leaks goes on growing.
        before, after = ([count for count in half if count is not None] for half in (counts[:5], counts[5:]))
        if before and after and max(after) > max(before):
            problems.append(f"{name}: {what} grew from tenth to tenth: {counts}")
    return Verdict(tuple(cells), tuple(problems))


def median_mib(samples: list[Sample], what: str, start: float, end: float) -> float:
    """Median over the samples of some steps; NaN where there is none."""
    values = [getattr(sample, what) for sample in samples if start <= sample.step < end]
    return statistics.median(values) / KIB_PER_MIB if values else math.nan


def usual_of(samples: list[Sample], what: str, start: float, end: float) -> Any:
    """The most frequent value among the samples of some steps, saves left out; None where there is no sample.

    Not the largest: a file that is open for a moment is no leak, and a leak soon is the usual value.
    """
    values = [getattr(sample, what) for sample in samples if start <= sample.step < end and not sample.is_saving]
    return Counter(values).most_common(1)[0][0] if values else None


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows)


def check(num_targets: int, num_drafters: int, num_micro_batches: int, folder: Path) -> bool:
    """Runs one split, prints its table, and says whether it is flat."""
    num_steps = num_micro_batches // MICRO_BATCHES_PER_STEP
    make_target(folder / "target")
    make_rows(folder / "rows.jsonl", 1500, longest=32)
    started_s = time.monotonic()
    arguments = command(num_targets, num_drafters, folder, num_steps)
    code, output, samples = watch(arguments, folder / "run", interval_s=1.0)
    seconds = time.monotonic() - started_s
    verdicts = [judge(name, samples[name], num_steps) for name in sorted(samples)]
    problems = [problem for verdict in verdicts for problem in verdict.problems]
    if code != 0 or len(samples) != num_targets + num_drafters:
        problems.append(f"the run ended with exit code {code}, {len(samples)} ranks seen\n{output[-3000:]}")
    split = f"{num_targets}+{num_drafters}"
    print(f"\n{split}: {num_micro_batches:,} micro-batches in {seconds:.0f} s: {'GREW' if problems else 'flat'}")
    print(table([COLUMNS, *(verdict.row for verdict in verdicts)]))
    print("\n".join(problems), flush=True)
    return not problems


def main() -> int:
    num_micro_batches = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_MICRO_BATCHES
    are_flat = []
    for num_targets, num_drafters in ((1, 1), (2, 2)):
        with tempfile.TemporaryDirectory(prefix="flat-") as folder:
            are_flat.append(check(num_targets, num_drafters, num_micro_batches, Path(folder)))
    return 0 if all(are_flat) else 1


if __name__ == "__main__":
    sys.exit(main())
