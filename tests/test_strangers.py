"""Strangers at the control port of a real training run: turned away with a word, and nothing else changes."""

import os
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers_environment import WatchedRun, assert_same_weights
from helpers_run import make_rows, make_target, metrics, overrides

from dflash.transport.messages import Kind, Message, encode

_NUM_SILENT = 12
_NUM_SCANS = 1000
SHORT_QUEUE = {"pipeline__queue__depth": 1, "pipeline__queue__min_ready": 1}  # the drafter soon waits for the target
_DROPPED = "control port: dropped"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    folder = tmp_path_factory.mktemp("data")
    target, rows = make_target(folder / "target"), make_rows(folder / "rows.jsonl", 60)
    more = {"train__max_steps": 8, "train__micro_batches_per_step": 2, "pipeline__peer_timeout_s": 200.0, **SHORT_QUEUE}
    return lambda run_dir: overrides(target, rows, run_dir, **more)


def test_strangers_change_nothing_and_are_told_in_few_lines(
    arguments: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    with WatchedRun(tmp_path / "quiet", arguments(tmp_path / "quiet" / "run")) as quiet:
        assert quiet.end() == [0, 0]
    run_dir = tmp_path / "visited" / "run"
    with WatchedRun(tmp_path / "visited", arguments(run_dir)) as run:
        run.wait_for_step(run_dir, 2)
        target = run.pid(0)
        address, token = whereabouts(run)
        os.kill(target, signal.SIGSTOP)  # the drafter waits for it, so the run lasts as long as the visits
        try:
            assert address[1] in listening_ports(run.pid(1)) and address[0] == "127.0.0.1"
            visit(address, token, run)
        finally:
            os.kill(target, signal.SIGCONT)
        assert run.end() == [0, 0]
        told = run.lines(1, _DROPPED)
    assert_same_weights(tmp_path / "quiet" / "run", run_dir)
    assert metrics(run_dir) == metrics(tmp_path / "quiet" / "run")
    for reason in (
        "no control message",
        "does not know this run's token",
        "protocol version 9",
        "it hung up",
        "rank 7 is not expected",
        "rank 0 is not expected",
        "it did not say who it is",
    ):
        assert any(reason in line for line in told), (reason, told)
    assert any("more connections, last 127.0.0.1 port" in line for line in told)
    assert len(told) <= 20 + 3, told  # twenty of their own, then one a minute and one at the end


def visit(address: tuple[str, int], token: bytes, run: WatchedRun) -> None:
    """All kinds of strangers, one after another; returns when the last one has been turned away."""
    hello = encode(Message(Kind.HELLO, rank=0, token=token))
    for says in (
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n".ljust(64, b"\n"),
        encode(Message(Kind.HELLO, rank=0, token=bytes(16))),
        hello[:4] + struct.pack("<H", 9) + hello[6:],
        encode(Message(Kind.HELLO, rank=7, token=token)),
        hello,  # a second target-0
        encode(Message(Kind.ERROR, text="everybody stop")),
    ):
        with socket.create_connection(address, timeout=60) as sock:
            sock.sendall(says)
            assert_hung_up(sock)
    with socket.create_connection(address, timeout=60) as sock:
        sock.sendall(hello[:30])
    with socket.create_connection(address, timeout=60) as sock:
        reset_at_close(sock)
    # Half a greeting and silence end by themselves, without any further visitor.
    silent = [socket.create_connection(address, timeout=60) for _ in range(_NUM_SILENT)]
    silent[0].sendall(hello[:30])
    since_s = time.monotonic()
    for sock in silent:
        assert_hung_up(sock)
        sock.close()
    print(f"{_NUM_SILENT} silent strangers were dropped within {time.monotonic() - since_s:.1f} s")
    since_s = time.monotonic()
    for _ in range(_NUM_SCANS):
        with socket.create_connection(address, timeout=60) as sock:
            reset_at_close(sock)
    print(f"{_NUM_SCANS} scans took {time.monotonic() - since_s:.1f} s")
    with socket.create_connection(address, timeout=60) as sock:  # comes after all of them
        sock.sendall(bytes(64))
        assert_hung_up(sock)
    run.wait_for(lambda: descriptors(run.pid(1), address[1]) == 1, "let all strangers go")


def assert_hung_up(sock: socket.socket) -> None:
    """The other side ends the connection, and says nothing before."""
    with suppress(ConnectionResetError):
        assert sock.recv(64) == b""


def reset_at_close(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def whereabouts(run: WatchedRun) -> tuple[tuple[str, int], bytes]:
    """Address of the drafter's control port, and the run's token, from the run's own store."""
    store = dist.TCPStore("127.0.0.1", run.port, is_master=False, timeout=timedelta(seconds=30))
    host, port = store.get("dflash/control_address/1").decode().split("|")
    return (host, int(port)), bytes(store.get("dflash/run_token"))


def listening_ports(pid: int) -> set[int]:
    """Ports on which a process listens, as any stranger on its machine can see."""
    return {port for port, _, state in sockets_of(pid) if state == "0A"}


def descriptors(pid: int, port: int) -> int:
    """Connections that a process holds on one of its ports."""
    return sum(local == port and state != "0A" for local, _, state in sockets_of(pid))


def sockets_of(pid: int) -> list[tuple[int, int, str]]:
    """(local port, remote port, state) of a process's IPv4 sockets."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except FileNotFoundError:
            continue
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in inodes:
            found.append((int(fields[1].split(":")[1], 16), int(fields[2].split(":")[1], 16), fields[3]))
    return found
