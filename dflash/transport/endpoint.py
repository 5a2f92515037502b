"""The wait loop that both sides share: whoever waits, for whatever, pumps everything meanwhile."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, Protocol

import torch

from dflash.transport.channel import ControlChannel
from dflash.transport.control import ControlPlane
from dflash.transport.errors import PeerLost, TransportError
from dflash.transport.messages import Kind, Message

_SHORTEST_POLL_S = 50e-6
_LONGEST_POLL_S = 2e-3
_BLAME_S = 2.0
_FLUSH_S = 5.0


class Work(Protocol):
    """An asynchronous collective, as torch.distributed returns it."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


class Endpoint(ABC):
    """One rank's side of all its edges."""

    def __init__(self, control: ControlPlane, on_wait: Callable[[], None]) -> None:
        """`on_wait` runs once per round of every wait, between transfers: the place to look for a stop signal.

        `stop_signal` is the number of the signal with which some rank was asked to stop, once that is known here.
        """
        self.control = control
        self._on_wait = on_wait
        self.stop_signal: int | None = None
        self._done: set[int] = set()
        control.on_message = self._hear

    @abstractmethod
    def _handle(self, channel: ControlChannel, message: Message) -> None:
        """Takes one message."""

    @abstractmethod
    def _advance(self) -> bool:
        """Starts and ends what can be started and ended; says whether anything was."""

    @abstractmethod
    def _must_poll(self) -> bool:
        """Whether something is awaited that no socket announces."""

    def ask_to_stop(self, signal_number: int) -> None:
        """Lets all ranks know that one was asked to stop; what they make of it they agree on elsewhere."""
        if self.stop_signal is None:
            self.stop_signal = signal_number
            # Drafters have no connections between them, so the word goes from side to side until everyone has it.
            self.control.send_to_all(Message(Kind.STOPPING, index=signal_number))

    def pump(self) -> None:
        """Moves everything that can move, without waiting. Raises TransportError when the run cannot go on."""
        self._round(0.0)

    def pump_until(self, is_done: Callable[[], bool], *, is_polled: bool = True) -> None:
        """Waits for a condition while pumping.

        `is_polled` says that the condition may come true without a message, so that it has to be looked at often.
        """
        pause_s = _SHORTEST_POLL_S
        while not is_done():
            is_short = is_polled or self._must_poll() or self.control.has_unsent
            has_moved = self._round(pause_s if is_short else self.control.idle_wait_s)
            pause_s = _SHORTEST_POLL_S if has_moved else min(2 * pause_s, _LONGEST_POLL_S)
            self._on_wait()

    def complete(self, start: Callable[[], Work]) -> None:
        """Starts an asynchronous collective and waits for it while pumping.

        Raises PeerLost when a member of its group is gone.
        """
        try:
            work = start()
            self.pump_until(work.is_completed)
            work.wait()
        except (TransportError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            self._blame(error)

    def _hear(self, channel: ControlChannel, message: Message) -> None:
        match message.kind:
            case Kind.STOPPING:
                self.ask_to_stop(message.index)
            case Kind.DONE:
                self._done.add(channel.rank)
            case _:
                self._handle(channel, message)

    def _round(self, timeout_s: float) -> bool:
        try:
            has_heard = self.control.pump(timeout_s)
            has_advanced = self._advance()
        except TransportError as error:
            self.control.announce_error(str(error))  # once: our peers may not know the one it is about
            raise
        except torch.OutOfMemoryError:
            raise  # ours: nobody is lost
        except RuntimeError as error:  # a transfer that cannot be posted, since the other end of its group is gone
            self._blame(error)
        return has_heard or has_advanced

    def _blame(self, error: RuntimeError) -> NoReturn:
        """A broken group does not say who left it; a moment later the control plane does."""
        deadline_s = time.monotonic() + _BLAME_S
        self.control.on_message = lambda channel, message: None  # no more transfers
        try:
            while time.monotonic() < deadline_s:
                self.control.pump(self.control.idle_wait_s)
            raise PeerLost(f"lost a rank of this group: {' '.join(str(error).split())}")
        except TransportError as reason:
            self.control.announce_error(str(reason))
            raise reason from error

    def _part(self, start_barrier: Callable[[], Work]) -> None:
        """Parts from all ranks together; until then all watch over all, so that nobody's end goes unnamed.

        Goodbyes come after the barrier: a connection that ends before is a loss, also in the barrier itself.
        """
        channels = self.control.channels
        self.control.send_to_all(Message(Kind.DONE))
        self.pump_until(lambda: self._done >= channels.keys(), is_polled=False)
        self.complete(start_barrier)
        self.control.send_to_all(Message(Kind.BYE))
        self.pump_until(lambda: all(channel.heard_bye for channel in channels.values()), is_polled=False)
        self.control.flush(_FLUSH_S)
        self.control.close()
