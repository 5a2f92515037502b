"""Finds the ranks of a run among the processes of this machine, and reads what their threads use."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_RANK = re.compile(r"(?:target|drafter|colocated)-([0-9]+)")  # Topology.name, which ranks give their processes
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Rank:
    name: str
    pid: int


@dataclass(slots=True)
class ThreadTimes:
    """What threads of one name have used."""

    name: str
    user_s: float = 0.0
    system_s: float = 0.0
    num_waits: int = 0  # voluntary context switches
    num_preemptions: int = 0  # involuntary ones
    num_threads: int = 0


def find_ranks(run_dir: Path) -> tuple[list[Rank], list[Rank]]:
    """Ranks of a run on this machine, in their order, and ranks that are another run's or cannot be told."""
    candidates = {pid: name for pid, name in _named_processes() if _RANK.fullmatch(name)}
    folder = run_dir.resolve()
    own, others = [], []
    for pid, name in candidates.items():
        if candidates.get(_parent(pid)) != name:  # what a rank forks has its name and its files
            (own if _belongs_to(pid, folder) else others).append(Rank(name, pid))
    return sorted(own, key=_place), sorted(others, key=_place)


def thread_times(pid: int) -> dict[int, ThreadTimes]:
    """What each thread of a process has used so far; nothing for a process that is gone."""
    found = {}
    for task in _entries(_PROC / str(pid) / "task"):
        try:
            stat = (task / "stat").read_bytes()
            status = (task / "status").read_text("utf-8", "replace")
        except OSError:  # it has ended since
            continue
        name, fields = stat[stat.index(b"(") + 1 : stat.rindex(b")")], stat[stat.rindex(b")") + 2 :].split()
        switches = dict(re.findall(r"^(voluntary|nonvoluntary)_ctxt_switches:\s*(\d+)", status, re.MULTILINE))
        found[int(task.name)] = ThreadTimes(
            name.decode("utf-8", "backslashreplace"),
            user_s=int(fields[11]) / _TICKS_PER_S,  # fields 14 and 15 of proc(5), which counts from 1
            system_s=int(fields[12]) / _TICKS_PER_S,
            num_waits=int(switches.get("voluntary", 0)),
            num_preemptions=int(switches.get("nonvoluntary", 0)),
            num_threads=1,
        )
    return found


def used_between(before: dict[int, ThreadTimes], after: dict[int, ThreadTimes]) -> list[ThreadTimes]:
    """What threads used between two looks, by name, the busiest first; those that ended in between are lost."""
    used: dict[str, ThreadTimes] = {}
    for tid, now in after.items():
        then = before.get(tid, ThreadTimes(now.name))
        sums = used.setdefault(now.name, ThreadTimes(now.name))
        sums.user_s += now.user_s - then.user_s
        sums.system_s += now.system_s - then.system_s
        sums.num_waits += now.num_waits - then.num_waits
        sums.num_preemptions += now.num_preemptions - then.num_preemptions
        sums.num_threads += 1
    return sorted(used.values(), key=lambda each: (-each.user_s - each.system_s, -each.num_waits, each.name))


def _place(rank: Rank) -> tuple[int, int]:
    found = _RANK.fullmatch(rank.name)
    assert found is not None
    return int(found[1]), rank.pid


def _named_processes() -> Iterator[tuple[int, str]]:
    for entry in _entries(_PROC):
        if entry.name.isdecimal():
            try:
                yield int(entry.name), (entry / "comm").read_text("utf-8", "replace").rstrip("\n")
            except OSError:
                continue


def _parent(pid: int) -> int:
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return 0
    return int(stat[stat.rindex(b")") + 2 :].split()[1])


def _belongs_to(pid: int, folder: Path) -> bool:
    """Whether a process was told to use a run folder, or, told nothing, has one of its logs or charts open."""
    told = _told_folder(pid)
    if told is not None:
        return told == folder
    return any(path.is_relative_to(folder / kind) for path in _open_files(pid) for kind in ("logs", "tensorboard"))


def _told_folder(pid: int) -> Path | None:
    """The run folder of a process's command line, quoted for Hydra or not."""
    process = _PROC / str(pid)
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
        told = [os.fsdecode(argument)[len("run_dir=") :] for argument in arguments if argument.startswith(b"run_dir=")]
        if not told:
            return None
        text = told[-1]
        if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
            text = re.sub(r"\\([\\'\"])", r"\1", text[1:-1])
        return (Path(text) if os.path.isabs(text) else (process / "cwd").readlink() / text).resolve()
    except (OSError, ValueError):
        return None


def _open_files(pid: int) -> Iterator[Path]:
    for entry in _entries(_PROC / str(pid) / "fd"):
        try:
            target = entry.readlink()
        except OSError:
            continue
        if target.is_absolute():
            yield target


def _entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it is gone or another user's."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []
