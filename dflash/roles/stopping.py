"""Stop signals and stack dumps: what other processes can ask of a rank."""

import faulthandler
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXIT_CODE_BASE = 128  # what shells show for a process that a signal ended


def exit_code(signal_number: int) -> int:
    """Exit code of a run that a signal ended early, its last finished step saved: 143 after SIGTERM."""
    return _EXIT_CODE_BASE + signal_number


class StopRequest:
    """Whether this process was asked to stop; `signal_number` is None until it was.

    A handler only takes a note: the loops look at it between micro-batches and in every wait, none of which blocks.
    A second signal changes nothing, since a terminal and torchrun both pass on the same one.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    def listen(self) -> None:
        """Take notes from now on; before the first step there is nothing to save, and the default is to end at once."""
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup wants no end by SIGHUP
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is None:
            self.signal_number = number


def end_at_once_on_stop_signals() -> None:
    """Python's own SIGINT handler would wait for calls of hours to return, such as the meeting of all ranks."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def dump_stacks_on_request(log_path: Path | None = None) -> None:
    """Let SIGUSR1 write the Python stacks of all threads to a file, by default to stderr, even out of a stuck call."""
    file = sys.stderr.fileno()
    if log_path is not None:
        with suppress(OSError):  # a log that cannot be opened says so elsewhere
            log_path.parent.mkdir(parents=True, exist_ok=True)
            file = log_path.open("a")  # faulthandler keeps it open
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
