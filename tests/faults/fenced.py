"""A proxy that answers fetches as a broker does while another one is fenced: some partitions have no leader.

KIP-951: such an answer names, in tagged fields, the leader that the broker knows of each partition (-1: none), and the
addresses of the leaders. librdkafka from 2.5 on counts a leader of -1 and leaves its place unfilled (its issue 5280):
it reads what the memory held before, and most processes die of it within seconds. tests/faults says whether the
installed one does.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterable, Mapping

from kafka_marshal.testing.layout import LOOPBACK
from kafka_marshal.testing.proxy import TcpProxy

#: Fetch, and its first version whose answers have addresses of leaders.
_FETCH, _WITH_ADDRESSES = 1, 16
_NOT_LEADER = 6

#: Clients must skip fields with tags that they don't know. This one fills their memory as user data does, with what
#: hurts if it is taken for partitions and leaders: numbers below 0 beside an existing broker's id.
_UNKNOWN_TAG, _FILL = 99, struct.pack("<4i", -(2**30), -(2**30), 1, 1)
_MOST_FILLS = 128


class FencedProxy(TcpProxy):
    """Forwards to a broker, except for fetches of version 16 while :attr:`fenced`: partition 0 has moved to broker 1,
    the others have no leader.
    """

    #: Whether fetches are answered so.
    fenced: bool = False
    #: The number of fetches answered so.
    answered: int = 0

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        broker_reader: asyncio.StreamReader,
        broker_writer: asyncio.StreamWriter,
    ) -> None:
        fetches: dict[bytes, bytes] = {}

        async def requests() -> None:
            async for request in _frames(reader):
                key, version = struct.unpack_from(">hh", request)
                if key == _FETCH and version == _WITH_ADDRESSES:
                    fetches[request[4:8]] = request
                await _send(broker_writer, request)

        async def answers() -> None:
            async for answer in _frames(broker_reader):
                fetch = fetches.pop(answer[:4], None)
                await _send(writer, self._answer(fetch) if self.fenced and fetch is not None else answer)

        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(requests())
                pumps.create_task(answers())
        except* (OSError, asyncio.IncompleteReadError):
            pass  # one side ended the connection: end the other one, too

    def _answer(self, fetch: bytes) -> bytes:
        self.answered += 1
        fills = _FILL * (self.answered // 2 % _MOST_FILLS if self.answered % 2 else 0)
        host = LOOPBACK.encode()
        address = struct.pack(">i", 1) + _text(host) + struct.pack(">i", self.port) + _size(0) + _size(0)
        topics = [_array(_partition(number) for number in numbers) for numbers in _wanted(fetch).values()]
        named = (name + topic + _size(0) for name, topic in zip(_wanted(fetch), topics, strict=True))
        tags = _tags({0: _array([address]), _UNKNOWN_TAG: fills})
        return fetch[4:8] + _size(0) + struct.pack(">ihi", 0, 0, 0) + _array(named) + tags


def _partition(number: int) -> bytes:
    leader = struct.pack(">ii", 1 if number == 0 else -1, 1_000) + _size(0)
    offsets = struct.pack(">ihqqq", number, _NOT_LEADER, -1, -1, -1)
    return offsets + _size(0) + struct.pack(">i", -1) + _size(1) + _tags({1: leader})


def _wanted(fetch: bytes) -> Mapping[bytes, list[int]]:
    """Topic id → numbers of its partitions."""
    (length,) = struct.unpack_from(">h", fetch, 8)
    at = _after_tags(fetch, 10 + max(length, 0)) + 21
    topics, at = _read_size(fetch, at)
    wanted: dict[bytes, list[int]] = {}
    for _ in range(topics - 1):
        numbers = wanted.setdefault(fetch[at : at + 16], [])
        partitions, at = _read_size(fetch, at + 16)
        for _ in range(partitions - 1):
            numbers += struct.unpack_from(">i", fetch, at)
            at = _after_tags(fetch, at + 32)
        at = _after_tags(fetch, at)
    return wanted


async def _frames(source: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while True:
        (size,) = struct.unpack(">i", await source.readexactly(4))
        yield await source.readexactly(size)


async def _send(sink: asyncio.StreamWriter, frame: bytes) -> None:
    sink.write(struct.pack(">i", len(frame)) + frame)
    await sink.drain()


def _size(value: int) -> bytes:
    low, high = value & 127, value >> 7
    return bytes([low | 128]) + _size(high) if high else bytes([low])


def _read_size(data: bytes, at: int) -> tuple[int, int]:
    value, shift = data[at] & 127, 7
    while data[at] & 128:
        at += 1
        value |= (data[at] & 127) << shift
        shift += 7
    return value, at + 1


def _after_tags(data: bytes, at: int) -> int:
    count, at = _read_size(data, at)
    for _ in range(count):
        _, at = _read_size(data, at)
        size, at = _read_size(data, at)
        at += size
    return at


def _text(text: bytes) -> bytes:
    return _size(len(text) + 1) + text


def _array(items: Iterable[bytes]) -> bytes:
    parts = list(items)
    return _size(len(parts) + 1) + b"".join(parts)


def _tags(fields: Mapping[int, bytes]) -> bytes:
    return _size(len(fields)) + b"".join(_size(tag) + _size(len(field)) + field for tag, field in fields.items())
