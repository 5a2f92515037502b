"""Runs of the training command whose surroundings misbehave, watched from outside."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch
from helpers_run import ROOT

from dflash.checkpoints.loading import load_drafter

_END_S = 240.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def has_namespaces() -> bool:
    """Whether we may mount file systems that nobody else sees."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def in_namespace(script: str) -> list[str]:
    """What to put before a command for a shell script to run first, in a mount namespace of its own."""
    return ["unshare", "-rm", "sh", "-ec", f'{script}; exec "$@"', "sh"]


class WatchedRun:
    """A launch of target-0 and drafter-1 (or a single rank); ended, whatever happens, when the block is left."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        num_ranks: int = 2,
        before: Sequence[str] = (),
        port: int | None = None,
        clock_jumps: bool = False,
        program: str = "forked_ranks.py",
    ) -> None:
        """`program`: one of tests/ that takes its order as forked_ranks.py does."""
        folder.mkdir(parents=True)
        self.folder = folder
        self.port = free_port() if port is None else port
        order = {
            "folder": str(folder),
            "port": self.port,
            "num_ranks": num_ranks,
            "arguments": list(arguments),
            "clock_jumps": clock_jumps,
        }
        command = [*before, sys.executable, str(ROOT / "tests" / program), json.dumps(order)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(ROOT)}
        with (folder / "launcher.err").open("w") as errors:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, start_new_session=True)

    def __enter__(self) -> "WatchedRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_for(self, is_so: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + _END_S
        while not is_so():
            assert self._process.poll() is None, f"ended before {what}\n{self.everything()}"
            assert time.monotonic() < deadline_s, f"never {what}\n{self.everything()}"
            time.sleep(0.02)

    def pid(self, rank: int) -> int:
        path = self.folder / "pids.json"
        self.wait_for(path.exists, "started its ranks")
        return json.loads(path.read_text())[rank]

    def wait_for_step(self, run_dir: Path, step: int) -> None:
        path = run_dir / "metrics.jsonl"
        self.wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= step, f"came to step {step}")

    def end(self) -> list[int]:
        """Exit code of each rank, once all have ended."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end\n{self.everything()}") from None
        path = self.folder / "codes.json"
        assert path.exists(), (self.folder / "launcher.err").read_text()
        return json.loads(path.read_text())

    def lines(self, rank: int, begin: str = "") -> list[str]:
        """What a rank said on stderr, line by line, without the returns of a progress bar."""
        text = (self.folder / f"rank-{rank}.err").read_text()
        text = re.sub(r"(\[[0-9:]+<[^\]]*\]) ?", r"\1\n", text)  # a progress bar leaves its line open
        return [line for line in re.split(r"[\r\n]+", text) if line.startswith(begin) and line.strip()]

    def everything(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.*")))


def assert_same_weights(one: Path, other: Path) -> None:
    """The newest checkpoints of two run folders hold the same bits."""
    theirs = load_drafter(other).state_dict()
    for name, tensor in load_drafter(one).state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
