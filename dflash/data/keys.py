"""Keyed 64-bit hashes: the random numbers of this package, the same on every machine and numpy version."""

import hashlib

import numpy as np

_U64 = (1 << 64) - 1


def keyed_hash(values: np.ndarray, *keys: int) -> np.ndarray:
    """Hash of each value under the keys; equal values have equal hashes, and each key gives another function.

    `values` any integer array; returns u64 of the same shape. A shuffle is an argsort of these: unlike a generator's
    stream it gives each value a number of its own, which the other values cannot change.
    """
    state = _mix(values.astype(np.uint64))
    for key in keys:
        state = _mix(state ^ _mix(np.array([key & _U64], dtype=np.uint64)))
    return state


def content_key(content: bytes) -> int:
    """63-bit key of some content, so that it fits an i64."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1


def _mix(state: np.ndarray) -> np.ndarray:
    """One round of splitmix64 (Steele, Lea and Flood 2014, doi 10.1145/2660193.2660195), wrapping at 64 bits."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
