"""Checks of train.sh before anything starts: the configuration, the ranks of this machine, the meeting point.

Prints `ranks threads address endpoint`, each for this machine, or ends with exit code 2 and one line that says why.
"""

import argparse
import errno
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import hydra
from omegaconf.errors import OmegaConfBaseException

from dflash.cli import one_line
from dflash.config import Device, TrainConfig, config_folder, register_schema, to_train_config
from dflash.groups import choose_topology

_DEFAULT_PORT = 29400  # torchrun's
_POLL_S = 0.2
_QUIET_S = 5.0


def read_config(overrides: list[str]) -> TrainConfig:
    """The run's configuration; raises ValueError, HydraException or OmegaConfBaseException for what is wrong with it.

    Every attempt of every rank would meet the same mistake: it is found once, here.
    """
    register_schema()
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        return to_train_config(hydra.compose("config", overrides=overrides))


def count_gpus() -> int:
    """GPUs this process may use, without the seconds it takes to import torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


def count_cores() -> int:
    """Cores this process may use: those it is bound to, or as many as the container's quota pays for."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of HOST[:PORT]; an IPv6 address stands in brackets."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]"):
        host, port = endpoint, str(_DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--endpoint: {endpoint} must be HOST:PORT with a port from 1 to 65535")
    return host, int(port)


def check_port(host: str, port: int) -> None:
    """Machine 0: the meeting point's port is free, and its name means the same here as elsewhere."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ValueError(f"--endpoint: machine 0 does not know its own name {host}: {error.strerror}") from None
    is_local_name = host == "localhost" or host in addresses
    if not is_local_name and all(address == "::1" or address.startswith("127.") for address in addresses):
        raise ValueError(
            f"--endpoint: {host} means {min(addresses)} on machine 0, where no other machine reaches it; give the "
            "machine's address in the network instead of its name"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: no wait after the last run
        try:
            probe.bind(("", port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            reason = "is in use by another program" if error.errno == errno.EADDRINUSE else "is not ours to take"
            raise ValueError(f"--endpoint: port {port} {reason} on machine 0; choose a free one") from None


def reach(host: str, port: int, timeout_s: float) -> str:
    """Another machine: wait for machine 0 to open the meeting point; returns our own address on the way there.

    Raises TimeoutError after `timeout_s` seconds.
    """
    since_s = time.monotonic()
    is_told = False
    while True:
        left_s = since_s + timeout_s - time.monotonic()
        try:
            with socket.create_connection((host, port), timeout=max(min(left_s, 10.0), 0.1)) as probe:
                return str(probe.getsockname()[0])
        except OSError as error:  # a name that is not known yet included: some clusters add it with the machine
            if left_s <= 0:
                reason = error.strerror or error
                raise TimeoutError(
                    f"--endpoint: machine 0 did not answer at {host} port {port} within {timeout_s:.0f} s ({reason}); "
                    "is train.sh running there, and the port open between the machines?"
                ) from None
        if not is_told and time.monotonic() - since_s > _QUIET_S:
            print(f"waiting for machine 0 at {host} port {port}", file=sys.stderr, flush=True)
            is_told = True
        time.sleep(_POLL_S)


def check(options: argparse.Namespace) -> str:
    """All checks, in the order in which a user can mend what they find; returns what train.sh reads."""
    overrides = list(options.overrides)
    config = read_config(overrides)
    if options.nproc == "auto":
        num_local = 0 if config.device is Device.cpu else count_gpus()
        num_local = num_local or (1 if config.pipeline.colocated else 2)
    else:
        num_local = int(options.nproc)
    num_ranks = num_local * options.nnodes
    choose_topology(
        num_ranks,
        colocated=config.pipeline.colocated or num_ranks == 1,
        num_target_ranks=config.pipeline.num_target_ranks,
    )
    address, endpoint = "localhost", "none"
    if options.nnodes > 1:
        host, port = split_endpoint(options.endpoint)
        endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if options.node_rank == 0:
            check_port(host, port)
            address = host
        else:
            address = reach(host, port, options.join_timeout)
    return f"{num_local} {max(1, count_cores() // num_local)} {address} {endpoint}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", required=True)
    parser.add_argument("--nnodes", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--endpoint")
    parser.add_argument("--join-timeout", type=float, required=True)
    parser.add_argument("overrides", nargs="*")
    try:
        print(check(parser.parse_args()))
    except (ValueError, OSError, OmegaConfBaseException, hydra.errors.HydraException) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
