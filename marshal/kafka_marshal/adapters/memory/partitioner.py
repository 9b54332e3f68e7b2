"""Which partition a producer chooses: that of Java's for a key, the next one without."""

from __future__ import annotations

import itertools

__all__ = ["Partitioner", "murmur2"]

_MASK = 0xFFFFFFFF
_FACTOR = 0x5BD1E995
_SEED = 0x9747B28C


def murmur2(data: bytes) -> int:
    """The hash of Kafka's default partitioner, unsigned."""
    size = len(data)
    hashed = _SEED ^ size
    for at in range(0, size - size % 4, 4):
        word = int.from_bytes(data[at : at + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        hashed = hashed * _FACTOR & _MASK ^ word
    if size % 4:
        hashed = (hashed ^ int.from_bytes(data[size - size % 4 :], "little")) * _FACTOR & _MASK
    hashed = (hashed ^ hashed >> 13) * _FACTOR & _MASK
    return hashed ^ hashed >> 15


class Partitioner:
    """One producer's choice of partitions."""

    def __init__(self) -> None:
        self._turn = itertools.count()

    def partition(self, key: bytes | None, partitions: int) -> int:
        """Of one of this many partitions."""
        return (next(self._turn) if key is None else murmur2(key) & 0x7FFFFFFF) % partitions
