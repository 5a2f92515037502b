"""launch/train.sh run for real, on one agent or on two, and its ranks found so that one of them can be killed."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers_run import ROOT, metrics

from dflash.checkpoints.finding import list_checkpoints
from dflash.checkpoints.loading import load_drafter

TRAIN = str(ROOT / "launch" / "train.sh")
LONG_S = 240.0  # a bound for a machine that is busy with other things, not an expectation
_POLL_S = 0.02
# What decides how train.sh behaves is given by the tests, not by whoever runs them.
_OWN = ("NPROC", "NNODES", "NODE_RANK", "ENDPOINT", "JOB_ID", "JOIN_TIMEOUT", "MAX_RESTARTS", "RUN_DIR")


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in _OWN}
    return {**kept, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **more}


def wait_for(what: str, is_there: Callable[[], bool], timeout_s: float = LONG_S) -> None:
    """Polls a condition; raises AssertionError that says what did not come about."""
    deadline_s = time.monotonic() + timeout_s
    while not is_there():
        assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:.0f} s"
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of the job: its pid and its number in the whole job."""

    pid: int
    rank: int

    def environment(self) -> dict[str, str]:
        """What it was started with."""
        raw = Path(f"/proc/{self.pid}/environ").read_bytes().decode()
        return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


@dataclass(frozen=True, slots=True)
class Job:
    """One run of train.sh on each of one or two agents, with their consoles in files."""

    run_dir: Path
    agents: tuple[subprocess.Popen[bytes], ...]
    consoles: tuple[Path, ...]

    def console(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.consoles)

    def ranks(self) -> list[Rank]:
        """The training processes that live now, by their number."""
        found = []
        for agent in self.agents:
            for pid in _children(agent.pid):
                try:
                    if b"dflash.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        found.append(Rank(pid, int(Rank(pid, -1).environment()["RANK"])))
                except (OSError, KeyError):
                    continue  # it ended meanwhile, or is not the program yet
        return sorted(found, key=lambda rank: rank.rank)

    def newest_step(self) -> int:
        """Step of the newest checkpoint, 0 before there is one."""
        checkpoints = list_checkpoints(self.run_dir)
        return int(checkpoints[-1].name.split("-")[1]) if checkpoints else 0

    def wait_for_step(self, step: int) -> None:
        def is_there() -> bool:
            assert all(agent.poll() is None for agent in self.agents), self.console()
            return self.newest_step() >= step

        wait_for(f"checkpoint of step {step}", is_there)

    def kill(self, rank: int) -> None:
        """SIGKILL to one rank as soon as it is there."""
        wait_for(f"rank {rank}", lambda: rank in [found.rank for found in self.ranks()])
        os.kill(next(found.pid for found in self.ranks() if found.rank == rank), signal.SIGKILL)

    def resumed_after(self) -> list[int]:
        """The steps after which attempts went on, in order."""
        return sorted({int(step) for step in re.findall(r"resuming after step (\d+)", self.console())})

    def finish(self) -> list[int]:
        """Exit codes of the agents."""
        return [agent.wait(LONG_S) for agent in self.agents]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@contextmanager
def started(
    run_dir: Path, arguments: Sequence[str], *, nproc: int, num_agents: int = 1, options: Sequence[str] = ()
) -> Iterator[Job]:
    """train.sh under way; nothing of it is left running afterwards."""
    port = free_port()
    consoles = tuple(run_dir.parent / f"console-{agent}.txt" for agent in range(num_agents))
    agents = []
    for agent, console in enumerate(consoles):
        command = [TRAIN, "--nproc", str(nproc), "--run-dir", str(run_dir), *options]
        if num_agents > 1:
            command += ["--nnodes", str(num_agents), "--node-rank", str(agent), "--endpoint", f"127.0.0.1:{port}"]
        with console.open("wb") as file:
            agents.append(subprocess.Popen([*command, *arguments], stdout=file, stderr=file, env=environment()))
    job = Job(run_dir, tuple(agents), consoles)
    try:
        yield job
    finally:
        for agent in agents:
            children = [rank.pid for rank in job.ranks()] if agent.poll() is None else []
            agent.kill()
            agent.wait()
            for pid in children:
                if Path(f"/proc/{pid}").exists():
                    os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def assert_same_result(run_dir: Path, undisturbed: Path) -> None:
    """Final weights equal bit for bit, and every logged record equal but for what the clock decides."""
    for kind in ("train", "eval"):
        assert metrics(run_dir, kind) == metrics(undisturbed, kind)
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)
    ours, theirs = load_drafter(run_dir).state_dict(), load_drafter(undisturbed).state_dict()
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        assert torch.equal(mine, theirs[name]), name
