"""The wait loop that both sides share: whoever waits, for whatever, pumps everything meanwhile."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, Protocol

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
        """`on_wait` runs once per round of every wait, between transfers: the place to raise for a stop signal."""
        self.control = control
        self._on_wait = on_wait
        control.on_message = self._handle

    @abstractmethod
    def _handle(self, channel: ControlChannel, message: Message) -> None:
        """Takes one message."""

    @abstractmethod
    def _advance(self) -> bool:
        """Starts and ends what can be started and ended; says whether anything was."""

    @abstractmethod
    def _must_poll(self) -> bool:
        """Whether something is awaited that no socket announces."""

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

    def wait(self, work: Work) -> None:
        """Waits for an asynchronous collective while pumping. Raises PeerLost when a member of its group is gone."""
        self.pump_until(work.is_completed)
        try:
            work.wait()
        except RuntimeError as error:
            self._blame(error)

    def _round(self, timeout_s: float) -> bool:
        try:
            has_heard = self.control.pump(timeout_s)
            has_advanced = self._advance()
        except TransportError as error:
            self.control.announce_error(str(error))  # once: our peers may not know the one it is about
            raise
        return has_heard or has_advanced

    def _blame(self, error: RuntimeError) -> NoReturn:
        """A broken collective does not say who left; a moment later the control plane does."""
        deadline_s = time.monotonic() + _BLAME_S
        self.pump_until(lambda: time.monotonic() > deadline_s)
        text = f"lost a rank of this group: {error}"
        self.control.announce_error(text)
        raise PeerLost(text) from error

    def _wait_for_byes(self) -> None:
        channels = self.control.channels.values()
        self.pump_until(lambda: all(channel.heard_bye for channel in channels), is_polled=False)

    def _close(self) -> None:
        self.control.flush(_FLUSH_S)
        self.control.close()

    def _say_bye(self) -> None:
        self.control.send_to_all(Message(Kind.BYE))
