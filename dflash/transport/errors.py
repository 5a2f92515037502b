"""What can end a run from outside this process; each message is one line that names the rank it is about."""


class TransportError(RuntimeError):
    """The exchange between ranks cannot go on; the process must exit non-zero without destroying its groups."""


class ProtocolError(TransportError):
    """A peer sent what the protocol does not allow: another version, size, dtype, or order."""


class PeerLost(TransportError):
    """A peer is gone or silent: its connection ended without a goodbye, or its heartbeats stopped."""


class PeerFailed(TransportError):
    """A peer announced its own failure; the text is the peer's."""
