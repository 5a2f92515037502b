"""A process that has imported everything and forks ranks on demand: they start in a fraction of a second.

Each line on its standard input is a launch: a list with the environment, the arguments and the output folder of each
rank. It answers with a line of the ranks' process ids, then one line per rank as they end: [rank, exit code, time].
A forked rank is told nothing of all this: it runs the training command from its first line to the interpreter's end.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_IMPORTED = (
    "faulty_train",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.tensorboard",
    "transformers.models.qwen3.modeling_qwen3",
)


def serve() -> bool:
    """Serves launches until standard input ends; returns True in each forked rank, in its place."""
    die_with_parent()
    warm_up()
    for line in sys.stdin:
        ranks: dict[int, int] = {}
        for rank, launch in enumerate(json.loads(line)):
            pid = os.fork()
            if pid == 0:
                become(launch)
                return True
            ranks[pid] = rank
        answer(list(ranks))
        while ranks:
            pid, status = os.wait()
            answer([ranks.pop(pid), os.waitstatus_to_exitcode(status), time.time()])
    return False


def warm_up() -> None:
    """Imports what a rank would, the parts that it imports on its way included, and starts no thread."""
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or every rank would copy all pages of this heap when its collector walks them at its end


def become(launch: dict[str, Any]) -> None:
    """Turns a fork into a rank: its environment, arguments and standard streams."""
    die_with_parent()
    os.environ.update(launch["environment"])
    sys.argv = ["dflash.train", *launch["arguments"]]
    folder = Path(launch["folder"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for descriptor, opened in (
        (0, os.open(os.devnull, os.O_RDONLY)),
        (1, os.open(folder / "stdout", flags)),
        (2, os.open(folder / "stderr", flags)),
    ):
        os.dup2(opened, descriptor)
        os.close(opened)


def die_with_parent() -> None:
    """No rank outlives the test that started it, whatever ends the test."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup, whose ranks would not hear it


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__" and serve():
    import faulty_train

    faulty_train.main()
