"""The control plane of one rank: all its control connections, pumped together."""

import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from dflash.transport.channel import ControlChannel
from dflash.transport.errors import PeerFailed, PeerLost, ProtocolError
from dflash.transport.messages import Kind, Message

_LONGEST_IDLE_S = 0.1  # a wait comes up for air this often, so that a signal's flag is looked at
_ANNOUNCE_S = 1.0
_CLOCK = time.monotonic  # a wall clock may jump


class Readable(Protocol):
    """Something beside the channels that wants to be read: the listener, which turns strangers away."""

    def fileno(self) -> int: ...
    def read(self, now_s: float) -> None: ...
    def tend(self, now_s: float) -> None: ...
    def close(self) -> None: ...


class ControlPlane:
    """Control channels to all peers of a rank.

    `pump` moves messages, sends heartbeats and judges the peers; everything but liveness goes to `on_message`.
    Create it with `connect`. Nothing here blocks for longer than it is asked to, and no thread is used.
    """

    def __init__(
        self, name: str, channels: Sequence[ControlChannel], listener: Readable | None, *, peer_timeout_s: float
    ) -> None:
        self.name = name
        self.channels = {channel.rank: channel for channel in channels}
        self.peer_timeout_s = peer_timeout_s
        self.idle_wait_s = min(_LONGEST_IDLE_S, peer_timeout_s / 8)
        self.on_message: Callable[[ControlChannel, Message], None] | None = None
        self._listener = listener
        self._has_announced = False
        self._selector = selectors.DefaultSelector()
        for channel in channels:
            self._selector.register(channel, selectors.EVENT_READ, channel)
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ, None)

    def send(self, rank: int, message: Message) -> None:
        self.channels[rank].send(message, _CLOCK())

    def send_to_all(self, message: Message) -> None:
        for channel in self.channels.values():
            if not channel.is_closed_by_peer:
                channel.send(message, _CLOCK())

    @property
    def has_unsent(self) -> bool:
        return any(channel.has_unsent for channel in self.channels.values())

    def pump(self, timeout_s: float = 0.0) -> bool:
        """Reads, writes, beats and judges once; waits at most `timeout_s` for something to read.

        Returns whether a message came. Raises PeerFailed, PeerLost, or ProtocolError.
        """
        ready = self._select(timeout_s)
        now_s = _CLOCK()
        received = [(channel, message) for channel in ready for message in channel.receive(now_s)]
        # A rank that tells why it ends outranks the ends of connections that follow from it.
        for channel, message in received:
            if message.kind is Kind.ERROR:
                channel.heard_bye = True  # it has said all it will say
                raise PeerFailed(message.text)
        for channel, message in received:
            self._dispatch(channel, message, now_s)
        for channel in ready:
            if channel.is_closed_by_peer:
                self._judge_end(channel)
        for channel in self.channels.values():
            if not channel.is_closed_by_peer:
                self._keep_alive(channel, now_s)
        if self._listener is not None:
            self._listener.tend(now_s)
        return bool(received)

    @contextmanager
    def busy(self, seconds: float) -> Iterator[None]:
        """Tells the peers that this rank may be silent for so long: around loading, compiling, a long forward."""
        self.send_to_all(Message(Kind.BUSY, busy_ms=int(seconds * 1000)))
        yield
        self.send_to_all(Message(Kind.BUSY, busy_ms=0))

    def announce_error(self, text: str) -> None:
        """Tells every peer that this rank ends and why, once; takes at most a second, and never raises."""
        if self._has_announced:
            return
        self._has_announced = True
        self.send_to_all(Message(Kind.ERROR, text=text))
        self.flush(_ANNOUNCE_S)

    def flush(self, timeout_s: float) -> None:
        """Waits until the sockets have taken everything that was to be sent, or the time is over."""
        deadline_s = _CLOCK() + timeout_s
        while self.has_unsent and _CLOCK() < deadline_s:
            time.sleep(0.001)
            for channel in self.channels.values():
                channel.flush()

    def close(self) -> None:
        self._selector.close()
        for channel in self.channels.values():
            channel.close()
        if self._listener is not None:
            self._listener.close()

    def _select(self, timeout_s: float) -> list[ControlChannel]:
        # epoll counts in whole milliseconds; a shorter wait has to be slept.
        is_short = 0 < timeout_s < 0.001
        events = self._selector.select(0 if is_short else timeout_s)
        if is_short and not events:
            time.sleep(timeout_s)
            events = self._selector.select(0)
        if self._listener is not None and any(key.data is None for key, _ in events):
            self._listener.read(_CLOCK())
        return [key.data for key, _ in events if key.data is not None]

    def _dispatch(self, channel: ControlChannel, message: Message, now_s: float) -> None:
        match message.kind:
            case Kind.HEARTBEAT:
                pass
            case Kind.BUSY:
                channel.busy_until_s = now_s + message.busy_ms / 1000
            case Kind.BYE:
                channel.heard_bye = True
            case Kind.HELLO:
                raise ProtocolError(f"{channel.name} greeted twice")
            case _:
                assert self.on_message is not None, "pump the control plane through a sender or a queue"
                self.on_message(channel, message)

    def _judge_end(self, channel: ControlChannel) -> None:
        self._selector.unregister(channel)
        if not channel.heard_bye:
            raise PeerLost(f"lost {channel.name}: its control connection ended without a goodbye")

    def _keep_alive(self, channel: ControlChannel, now_s: float) -> None:
        """Judged right after reading, so our own absence is never taken for the peer's."""
        channel.flush()
        # Heartbeats behind unsent ones would only pile up in front of a peer that does not read.
        if not channel.has_unsent and now_s - channel.last_sent_s >= self.peer_timeout_s / 4:
            channel.send(Message(Kind.HEARTBEAT), now_s)
        silent_s = now_s - max(channel.last_heard_s, channel.busy_until_s)
        if silent_s > self.peer_timeout_s and not channel.heard_bye:
            raise PeerLost(f"lost {channel.name}: no sign of life for {now_s - channel.last_heard_s:.0f} s")
