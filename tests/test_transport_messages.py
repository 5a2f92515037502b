"""The bytes of the control messages."""

import struct

import pytest
import torch

from dflash.transport.errors import ProtocolError
from dflash.transport.messages import MAX_TEXT_BYTES, MESSAGE_BYTES, Kind, Message, decode, encode

READY = Message(
    Kind.READY,
    sequence=2**40 + 1,
    index=2**41 + 3,
    num_tokens=3072,
    num_documents=17,
    feature_width=5 * 576,
    feature_dtype=torch.bfloat16,
    num_bytes=2**33 + 5,
)


@pytest.mark.parametrize(
    "message",
    [
        READY,
        Message(Kind.HELLO, rank=6, token=bytes(range(16))),
        Message(Kind.CREDIT, index=-1),
        Message(Kind.CREDIT, index=123),
        Message(Kind.RECEIVED, sequence=4, index=19),
        Message(Kind.STOP, index=7),
        Message(Kind.EOS, sequence=0),
        Message(Kind.BYE),
        Message(Kind.HEARTBEAT),
        Message(Kind.BUSY, busy_ms=90_000),
    ],
    ids=lambda message: message.kind.name,
)
def test_round_trip_in_64_bytes(message: Message) -> None:
    data = encode(message)
    assert len(data) == MESSAGE_BYTES == 64
    assert decode(data) == message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_keep_apart(dtype: torch.dtype) -> None:
    assert decode(encode(Message(Kind.READY, feature_dtype=dtype))).feature_dtype is dtype


def test_error_is_followed_by_its_text() -> None:
    data = encode(Message(Kind.ERROR, text="drafter-5: größer"))
    assert decode(data[:64]).num_bytes == len(data) - 64
    assert data[64:].decode() == "drafter-5: größer"
    assert len(encode(Message(Kind.ERROR, text="x" * 10 * MAX_TEXT_BYTES))) == 64 + MAX_TEXT_BYTES


def altered(offset: int, form: str, value: object) -> bytes:
    data = bytearray(encode(READY))
    struct.pack_into(form, data, offset, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n".ljust(64, b"\0"), "no control message"),
        (bytes(64), "no control message"),
        (altered(4, "<H", 0), "protocol version 0, expected 2: all ranks must run the same dflash"),
        (altered(6, "<B", 200), "unknown kind of control message: 200"),
        (altered(7, "<B", 77), "unknown dtype code 77 in a READY message"),
        (altered(6, "<B", int(Kind.ERROR)), "announces 8589934597 bytes of text"),
    ],
)
def test_other_bytes_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(data)
