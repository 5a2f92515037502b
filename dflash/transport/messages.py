"""The fixed 64-byte messages of the control plane."""

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

from dflash.transport.errors import ProtocolError

MAGIC = b"DFLT"
VERSION = 2
TOKEN_BYTES = 16
MAX_TEXT_BYTES = 16 * 1024

# magic | version | kind | dtype code | edge sequence number | g | tokens | documents | feature width | operand |
# bytes | token. Little-endian without padding, so that ranks on unlike machines agree.
_FORMAT = struct.Struct("<4sHBBqqIIIIQ16s")
MESSAGE_BYTES = _FORMAT.size
_NO_DTYPE = 0
_DTYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.float64: 4}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}


class Kind(IntEnum):
    """What a message says; the comments name who says it and which fields it carries beside the kind."""

    HELLO = 1  # target, answered by the drafter: token, rank
    CREDIT = 2  # drafter: index = the last g that may be sent, -1 for none
    READY = 3  # target: sequence, index, counts, dtype, num_bytes of the payload whose isend has been posted
    RECEIVED = 4  # drafter: sequence, index of the payload that has arrived
    STOP = 5  # drafter: index = the last g to be served
    EOS = 6  # target: nothing more will be sent; sequence = number of payloads sent over the edge
    ERROR = 7  # anyone: num_bytes of UTF-8 text follow the message
    BYE = 8  # anyone, once all ranks are done: the connection may end now
    HEARTBEAT = 9  # anyone: still here
    BUSY = 10  # anyone: milliseconds in which silence means nothing; 0 ends it early
    STOPPING = 11  # anyone, forwarded by everyone once: some rank was asked to stop; index = the signal's number
    DONE = 12  # anyone: nothing is left to do here but to part from all ranks together


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Message:
    """One message, in Python's types. Fields that a kind does not use keep their defaults."""

    kind: Kind
    sequence: int = -1
    index: int = -1
    num_tokens: int = 0
    num_documents: int = 0
    feature_width: int = 0
    feature_dtype: torch.dtype | None = None
    num_bytes: int = 0
    rank: int = 0
    busy_ms: int = 0
    token: bytes = bytes(TOKEN_BYTES)
    text: str = ""


def encode(message: Message) -> bytes:
    """The 64 bytes of a message, followed by the text where it is an ERROR."""
    text = b""
    num_bytes = message.num_bytes
    if message.kind is Kind.ERROR:
        text = message.text.encode("utf-8", errors="replace")[:MAX_TEXT_BYTES]
        num_bytes = len(text)
    dtype_code = _NO_DTYPE if message.feature_dtype is None else _DTYPE_CODES[message.feature_dtype]
    operand = message.busy_ms if message.kind is Kind.BUSY else message.rank
    head = _FORMAT.pack(
        MAGIC,
        VERSION,
        message.kind,
        dtype_code,
        message.sequence,
        message.index,
        message.num_tokens,
        message.num_documents,
        message.feature_width,
        operand,
        num_bytes,
        message.token,
    )
    return head + text


def decode(head: bytes | bytearray | memoryview) -> Message:
    """The message in 64 bytes; an ERROR's text is still missing, `num_bytes` says how much of it follows.

    Raises ProtocolError for bytes that are no message of this version.
    """
    magic, version, kind, dtype_code, sequence, index, tokens, documents, width, operand, num_bytes, token = (
        _FORMAT.unpack(head)
    )
    if magic != MAGIC:
        raise ProtocolError(f"no control message: it begins with {bytes(magic)!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise ProtocolError(f"protocol version {version}, expected {VERSION}: all ranks must run the same dflash")
    if kind not in _KINDS:
        raise ProtocolError(f"unknown kind of control message: {kind}")
    if dtype_code != _NO_DTYPE and dtype_code not in _DTYPES:
        raise ProtocolError(f"unknown dtype code {dtype_code} in a {Kind(kind).name} message")
    if kind == Kind.ERROR and num_bytes > MAX_TEXT_BYTES:
        raise ProtocolError(f"an ERROR message announces {num_bytes} bytes of text, more than {MAX_TEXT_BYTES}")
    return Message(
        kind=Kind(kind),
        sequence=sequence,
        index=index,
        num_tokens=tokens,
        num_documents=documents,
        feature_width=width,
        feature_dtype=_DTYPES.get(dtype_code),
        num_bytes=num_bytes,
        rank=0 if kind == Kind.BUSY else operand,
        busy_ms=operand if kind == Kind.BUSY else 0,
        token=token,
    )
