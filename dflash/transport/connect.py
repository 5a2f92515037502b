"""How the control connections of a run come about: addresses and the run token through torchrun's store."""

import hmac
import logging
import math
import os
import secrets
import selectors
import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store

from dflash.groups import Role, Topology
from dflash.transport.channel import ControlChannel
from dflash.transport.control import ControlPlane
from dflash.transport.errors import ProtocolError
from dflash.transport.messages import MESSAGE_BYTES, TOKEN_BYTES, Kind, Message, decode, encode

_LOG = logging.getLogger(__name__)
_TOKEN_KEY = "dflash/run_token"
_ADDRESS_KEY = "dflash/control_address/{rank}"
_LOOPBACK = "127.0.0.1"
_MAX_GREETING = 16  # connections that have not said who they are, at one time
_GREETING_S = 5.0
_NUM_TOLD = 20  # strangers that get a line of their own; after that one line a minute counts them
_TELLING_S = 60.0
_NO_ADDRESS = "failed"
_CLOCK = time.monotonic


def control_pairs(topology: Topology) -> tuple[tuple[int, int], ...]:
    """The (target, drafter) pairs with a control connection: the edges, and what makes them one graph.

    Where T and D have a common divisor, the edges fall into that many islands, and news of a failure would stay on
    its island while the drafters of the others wait in the all-reduce. Target 0 therefore keeps a connection to one
    drafter of each other island, without payloads. Any one rank may die: all others still hear of it.
    """
    islands = math.gcd(topology.num_targets, topology.num_drafters)
    return topology.edges + tuple((0, drafter) for drafter in range(1, islands))


def connect(
    topology: Topology, rank: int, store: Store, *, peer_timeout_s: float, timeout_s: float = 1800.0
) -> ControlPlane:
    """Connects a rank with all its peers; every rank calls it. Drafters listen, targets call.

    Raises TimeoutError naming a peer that did not come within `timeout_s` seconds, ConnectionError naming one that
    cannot be reached or is not of this run, OSError when this rank cannot listen.
    """
    if rank == 0:
        store.set(_TOKEN_KEY, secrets.token_bytes(TOKEN_BYTES))
    deadline_s = _CLOCK() + timeout_s
    pairs = [
        (topology.target_rank(target), topology.drafter_rank(drafter)) for target, drafter in control_pairs(topology)
    ]
    if topology.role(rank) is Role.DRAFTER:
        targets = {target: topology.name(target) for target, drafter in pairs if drafter == rank}
        try:
            listener = Listener(_own_address(), rank=rank, peers=targets, deadline_s=deadline_s)
        except OSError as error:
            store.set(_ADDRESS_KEY.format(rank=rank), f"{_NO_ADDRESS}|{error}")  # nobody waits for us in vain
            raise
        host, port = listener.address
        store.set(_ADDRESS_KEY.format(rank=rank), f"{host}|{port}")
        channels = listener.accept_all(bytes(store.get(_TOKEN_KEY)))
    else:
        listener = None
        drafters = [drafter for target, drafter in pairs if target == rank]
        channels = [_call(topology, rank, drafter, store, deadline_s) for drafter in drafters]
    return ControlPlane(topology.name(rank), channels, listener, peer_timeout_s=peer_timeout_s)


def _own_address() -> str:
    """Loopback when the run is on one node, otherwise our address on the way to MASTER_ADDR."""
    if os.environ.get("LOCAL_WORLD_SIZE", "0") == os.environ.get("WORLD_SIZE", "1"):
        return _LOOPBACK
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent, the kernel only chooses a route
            return probe.getsockname()[0]
    except OSError as error:
        raise OSError(f"found no own address on the way to MASTER_ADDR {host}: {error.strerror or error}") from error


def _call(topology: Topology, rank: int, drafter_rank: int, store: Store, deadline_s: float) -> ControlChannel:
    """Connects a target with one drafter and proves the token both ways."""
    name = topology.name(drafter_rank)
    key = _ADDRESS_KEY.format(rank=drafter_rank)
    try:
        store.wait([key, _TOKEN_KEY], timedelta(seconds=max(deadline_s - _CLOCK(), 0.1)))
    except RuntimeError:  # the store's own error, which knows keys and no ranks
        raise TimeoutError(f"{name} did not come up in time") from None
    host, port = store.get(key).decode().split("|", 1)
    if host == _NO_ADDRESS:
        raise ConnectionError(f"{name} takes no connections: {port}")
    token = bytes(store.get(_TOKEN_KEY))
    try:
        sock = socket.create_connection((host, int(port)), timeout=max(deadline_s - _CLOCK(), 1.0))
        sock.sendall(encode(Message(Kind.HELLO, rank=rank, token=token)))
        greeting = b""
        while len(greeting) < MESSAGE_BYTES:
            data = sock.recv(MESSAGE_BYTES - len(greeting))
            if not data:
                raise ConnectionError("it hung up; its log says why")
            greeting += data
        answer = decode(greeting)
    except (OSError, ProtocolError) as error:
        raise ConnectionError(f"cannot greet {name} at {host} port {port}: {error}") from None
    if answer.kind is not Kind.HELLO or answer.rank != drafter_rank or answer.token != token:
        raise ConnectionError(f"{host} port {port} is not {name} of this run")
    return ControlChannel(sock, peer_rank=drafter_rank, peer_name=name, now_s=_CLOCK())


class Listener:
    """A drafter's listening socket: lets its targets in, by their token, and turns everybody else away.

    It stays open during the run, so that a stranger meets a closed door with a line in the log instead of an
    accident. Strangers cost nothing: few may greet at a time, each for a few seconds.
    """

    def __init__(self, host: str, *, rank: int, peers: Mapping[int, str], deadline_s: float) -> None:
        self._rank = rank
        self._peers = dict(peers)
        self._deadline_s = deadline_s
        self._token = b""
        self._channels: dict[int, ControlChannel] = {}
        self._greeting: dict[socket.socket, tuple[str, float, bytearray]] = {}
        self._num_dropped, self._num_untold, self._last_drop, self._told_s = 0, 0, "", 0.0
        self._selector = selectors.DefaultSelector()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.bind((host, 0))
            self._socket.listen(128)
        except OSError as error:
            raise OSError(f"cannot listen for control connections on {host}: {error.strerror or error}") from error
        self._socket.setblocking(False)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._selector.register(self._socket, selectors.EVENT_READ)

    def accept_all(self, token: bytes) -> list[ControlChannel]:
        """Waits for all peers. Raises TimeoutError naming those that did not come."""
        self._token = token
        while missing := [name for rank, name in self._peers.items() if rank not in self._channels]:
            if _CLOCK() > self._deadline_s:
                raise TimeoutError(f"did not connect in time: {', '.join(missing)}")
            self._selector.select(0.1)
            self.read(_CLOCK())
        return [self._channels[rank] for rank in self._peers]

    def fileno(self) -> int:
        """An epoll descriptor is itself readable when one of its own is: one entry stands for all."""
        return self._selector.fileno()

    def read(self, now_s: float) -> None:
        """Takes new connections and what they say."""
        self.tend(now_s)
        for key, _ in self._selector.select(0):
            if key.fileobj is self._socket:
                self._accept(now_s)
            elif key.fileobj in self._greeting:  # it may have been dropped a moment ago to make room
                self._read_greeting(key.fileobj, now_s)

    def tend(self, now_s: float) -> None:
        """Does what only the passing of time calls for: drops the silent, and counts whom no line named."""
        for sock in [sock for sock, (_, since_s, _) in self._greeting.items() if now_s - since_s > _GREETING_S]:
            self._drop(sock, "it did not say who it is", now_s)
        if self._num_untold and now_s - self._told_s > _TELLING_S:
            self._tell_count(now_s)

    def close(self) -> None:
        if self._num_untold:
            self._tell_count(_CLOCK())
        for sock in self._greeting:
            sock.close()
        self._selector.close()
        self._socket.close()

    def _accept(self, now_s: float) -> None:
        try:
            sock, address = self._socket.accept()
        except OSError:
            return  # it has gone again, or the process is short of descriptors: the run goes on
        if len(self._greeting) >= _MAX_GREETING:
            self._drop(next(iter(self._greeting)), "others are waiting", now_s)
        sock.setblocking(False)
        self._greeting[sock] = (f"{address[0]} port {address[1]}", now_s, bytearray())
        self._selector.register(sock, selectors.EVENT_READ)

    def _read_greeting(self, sock: socket.socket, now_s: float) -> None:
        received = self._greeting[sock][2]
        try:
            data = sock.recv(MESSAGE_BYTES - len(received))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            return self._drop(sock, "it hung up", now_s)
        received += data
        if len(received) < MESSAGE_BYTES:
            return None
        try:
            message = decode(received)
        except ProtocolError as error:
            return self._drop(sock, str(error), now_s)
        if message.kind is not Kind.HELLO or not hmac.compare_digest(message.token, self._token):
            return self._drop(sock, "it does not know this run's token", now_s)
        if message.rank not in self._peers or message.rank in self._channels:
            return self._drop(sock, f"rank {message.rank} is not expected", now_s)
        del self._greeting[sock]
        self._selector.unregister(sock)
        channel = ControlChannel(sock, peer_rank=message.rank, peer_name=self._peers[message.rank], now_s=now_s)
        channel.send(Message(Kind.HELLO, rank=self._rank, token=self._token), now_s)
        self._channels[message.rank] = channel
        return None

    def _drop(self, sock: socket.socket, reason: str, now_s: float) -> None:
        address = self._greeting.pop(sock)[0]
        self._selector.unregister(sock)
        sock.close()
        self._num_dropped += 1
        self._last_drop = f"{address}: {reason}"
        if self._num_dropped <= _NUM_TOLD:
            _LOG.warning("control port: dropped a connection from %s", self._last_drop)
            self._told_s = now_s
        else:
            self._num_untold += 1

    def _tell_count(self, now_s: float) -> None:
        """One line for many: a port scanner must not fill the disk that the log is on."""
        _LOG.warning("control port: dropped %d more connections, last %s", self._num_untold, self._last_drop)
        self._num_untold, self._told_s = 0, now_s
