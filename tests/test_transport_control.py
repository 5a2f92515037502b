"""Control connections between planes that live in one process, over real sockets, with the clock in hand."""

import logging
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dflash.groups import Topology
from dflash.transport.channel import ControlChannel
from dflash.transport.connect import _own_address, connect, control_pairs
from dflash.transport.control import ControlPlane
from dflash.transport.errors import PeerFailed, PeerLost, ProtocolError
from dflash.transport.messages import Kind, Message, encode


@pytest.fixture(autouse=True)
def _one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


class Pair:
    """Two planes joined by one connection, and what each has heard."""

    def __init__(self, peer_timeout_s: float = 1000.0) -> None:
        ours, theirs = _connected_sockets()
        now_s = time.monotonic()
        self.socket = theirs
        self.target = self._plane("target-0", ours, 1, "drafter-1", peer_timeout_s, now_s)
        self.drafter = self._plane("drafter-1", theirs, 0, "target-0", peer_timeout_s, now_s)
        self.heard: list[Message] = []
        self.target.on_message = lambda _, message: self.heard.append(message)
        self.drafter.on_message = lambda _, message: self.heard.append(message)

    @staticmethod
    def _plane(name, sock, peer_rank, peer_name, peer_timeout_s, now_s) -> ControlPlane:
        channel = ControlChannel(sock, peer_rank=peer_rank, peer_name=peer_name, now_s=now_s)
        return ControlPlane(name, [channel], None, peer_timeout_s=peer_timeout_s)

    def close(self) -> None:
        self.target.close()
        self.drafter.close()


def _connected_sockets() -> tuple[socket.socket, socket.socket]:
    """With small buffers, so that a few hundred messages fill them."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.bind(("127.0.0.1", 0))
        server.listen()
        ours = socket.create_connection(server.getsockname())
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return ours, server.accept()[0]


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    pair.close()


class Clock:
    """Stands in for the monotonic clock of the control module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = time.monotonic()
        monkeypatch.setattr("dflash.transport.control._CLOCK", lambda: self.now_s)


def test_partial_writes_and_reads_keep_messages_whole(pair: Pair) -> None:
    num_messages = 5_000
    for index in range(num_messages):
        pair.target.send(1, Message(Kind.CREDIT, index=index))
    assert pair.target.has_unsent
    deadline_s = time.monotonic() + 20
    while len(pair.heard) < num_messages and time.monotonic() < deadline_s:
        pair.target.pump()
        pair.drafter.pump()
    assert [message.index for message in pair.heard] == list(range(num_messages))
    assert not pair.target.has_unsent


def test_text_that_arrives_in_pieces(pair: Pair) -> None:
    data = encode(Message(Kind.ERROR, text="drafter-1: out of memory"))
    for piece in (data[:10], data[10:64], data[64:70]):
        pair.socket.send(piece)
        pair.target.pump(0.05)
    pair.socket.send(data[70:])
    with pytest.raises(PeerFailed, match="^drafter-1: out of memory$"):
        pair.target.pump(1.0)


def test_end_without_goodbye_is_a_loss_and_with_it_is_none(pair: Pair) -> None:
    pair.drafter.send(0, Message(Kind.BYE))
    pair.drafter.close()
    pair.target.pump(1.0)
    pair.target.pump(0.05)
    assert pair.target.channels[1].heard_bye and pair.target.channels[1].is_closed_by_peer
    other = Pair()
    other.drafter.close()
    with pytest.raises(PeerLost, match="lost drafter-1: its control connection ended without a goodbye"):
        other.target.pump(1.0)
    other.target.close()


def test_reset_is_a_loss_too_and_words_before_it_count(pair: Pair) -> None:
    pair.target.send(1, Message(Kind.CREDIT, index=1))  # unread by the peer: its end becomes a reset
    pair.drafter.announce_error("drafter-1: ValueError: bad row")
    pair.drafter.close()
    time.sleep(0.05)
    pair.target.send(1, Message(Kind.CREDIT, index=2))
    with pytest.raises(PeerFailed, match="bad row"):
        pair.target.pump(1.0)
    other = Pair()
    other.target.send(1, Message(Kind.CREDIT, index=1))
    other.drafter.close()
    with pytest.raises(PeerLost, match="lost drafter-1"):
        other.target.pump(1.0)
    other.target.close()


def test_the_reason_outranks_the_ends_it_causes() -> None:
    """Drafter 2 is killed; drafter 1 heard of it first, told us, and left: both ends and the reason wait for us."""
    now_s = time.monotonic()
    sockets = {rank: _connected_sockets() for rank in (1, 2)}
    channels = [
        ControlChannel(ours, peer_rank=rank, peer_name=f"drafter-{rank}", now_s=now_s)
        for rank, (ours, _) in sockets.items()
    ]
    plane = ControlPlane("target-0", channels, None, peer_timeout_s=1000.0)
    sockets[2][1].close()
    sockets[1][1].sendall(encode(Message(Kind.ERROR, text="lost drafter-2")))
    sockets[1][1].close()
    time.sleep(0.05)
    with pytest.raises(PeerFailed, match="lost drafter-2"):
        plane.pump()
    plane.close()


def test_error_is_announced_once(pair: Pair) -> None:
    pair.target.announce_error("first")
    pair.target.announce_error("second")
    with pytest.raises(PeerFailed, match="first"):
        pair.drafter.pump(1.0)
    with pytest.raises(BlockingIOError):
        pair.socket.recv(64)


def test_heartbeats_keep_a_waiting_pair_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pair = Pair(peer_timeout_s=8.0)
    for _ in range(40):
        clock.now_s += 1.0
        pair.target.pump()
        pair.drafter.pump()
    assert not pair.heard
    clock.now_s += 7.9
    pair.target.pump()
    clock.now_s += 0.3
    with pytest.raises(PeerLost, match="lost drafter-1: no sign of life for 8 s"):
        pair.target.pump()
    pair.close()


def test_busy_peer_is_not_taken_for_a_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pair = Pair(peer_timeout_s=8.0)
    with pair.drafter.busy(60.0):
        clock.now_s += 0.1
        pair.target.pump(0.5)
        clock.now_s += 67.0
        pair.target.pump()
    pair.target.pump(0.5)  # hears that it is over
    clock.now_s += 8.5
    with pytest.raises(PeerLost, match="drafter-1"):
        pair.target.pump()
    pair.close()


def test_own_absence_is_not_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    pair = Pair(peer_timeout_s=8.0)
    clock.now_s += 100.0  # we were away; meanwhile the peer sent its heartbeat
    pair.drafter.send(0, Message(Kind.HEARTBEAT))
    pair.target.pump(0.5)
    (drafter,) = pair.target.channels.values()
    assert drafter.last_heard_s == clock.now_s and not drafter.is_closed_by_peer
    pair.close()


def test_garbage_from_a_known_peer_names_it(pair: Pair) -> None:
    pair.socket.send(b"x" * 64)
    with pytest.raises(ProtocolError, match="drafter-1: no control message"):
        pair.target.pump(1.0)


def test_control_pairs_join_all_ranks_even_without_any_one_of_them() -> None:
    for num_targets in range(1, 9):
        for num_drafters in range(1, 9):
            topology = Topology(num_targets, num_drafters)
            pairs = {(topology.target_rank(t), topology.drafter_rank(d)) for t, d in control_pairs(topology)}
            assert len(pairs) == len(control_pairs(topology))
            for dead in range(topology.world_size):
                # News starts at every peer of the dead rank at once.
                heard = {rank for pair in pairs if dead in pair for rank in pair} - {dead}
                while more := {r for p in pairs if dead not in p and heard & set(p) for r in p} - heard:
                    heard |= more
                assert heard == set(range(topology.world_size)) - {dead}


def _strangers(address: tuple[str, int]) -> list[socket.socket]:
    says = [
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n".ljust(64, b"\n"),
        encode(Message(Kind.HELLO, rank=0, token=bytes(16))),
        encode(Message(Kind.CREDIT, index=10**6)),
        encode(Message(Kind.HELLO, rank=0, token=bytes(16)))[:4] + b"\x07" + bytes(59),
        b"",
    ]
    sockets = []
    for data in says:
        sock = socket.create_connection(address)
        sock.sendall(data)
        sockets.append(sock)
    sockets[-1].shutdown(socket.SHUT_WR)
    return sockets


def test_strangers_are_turned_away_before_and_during_the_run(caplog: pytest.LogCaptureFixture) -> None:
    store = _store()
    topology = Topology(1, 1)
    planes: dict[int, ControlPlane] = {}

    def start(rank: int) -> None:
        planes[rank] = connect(topology, rank, _store(store.port), peer_timeout_s=1000.0, timeout_s=20.0)

    threads = [threading.Thread(target=start, args=(1,))]
    threads[0].start()
    host, port = store.get("dflash/control_address/1").decode().split("|")
    sockets = _strangers((host, int(port)))
    threads.append(threading.Thread(target=start, args=(0,)))
    threads[1].start()
    for thread in threads:
        thread.join(20)
    assert host == "127.0.0.1" and set(planes) == {0, 1}

    sockets += _strangers((host, int(port)))
    sockets += [socket.create_connection((host, int(port))) for _ in range(40)]  # and many that say nothing
    heard: list[int] = []
    planes[1].on_message = lambda _, message: heard.append(message.index)
    with caplog.at_level(logging.WARNING, "dflash.transport.connect"):
        for index in range(100):
            planes[0].send(1, Message(Kind.CREDIT, index=index))
            planes[1].pump(0.01)
    assert heard == list(range(100))
    for reason in ("no control message", "does not know this run's token", "protocol version", "hung up", "waiting"):
        assert sum(reason in line for line in caplog.messages) >= 1, reason
    assert all("dropped a connection from 127.0.0.1 port" in line for line in caplog.messages)
    for sock in sockets:
        sock.close()
    planes[0].close()
    planes[1].close()


def test_missing_peers_are_named() -> None:
    with pytest.raises(TimeoutError, match="did not connect in time: target-0, target-1"):
        connect(Topology(2, 1), 2, _store_with_token(), peer_timeout_s=10.0, timeout_s=0.2)

    with pytest.raises(TimeoutError, match="drafter-1 did not come up in time"):
        connect(Topology(1, 1), 0, _store_with_token(), peer_timeout_s=10.0, timeout_s=0.2)


def test_a_port_taken_over_by_something_else_is_refused() -> None:
    store = _store_with_token()
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set("dflash/control_address/1", f"127.0.0.1|{server.getsockname()[1]}")

        def answer() -> None:
            sock = server.accept()[0]
            sock.recv(64)
            sock.sendall(encode(Message(Kind.HELLO, rank=1, token=bytes(16))))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="is not drafter-1 of this run"):
            connect(Topology(1, 1), 0, store, peer_timeout_s=10.0, timeout_s=5.0)
        thread.join()


def test_several_nodes_listen_where_the_master_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert _own_address() in ("127.0.0.1", "::1")


def _store(port: int | None = None) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port or 0, is_master=port is None, timeout=timedelta(seconds=20))


def _store_with_token() -> dist.TCPStore:
    store = _store()
    store.set("dflash/run_token", b"0123456789abcdef")
    return store
