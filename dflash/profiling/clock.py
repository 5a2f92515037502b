"""Clocks of all ranks held against the first rank's, so that their times can stand on one axis."""

import secrets
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dflash.profiling.spans import ClockOffset

_NUM_ROUNDS = 32
_LAUNCH_BITS = 62  # a positive int64


def best_offset(rounds: list[tuple[int, int, int]]) -> tuple[float, float]:
    """Offset and its largest error, in seconds, from rounds of (own time sent, other's time, own time received), in ns.

    The other's time was read somewhere within the round, so the shortest round knows it best: to within half its
    length, however lopsided the two ways were (the rule of NTP's clock filter, RFC 5905, section 10).
    """
    sent, other, received = min(rounds, key=lambda times: times[2] - times[0])
    return (other - sent - (received - sent) / 2) / 1e9, (received - sent) / 2e9


def host_key() -> int:
    """A number that two processes share when the kernel gives them one monotonic clock."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/timens_offsets"):
        try:
            parts.append(Path(path).read_bytes())
        except OSError:
            parts.append(b"")
    # Without a boot id nothing is known, and 0 is never taken for the same host.
    return zlib.crc32(b"".join(parts)) if parts[0] else 0


def measure_offset(
    rank: int, world_size: int, *, clock_ns: Callable[[], int] = time.perf_counter_ns, host: int | None = None
) -> tuple[ClockOffset, int]:
    """Ping-pong of every rank with the first over the default process group; all ranks call it together.

    Returns the offset, and a number drawn by the first rank that tells this launch from all others.

    Takes about 10 ms a rank on one machine. Ranks on one machine read the same clock, which is found out by `host`
    (None: `host_key()`), and have no offset and no error. The offset holds for the moment it is measured: between
    machines clocks drift apart afterwards, by what their time services leave. Raises ConnectionError when a rank is
    gone.
    """
    host = host_key() if host is None else host
    epoch_ns = time.time_ns() - clock_ns()
    # Not from `random`, whose state is the training's.
    launch = secrets.randbits(_LAUNCH_BITS)
    if world_size == 1:
        return ClockOffset(0.0, 0.0, epoch_ns / 1e9), launch
    try:
        if rank == 0:
            for peer in range(1, world_size):
                _answer(peer, clock_ns, torch.tensor([0, host, epoch_ns, launch], dtype=torch.int64))
            return ClockOffset(0.0, 0.0, epoch_ns / 1e9), launch
        rounds, message = _ask(clock_ns)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConnectionError(f"a rank was lost while the ranks compared their clocks [{reason}]") from error
    is_same_clock = host != 0 and int(message[1]) == host
    offset_s, error_s = (0.0, 0.0) if is_same_clock else best_offset(rounds)
    return ClockOffset(offset_s, error_s, int(message[2]) / 1e9), int(message[3])


def _ask(clock_ns: Callable[[], int]) -> tuple[list[tuple[int, int, int]], torch.Tensor]:
    """Rounds as `best_offset` takes them, and the first rank's last answer."""
    rounds = []
    message = torch.zeros(4, dtype=torch.int64)
    for _ in range(_NUM_ROUNDS):
        sent = clock_ns()
        dist.send(message, 0)
        dist.recv(message, 0)
        rounds.append((sent, int(message[0]), clock_ns()))
    return rounds, message


def _answer(peer: int, clock_ns: Callable[[], int], message: torch.Tensor) -> None:
    """Tell one rank the time as often as it asks, in front of the first rank's machine, epoch and launch."""
    question = torch.empty_like(message)
    for _ in range(_NUM_ROUNDS):
        dist.recv(question, peer)
        message[0] = clock_ns()
        dist.send(message, peer)
