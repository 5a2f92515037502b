"""Runs of the real training command in which something happens to a rank, and what each rank made of it."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from helpers_run import ROOT, make_rows, make_target, overrides

from dflash.groups import Topology

TESTS = Path(__file__).parent
_MARK = "DFLASH_TEST_RUN"  # in the environment of all processes of a launch, so that none is overlooked
_GONE_S = 10.0
_START_S = 120.0  # a loaded machine takes long to import everything


@dataclass(frozen=True, slots=True)
class Ended:
    """How one rank ended; `exit_code` is minus the signal that killed it, None for one that had to be ended."""

    name: str
    exit_code: int | None
    ended_s: float
    stderr: str
    stdout: str = ""

    @property
    def told(self) -> list[str]:
        """Its lines for the user, without the progress bar's returns before them."""
        return [line for line in re.split(r"[\r\n]", self.stderr) if line.startswith("error: ")]


@dataclass(frozen=True, slots=True)
class Launched:
    """A whole launch: its ranks, when the deed was done (None: never), and the processes that outlived it."""

    ranks: tuple[Ended, ...]
    done_s: float | None
    share: float | None  # of the large payload that had arrived
    left_over: tuple[str, ...] = ()
    torchrun_code: int | None = None

    def rank(self, name: str) -> Ended:
        return next(rank for rank in self.ranks if rank.name == name)

    def others(self, name: str) -> list[Ended]:
        return [rank for rank in self.ranks if rank.name != name]

    def latest_s(self, name: str) -> float:
        """Seconds from the deed to the end of the last survivor of rank `name`."""
        assert self.done_s is not None
        return max(rank.ended_s for rank in self.others(name)) - self.done_s


class RankServer:
    """A process that forks ranks; see rank_server.py. One launch at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""

    def start(self, launches: Sequence[Mapping[str, object]]) -> list[int]:
        """Starts the ranks; returns their process ids."""
        if self._process is None:
            environment = base_environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
            command = [sys.executable, str(TESTS / "rank_server.py")]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, bufsize=0, **pipes)
        self._process.stdin.write(json.dumps(list(launches)).encode() + b"\n")
        pids = self._line(_START_S)
        assert pids is not None, "the rank server does not answer"
        return pids

    def ended(self, timeout_s: float) -> tuple[int, int, float] | None:
        """The next rank that ends: (rank, exit code, time); None when none does in time."""
        line = self._line(timeout_s)
        return None if line is None else tuple(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None  # the next launch starts another

    def _line(self, timeout_s: float) -> list[Any] | None:
        while b"\n" not in self._unread:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                return None
            self._unread += os.read(self._process.stdout.fileno(), 4096)
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


def base_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONFAULTHANDLER": "1"}


SERVER = RankServer()


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and on what launches run; all of a test share it, a launch gets a run folder of its own."""

    target: Path
    rows: Path
    folder: Path

    @classmethod
    def make(cls, folder: Path, num_rows: int = 300) -> "Setting":
        return cls(make_target(folder / "target"), make_rows(folder / "rows.jsonl", num_rows), folder)

    @classmethod
    def make_wide(cls, folder: Path) -> "Setting":
        """Micro-batches whose payload is large, although a target's forward is cheap."""
        target = make_target(folder / "target", hidden_size=1024, intermediate_size=32)
        return cls(target, make_rows(folder / "rows.jsonl", 400, longest=450), folder)

    @property
    def large_payloads(self) -> dict[str, object]:
        """Options with which the first payloads of `make_wide` have 100 MB; nobody trains on them before the deed."""
        return {
            "data__tokens_per_micro_batch": 8192,
            "data__max_length": 512,
            "train__micro_batches_per_step": 2,
            "pipeline__num_send_buffers": 1,
            "pipeline__queue__depth": 1,
        }

    def new_run(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="run-", dir=self.folder)) / "run"

    def arguments(self, topology: Topology, run_dir: Path, **more: object) -> list[str]:
        """A run long enough that the deed comes before its end, unless `more` says otherwise."""
        keys = {
            "pipeline__num_target_ranks": topology.num_targets,
            "train__max_steps": 2000,
            "data__cache_dir": self.folder / "corpora",
            **more,
        }
        return overrides(self.target, self.rows, run_dir, **keys)


def launch_direct(
    topology: Topology,
    arguments: list[str],
    fault: str = "",
    *,
    on_note: Callable[[list[int]], None] = lambda pids: None,
    limit_s: float = 10.0,
    start_limit_s: float = 120.0,
) -> Launched:
    """Starts all ranks without torchrun, which would end the survivors before they could show that they end.

    When the deed is done, or after `start_limit_s`, the ranks have `limit_s` seconds to end; what has not ended by
    then, with the exception of a frozen victim, gets its stacks dumped and the exit code None. `on_note` is called
    with the ranks' process ids once the deed is done.
    """
    # The store is ours, as it is the agent's under torchrun, so that it outlives any rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    note = folder / "note"
    num_ranks = topology.world_size
    pids = SERVER.start(
        [_rank_launch(topology, rank, arguments, fault, folder, store.port) for rank in range(num_ranks)]
    )
    ended: dict[int, tuple[int | None, float]] = {}
    frozen = [rank for rank in range(num_ranks) if f"freeze {topology.name(rank)} " in fault]
    deadline_s, is_done = time.time() + start_limit_s, False
    while any(rank not in ended and rank not in frozen for rank in range(num_ranks)):
        if not is_done and note.exists():
            is_done, deadline_s = True, time.time() + limit_s
            on_note(pids)
        if (news := SERVER.ended(0.01)) is not None:
            ended[news[0]] = news[1:]
        elif time.time() > deadline_s:
            break
    _end(pids, ended, frozen)
    ranks = tuple(
        Ended(topology.name(rank), *ended[rank], _read(folder, rank, "stderr"), _read(folder, rank, "stdout"))
        for rank in range(num_ranks)
    )
    done_s, share = _number(note), _number(note.with_name("note.share"))
    shutil.rmtree(folder)
    return Launched(ranks, done_s, share)


def _end(pids: list[int], ended: dict[int, tuple[int | None, float]], frozen: list[int]) -> None:
    """Ends the ranks that have not ended; those that should have get to say where they hang."""
    hung = [rank for rank in range(len(pids)) if rank not in ended and rank not in frozen]
    left = [rank for rank in range(len(pids)) if rank not in ended]
    for rank in left:
        os.kill(pids[rank], signal.SIGABRT if rank in hung else signal.SIGKILL)
    while len(ended) < len(pids):
        news = SERVER.ended(_GONE_S)
        if news is None:
            for rank in left:
                os.kill(pids[rank], signal.SIGKILL)
        else:
            ended[news[0]] = (None, news[2]) if news[0] in hung else news[1:]


def _rank_launch(
    topology: Topology, rank: int, arguments: list[str], fault: str, folder: Path, port: int
) -> dict[str, object]:
    (folder / str(rank)).mkdir()
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "DFLASH_TEST_FAULT": fault,
        "DFLASH_TEST_NOTE": str(folder / "note"),
    }
    return {"environment": environment, "arguments": arguments, "folder": str(folder / str(rank))}


def launch_torchrun(
    topology: Topology,
    arguments: list[str],
    fault: str = "",
    *,
    on_note: Callable[[int], None] = lambda pid: None,
    limit_s: float = 60.0,
) -> Launched:
    """Starts the command under torchrun; `on_note` gets its process id once the deed is done.

    Raises subprocess.TimeoutExpired when it has not ended `limit_s` seconds after the deed.
    """
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    note, mark = folder / "note", uuid.uuid4().hex
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--log-dir", str(folder), "--redirects=3"]
    command += ["--nproc_per_node", str(topology.world_size), str(TESTS / "faulty_train.py"), *arguments]
    environment = base_environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])}
    environment |= {"DFLASH_TEST_FAULT": fault, "DFLASH_TEST_NOTE": str(note), _MARK: mark}
    with (folder / "torchrun").open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)
    try:
        started_s = time.monotonic()
        while fault and not note.exists() and process.poll() is None and time.monotonic() - started_s < 120:
            time.sleep(0.01)
        if fault and note.exists():
            on_note(process.pid)
        code = process.wait(limit_s if fault else 240)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        left = left_over(mark, 5.0)
    ended_s = time.time()
    ranks = tuple(
        Ended(topology.name(rank), None, ended_s, _found(folder, rank, "stderr"), _found(folder, rank, "stdout"))
        for rank in range(topology.world_size)
    )
    done_s = _number(note)
    shutil.rmtree(folder)
    return Launched(ranks, done_s, None, left, code)


def left_over(mark: str, patience_s: float) -> tuple[str, ...]:
    """Command lines of a launch's processes that do not end by themselves in time; they are killed."""
    deadline_s = time.monotonic() + patience_s
    while True:
        found = _marked(mark)
        if not found or time.monotonic() > deadline_s:
            break
        time.sleep(0.05)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return tuple(found.values())


def _marked(mark: str) -> dict[int, str]:
    """Processes that were started with the mark in their environment."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def _number(path: Path) -> float | None:
    return float(path.read_text()) if path.exists() else None


def _read(folder: Path, rank: int, name: str) -> str:
    return (folder / str(rank) / name).read_text(errors="replace")


def _found(folder: Path, rank: int, name: str) -> str:
    """What torchrun has redirected: <log folder>/<run>/attempt_<n>/<rank>/<name>.log, all attempts in turn."""
    paths = sorted(folder.glob(f"*/attempt_*/{rank}/{name}.log"))
    return "".join(path.read_text(errors="replace") for path in paths)


def complaints(launched: Launched, victim: str, pattern: str, limit_s: float = 10.0) -> list[str]:
    """What is wrong with the survivors of `victim`: each has to exit non-zero, in time, with one line that fits."""
    wrong = []
    if launched.done_s is None:
        return [
            f"the deed was never done; {[(rank.name, rank.exit_code, rank.stderr[-600:]) for rank in launched.ranks]}"
        ]
    for rank in launched.others(victim):
        where = f"{rank.name} ({rank.exit_code}, {rank.told})"
        if rank.exit_code is None:
            wrong.append(f"{where} hung: {rank.stderr[-3000:]}")
        elif rank.exit_code != 1:
            wrong.append(f"{where} did not exit with 1: {rank.stderr[-600:]}")
        elif len(rank.told) != 1 or not re.search(pattern, rank.told[0]) or "Traceback" in rank.stderr:
            wrong.append(f"{where} did not tell /{pattern}/ in one line: {rank.stderr[-600:]}")
        elif rank.ended_s - launched.done_s > limit_s:
            wrong.append(f"{where} took {rank.ended_s - launched.done_s:.1f} s")
    return wrong + [f"left running: {command}" for command in launched.left_over]
