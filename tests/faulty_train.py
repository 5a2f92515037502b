"""The training command with a fault in it, run in the place of `-m dflash.train`.

DFLASH_TEST_FAULT lists faults, separated by semicolons: "<deed> <rank name> <moment> <n>", for instance
"kill target-1 isend 5": at the fifth isend target-1 kills itself. A last "+" ("5+") does it from the n-th time on.
The time of each deed but a sleep is first written to the file that DFLASH_TEST_NOTE names.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

import dflash.train
from dflash.batch import PackedHiddenStates
from dflash.roles.target import Producer
from dflash.roles.trainer import DrafterTrainer
from dflash.target.capture import FrozenTarget
from dflash.transport.control import ControlPlane
from dflash.transport.endpoint import Endpoint
from dflash.transport.messages import Kind, Message
from dflash.transport.payload import PayloadChannel
from dflash.transport.process_groups import ProcessGroups

LARGE_BYTES = 64 << 20  # payloads from this size on count for the moment `payload`
_SIGNALS = {
    "kill": signal.SIGKILL,
    "freeze": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    "hup": signal.SIGHUP,
    "usr1": signal.SIGUSR1,
}
_PATTERN = 0xA5  # what a receive buffer holds before its payload: tells how much of it has come

Hook = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to which rank, and when; `deed` is a key of _SIGNALS, fail, crash, note or sleep=<seconds>."""

    deed: str
    rank: str
    moment: str
    count: int
    repeats: bool

    @classmethod
    def parse(cls, text: str) -> "Fault":
        deed, rank, moment, count = text.split()
        return cls(deed, rank, moment, int(count.rstrip("+")), count.endswith("+"))

    def is_due(self, count: int) -> bool:
        return count == self.count or (self.repeats and count > self.count)

    def happen(self) -> None:
        """Does the deed to this very process."""
        kind, _, seconds = self.deed.partition("=")
        if kind == "sleep":
            time.sleep(float(seconds))
            return
        write_note("", str(time.time()))
        if kind == "fail":
            raise ValueError(f"no good at {self.moment} {self.count}")
        if kind == "crash":
            raise RuntimeError(f"no good at {self.moment} {self.count}")
        if kind != "note":
            os.kill(os.getpid(), _SIGNALS[kind])


def write_note(suffix: str, text: str) -> None:
    """Published by a rename, so that whoever finds it finds all of it."""
    note = Path(os.environ["DFLASH_TEST_NOTE"] + suffix)
    partial = note.with_name(f"{note.name}.{os.getpid()}")
    partial.write_text(text)
    partial.rename(note)


def before(owner: type, name: str, hook: Hook) -> None:
    """Has `hook` called at the beginning of each call of a method."""
    _wrap(owner, name, hook, lambda: None)


def after(owner: type, name: str, hook: Hook) -> None:
    """Has `hook` called when a method is about to return."""
    _wrap(owner, name, lambda: None, hook)


def _wrap(owner: type, name: str, first: Hook, last: Hook) -> None:
    original = vars(owner)[name]
    is_classmethod = isinstance(original, classmethod)
    function = original.__func__ if is_classmethod else original

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        first()
        result = function(*args, **kwargs)
        last()
        return result

    setattr(owner, name, classmethod(wrapped) if is_classmethod else wrapped)


def while_idle(hook: Hook) -> None:
    """In the first round of each wait for credit, a buffer or a micro-batch that does not end at once."""
    pump_until = Endpoint.pump_until

    def wrapped(endpoint: Endpoint, is_done: Callable[[], bool], *, is_polled: bool = True) -> None:
        rounds = 0

        def look() -> bool:
            nonlocal rounds
            if is_done():
                return True
            rounds += 1
            if rounds == 2 and not is_polled:
                hook()
            return False

        pump_until(endpoint, look, is_polled=is_polled)

    Endpoint.pump_until = wrapped


def after_bye(hook: Hook) -> None:
    """Right after this rank has said goodbye to its peers."""
    send_to_all = ControlPlane.send_to_all

    def wrapped(plane: ControlPlane, message: Message) -> None:
        send_to_all(plane, message)
        if message.kind is Kind.BYE:
            hook()

    ControlPlane.send_to_all = wrapped


def within_a_payload(hook: Hook) -> None:
    """While a large payload is under way, as its receiver sees it: begun, and not whole."""

    def watch_sender() -> None:
        note = Path(os.environ["DFLASH_TEST_NOTE"] + ".receiving")
        while not note.exists():
            time.sleep(1e-3)
        hook()

    send, is_watching = PayloadChannel.send, threading.Event()

    def sent(channel: PayloadChannel, packed: PackedHiddenStates, *args: Any) -> None:
        send(channel, packed, *args)
        if packed.layout.num_bytes >= LARGE_BYTES and not is_watching.is_set():
            is_watching.set()
            threading.Thread(target=watch_sender, daemon=True).start()

    PayloadChannel.send = sent
    watch_payloads(hook)


def watch_payloads(hook: Hook) -> None:
    """Notes when a large payload begins to arrive, and how much of it is there when this rank finds its peer gone."""
    receive, announce_error = PayloadChannel.receive, ControlPlane.announce_error
    buffers: list[torch.Tensor] = []

    def watch(buffer: torch.Tensor) -> None:
        while not received_share(buffer):
            time.sleep(5e-4)
        write_note(".receiving", "")
        if hook is not nothing:
            write_note(".share", str(received_share(buffer)))
            hook()

    def received(channel: PayloadChannel, packed: PackedHiddenStates, free: None) -> None:
        if packed.layout.num_bytes >= LARGE_BYTES:
            packed.buffer.fill_(_PATTERN)
            buffers.append(packed.buffer)
            threading.Thread(target=watch, args=(packed.buffer,), daemon=True).start()
        receive(channel, packed, free)

    def announced(plane: ControlPlane, text: str) -> None:
        if buffers:
            write_note(".share", str(min(map(received_share, buffers))))
        announce_error(plane, text)

    PayloadChannel.receive = received
    ControlPlane.announce_error = announced


def received_share(buffer: torch.Tensor) -> float:
    """Roughly how much of a payload has arrived, without its trailer, which is written beforehand."""
    return float((buffer[:-64][:: 1 << 14] != _PATTERN).float().mean())


def nothing() -> None:
    """The hook of a rank that only watches."""


MOMENTS: dict[str, Callable[[Hook], None]] = {
    "load": lambda hook: (before(Producer, "load", hook), before(DrafterTrainer, "load", hook)),
    "idle": while_idle,
    "forward": lambda hook: (before(FrozenTarget, "run", hook), before(DrafterTrainer, "accumulate", hook)),
    "isend": lambda hook: (after(PayloadChannel, "send", hook), after(PayloadChannel, "receive", hook)),
    "payload": within_a_payload,
    "allreduce": lambda hook: after(DrafterTrainer, "reduce", hook),
    "optimizer": lambda hook: before(DrafterTrainer, "step", hook),
    "evaluate": lambda hook: before(DrafterTrainer, "evaluate", hook),
    "save": lambda hook: before(filesystem._FileSystemWriter, "write_data", hook),
    "eos": lambda hook: before(ProcessGroups, "start_barrier", hook),  # having sent and trained on everything
    "barrier": lambda hook: after(ProcessGroups, "start_barrier", hook),
    "bye": after_bye,
}


def arm(name: str, faults: list[Fault]) -> None:
    """Prepares this rank, which has just learnt its name, for what is to happen to it."""
    own = [fault for fault in faults if fault.rank == name]
    for moment in dict.fromkeys(fault.moment for fault in own):
        MOMENTS[moment](counting([fault for fault in own if fault.moment == moment]))
    if any(fault.moment == "payload" for fault in faults) and not any(fault.moment == "payload" for fault in own):
        watch_payloads(nothing)


def counting(faults: list[Fault]) -> Hook:
    """A hook that does each fault when its number comes."""
    count = 0

    def hook() -> None:
        nonlocal count
        count += 1
        for fault in faults:
            if fault.is_due(count):
                fault.happen()

    return hook


def main() -> None:
    faults = [Fault.parse(text) for text in os.environ.get("DFLASH_TEST_FAULT", "").split(";") if text.strip()]
    name_process = dflash.train.name_process

    def named(name: str) -> None:
        name_process(name)
        arm(name, faults)

    dflash.train.name_process = named
    dflash.train.cli()


if __name__ == "__main__":
    main()
