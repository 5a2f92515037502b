"""One control connection: a non-blocking socket with a send queue and a receive buffer."""

import socket
from dataclasses import replace

from dflash.transport.errors import ProtocolError
from dflash.transport.messages import MESSAGE_BYTES, Kind, Message, decode, encode

_READ_BYTES = 64 * 1024


class ControlChannel:
    """The control messages to and from one peer.

    Never blocks: what the socket does not take stays in the send queue until `flush`. After the peer's end of the
    stream `is_closed_by_peer` is true, and everything that arrived before it has been returned by `receive`.
    """

    def __init__(self, sock: socket.socket, *, peer_rank: int, peer_name: str, now_s: float) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._unsent = bytearray()
        self._received = bytearray()
        self.rank = peer_rank
        self.name = peer_name
        self.last_heard_s = now_s
        self.last_sent_s = now_s
        self.busy_until_s = now_s
        self.heard_bye = False
        self.is_closed_by_peer = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message, now_s: float) -> None:
        """Queues a message and writes as much of the queue as the socket takes."""
        self.last_sent_s = now_s
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                num_written = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                # The peer is gone. What it said last, perhaps the reason, may still wait in the socket: reading
                # finds that and then the end of the stream, so the loss is judged there.
                self._unsent.clear()
                return
            del self._unsent[:num_written]

    def receive(self, now_s: float) -> list[Message]:
        """The whole messages that have arrived. Raises ProtocolError, naming the peer, for anything else."""
        while not self.is_closed_by_peer:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_closed_by_peer = not data
            if data:
                self._received += data
                self.last_heard_s = now_s
            if len(data) < _READ_BYTES:
                break
        try:
            return self._parse()
        except ProtocolError as error:
            raise ProtocolError(f"{self.name}: {error}") from None

    def _parse(self) -> list[Message]:
        messages, start = [], 0
        while len(self._received) - start >= MESSAGE_BYTES:
            message = decode(self._received[start : start + MESSAGE_BYTES])
            end = start + MESSAGE_BYTES
            if message.kind is Kind.ERROR:
                end += message.num_bytes
                if len(self._received) < end:
                    break
                text = self._received[start + MESSAGE_BYTES : end].decode("utf-8", errors="replace")
                message = replace(message, text=text)
            messages.append(message)
            start = end
        del self._received[:start]
        return messages

    def close(self) -> None:
        self._socket.close()
