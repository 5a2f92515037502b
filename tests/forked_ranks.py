"""Ranks of the training command without torchrun: one process imports everything, then forks them.

The one argument is a JSON object: `folder` takes `rank-N.err`, `rank-N.out`, `pids.json` and `codes.json`; `port`;
`num_ranks`; `arguments` of the command; `clock_jumps`: the wall clock of each rank leaps a day forth and back.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import dflash.train

_DAY_S = 86400.0


def jumping(clock: Callable[[], float]) -> Callable[[], float]:
    """A wall clock that is a day ahead or a day behind at every other look."""
    state = {"looks": 0}

    def look() -> float:
        state["looks"] += 1
        return clock() + (_DAY_S if state["looks"] % 2 else -_DAY_S)

    return look


def run_rank(rank: int, order: dict, folder: Path) -> int:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"rank-{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    count = str(order["num_ranks"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(order["port"])}
    sys.argv = ["dflash.train", *order["arguments"]]
    if order["clock_jumps"]:
        time.time = jumping(time.time)
    try:
        dflash.train.cli()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> None:
    order = json.loads(sys.argv[1])
    folder = Path(order["folder"])
    pids = {}
    for rank in range(order["num_ranks"]):
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                code = run_rank(rank, order, folder)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids[pid] = rank
    write_whole(folder / "pids.json", [pid for pid, _ in pids.items()])
    codes = [0] * len(pids)
    for _ in range(len(pids)):
        pid, status = os.wait()
        codes[pids[pid]] = os.waitstatus_to_exitcode(status)
    write_whole(folder / "codes.json", codes)


def write_whole(path: Path, value: object) -> None:
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)


if __name__ == "__main__":
    main()
