"""Profiles every rank of a run that is running on this machine, and writes one report.

    tools/profile_live.sh RUN_DIR [SECONDS] [--wall] [--native] [--gil] [--rate HZ]

Finds the ranks of RUN_DIR, and for SECONDS (10) each, on all ranks at once: first, undisturbed, the CPU time and the
context switches of every thread, from /proc as pidstat reads it; then py-spy over all threads, waiting ones included
(wall), then with native frames (native), then for the holder of Python's lock alone (gil). --wall, --native and --gil
choose among the three; all of them without. The run goes on, slower: py-spy stops a rank for every sample.

Writes RUN_DIR/profiles/<time>/report.md, and beside it what py-spy wrote and said (<rank>.<pass>.raw, .raw.log) and all
shares as numbers (<pass>.json); compare two of them with tools/pyspy_report.py. Only this machine's ranks are seen.

Exit code: 0, 1 when nothing could be profiled, 2 when an argument is wrong.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pyspy_process import Rank, ThreadTimes, find_ranks, thread_times, used_between
from pyspy_report import SOURCE, load, report_json, report_text
from pyspy_stages import StageMap

PASSES = {"wall": ["--idle"], "native": ["--native"], "gil": ["--gil"]}
TITLES = {
    "wall": "Where the time goes (all threads, waiting included)",
    "native": "Where the processor is used (threads that run, with native frames)",
    "gil": "Who holds Python's lock",
}
_PATIENCE_S = 120.0  # beyond the time asked for: reading the symbols of a large library takes long
_NO_PTRACE = (
    "ptrace is not permitted: run this with sudo, or allow it (sysctl kernel.yama.ptrace_scope=0; in a container start "
    "it with --cap-add SYS_PTRACE)"
)
_LINES_OF_TABLE = 20


class CannotProfile(Exception):
    """Why there is nothing to report, in one line."""


def find_pyspy() -> str:
    """The py-spy on PATH or of this Python's environment."""
    found = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if found is None:
        raise CannotProfile("py-spy is not installed: pip install py-spy")
    return found


def check_attaching(pyspy: str, rank: Rank) -> None:
    """Raises CannotProfile when py-spy cannot look into a rank."""
    try:
        done = subprocess.run([pyspy, "dump", "--pid", str(rank.pid)], capture_output=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise CannotProfile(f"py-spy got no answer from {rank.name} (process {rank.pid})") from error
    if done.returncode:
        said = _error_of((done.stderr + done.stdout).decode("utf-8", "replace"))
        reason = _NO_PTRACE if re.search(r"permission denied|not permitted", said, re.IGNORECASE) else said
        raise CannotProfile(f"py-spy cannot attach to {rank.name} (process {rank.pid}): {reason}")


def record(pyspy: str, ranks: Sequence[Rank], name: str, folder: Path, seconds: int, rate: int) -> dict[str, str]:
    """Run py-spy on all ranks at once; returns what went wrong, by rank."""
    running: list[tuple[Rank, Path, subprocess.Popen[bytes]]] = []
    failed = {}
    try:
        for rank in ranks:
            raw = folder / f"{rank.name}.{name}.raw"
            command = [pyspy, "record", "--format", "raw", "--threads", "--pid", str(rank.pid), "--output", str(raw)]
            command += ["--duration", str(seconds), "--rate", str(rate), *PASSES[name]]
            with _log_of(raw).open("wb") as log:
                running.append((rank, raw, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)))
        deadline = time.monotonic() + seconds + _PATIENCE_S
        for rank, raw, process in running:
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                failed[rank.name] = "py-spy did not end in time"
                continue
            if code:
                failed[rank.name] = _error_of(_log_of(raw).read_text("utf-8", "replace"))
    finally:
        for *_, process in running:
            _end(process)
    return failed


def measure_threads(ranks: Sequence[Rank], seconds: int) -> dict[str, tuple[float, list[ThreadTimes]]]:
    """Seconds measured and use by thread name, of each rank that is still there."""
    before = {rank.name: (time.monotonic(), thread_times(rank.pid)) for rank in ranks}
    time.sleep(seconds)
    after = {rank.name: (time.monotonic(), thread_times(rank.pid)) for rank in ranks}
    return {
        name: (after[name][0] - start, used_between(first, after[name][1]))
        for name, (start, first) in before.items()
        if after[name][1]
    }


def threads_text(used: dict[str, tuple[float, list[ThreadTimes]]]) -> str:
    """A table of threads for each rank, the busiest first."""
    parts = []
    for rank, (seconds, threads) in used.items():
        lines = [f"{rank + ':':<18} {'user %':>8} {'system %':>9} {'waits/s':>9} {'preempted/s':>12} {'threads':>8}"]
        for each in threads[:_LINES_OF_TABLE]:
            lines.append(
                f"  {each.name:<16} {100 * each.user_s / seconds:>8.1f} {100 * each.system_s / seconds:>9.1f} "
                f"{each.num_waits / seconds:>9.1f} {each.num_preemptions / seconds:>12.1f} {each.num_threads:>8}"
            )
        if len(threads) > _LINES_OF_TABLE:
            lines.append(f"  ... and {len(threads) - _LINES_OF_TABLE} more names")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def pass_text(
    name: str, ranks: Sequence[Rank], folder: Path, failed: dict[str, str], stages: StageMap, num_looks: int
) -> str:
    """Section of one pass, in which py-spy looked `num_looks` times; its numbers go to <pass>.json."""
    lines = [f"- {rank}: {reason}" for rank, reason in failed.items()]
    files = [folder / f"{rank.name}.{name}.raw" for rank in ranks if rank.name not in failed]
    empty = [file for file in files if file.is_file() and file.stat().st_size == 0]
    lines += [f"- {file.name.removesuffix(f'.{name}.raw')}: no sample" for file in empty]
    profiles, errors = load([str(file) for file in files if file not in empty], stages)
    lines += [f"- {error}" for error in errors]
    if name == "gil":
        held = [(each.name.removesuffix(".gil"), min(1.0, each.num_samples / num_looks)) for each in profiles]
        lines += [f"- {rank}: the lock was held in {share:.0%} of the samples" for rank, share in held]
    text = "\n".join(lines) + ("\n\n" if lines else "")
    if profiles:
        numbers = json.dumps(report_json(profiles, [], stages, errors), indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(numbers + "\n", encoding="utf-8")
        text += f"```\n{report_text(profiles, [], stages, top=15)}```\n"
    return f"## {TITLES[name]}\n\n{text}"


def profile(run_dir: Path, seconds: int, passes: Sequence[str], rate: int) -> Path:
    """Profile the ranks of a run and return the report; raises CannotProfile, also when no rank gave a sample."""
    ranks, others = find_ranks(run_dir)
    if not ranks:
        raise CannotProfile(f"{run_dir}: no rank of this run is running on this machine{_hint(others)}")
    pyspy = find_pyspy()
    check_attaching(pyspy, ranks[0])
    folder = run_dir / "profiles" / time.strftime("%Y-%m-%d_%H-%M-%S")
    folder.mkdir(parents=True)
    _tell(f"{len(ranks)} ranks ({', '.join(rank.name for rank in ranks)}): threads for {seconds} s")
    used = measure_threads(ranks, seconds)
    stages, sections = StageMap(SOURCE), []
    for name in passes:
        _tell(f"py-spy, {name}, for {seconds} s")
        failed = record(pyspy, ranks, name, folder, seconds, rate)
        sections.append(pass_text(name, ranks, folder, failed, stages, seconds * rate))
    head = [
        f"# {run_dir.name}, {folder.name}",
        "",
        f"{seconds} s a part, {rate} samples a second; percent of one core.",
    ]
    head += ["", *(f"- {rank.name}: process {rank.pid}" for rank in ranks), "", "## Threads, undisturbed", ""]
    text = "\n".join([*head, "```", threads_text(used), "```", "", *sections])
    report = folder / "report.md"
    report.write_text(text, encoding="utf-8", errors="backslashreplace")
    if not any((folder / f"{name}.json").is_file() for name in passes):
        raise CannotProfile(f"py-spy has no sample of any rank; what it said is in {report}")
    return report


def _hint(others: Sequence[Rank]) -> str:
    if not others:
        return ""
    return "; ranks of other runs, or of other users, are: " + ", ".join(f"{rank.name} ({rank.pid})" for rank in others)


def _log_of(raw: Path) -> Path:
    return raw.with_name(raw.name + ".log")


def _error_of(said: str) -> str:
    """py-spy's error in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return (errors or lines or ["py-spy failed without a word"])[0]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a py-spy that still runs; at SIGINT it lets go of its process by itself."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be a whole number, 1 or more")
    return int(text)


def main() -> int:
    description = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("profile_live.sh", description=__doc__, formatter_class=description)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("seconds", type=_positive, nargs="?", default=10, metavar="SECONDS")
    for name, options in PASSES.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"py-spy with {options[0]}")
    parser.add_argument("--rate", type=_positive, default=100, metavar="HZ", help="samples a second (%(default)s)")
    arguments = parser.parse_args()
    passes = [name for name in PASSES if getattr(arguments, name)] or list(PASSES)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the finally that ends py-spy
    try:
        if not arguments.run_dir.is_dir():
            raise CannotProfile(f"{arguments.run_dir}: no such folder")
        print(profile(arguments.run_dir, arguments.seconds, passes, arguments.rate))
    except (CannotProfile, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
