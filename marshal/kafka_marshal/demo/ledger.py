"""The drivers' database: what one round adds, in one fenced transaction of :mod:`kafka_marshal.sinks`.

The sink refuses an epoch that is over, and stores each partition's last offset with the rows (C9). The sums are made by
Spark before the transaction begins, so what they leave out must still be true in it: :func:`write_round` looks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from kafka_marshal.demo import sink
from kafka_marshal.demo.errors import SinkError

__all__ = ["GROUP", "NAMES", "NUMBERS", "MovedError", "Part", "Ranged", "Transaction", "create", "write_round"]

#: The columns of the table delays: what is added up by, what the joins add, what is counted.
GROUP: Final = ("carrier", "origin", "dest", "hour")
NAMES: Final = ("carrier_name", "destination")
NUMBERS: Final = (*sink.MEASURES, "wet_departures", "wet_departure_delay_sum")

_MAXIMA: Final = frozenset(name for name in NUMBERS if name.endswith("_max"))

_SCHEMA: Final = f"""
CREATE TABLE delays (
    carrier TEXT NOT NULL, origin TEXT NOT NULL, dest TEXT NOT NULL, hour INTEGER NOT NULL,
    carrier_name TEXT, destination TEXT,
    {", ".join(f"{name} INTEGER{'' if name in _MAXIMA else ' NOT NULL'}" for name in NUMBERS)},
    PRIMARY KEY (carrier, origin, dest, hour)
) WITHOUT ROWID;
-- Flights that fail a check and count all the same.
CREATE TABLE quality (failed TEXT PRIMARY KEY, flights INTEGER NOT NULL) WITHOUT ROWID;
-- Messages that are no flights, by what is wrong with them. They themselves are in the dead-letter topic.
CREATE TABLE dead_letters (trouble TEXT PRIMARY KEY, messages INTEGER NOT NULL) WITHOUT ROWID;
{sink.BATCHES}
"""


def _added(name: str) -> str:
    """How a number that comes is put together with the one that is there."""
    if name not in _MAXIMA:
        return f"{name} = {name} + excluded.{name}"
    return f"{name} = max(coalesce({name}, excluded.{name}), coalesce(excluded.{name}, {name}))"


_ADD: Final = (
    f"INSERT INTO delays VALUES ({', '.join('?' * (len(GROUP) + len(NAMES) + len(NUMBERS)))}) "  # noqa: S608 - ours
    f"ON CONFLICT DO UPDATE SET {', '.join(map(_added, NUMBERS))}"
)
_ADD_QUALITY: Final = "INSERT INTO quality VALUES (?, ?) ON CONFLICT DO UPDATE SET flights = flights + excluded.flights"
_ADD_DEAD: Final = (
    "INSERT INTO dead_letters VALUES (?, ?) ON CONFLICT DO UPDATE SET messages = messages + excluded.messages"
)
_ADD_BATCH: Final = "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class MovedError(SinkError):
    """The sink's last offset is another one than that the sums were made from: they must be made again."""


class Ranged(Protocol):
    """What is looked at of a claimed range (see kafka_marshal.client.ranges.OffsetRange)."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def epoch(self) -> int: ...


class Part(Protocol):
    """What is looked at of a partition's part in a round (see kafka_marshal.pipeline.flights.Part)."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def rows(self) -> int: ...


class Transaction(Protocol):
    """What is used of a sink's open transaction."""

    def last_offset(self, topic: str, partition: int, /) -> int: ...
    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any: ...


def create(path: Path) -> None:
    """Make an empty database in place of one that may be there. Raises SinkError."""
    sink.create(path, _SCHEMA)


def write_round(
    tx: Transaction,
    client_id: str,
    ranges: Sequence[Ranged],
    based_on: Mapping[tuple[str, int], int],
    parts: Sequence[Part],
    groups: Iterable[tuple[object, ...]],
    quality: Mapping[str, int],
    troubles: Mapping[str, int],
) -> None:
    """Add a round to what is there.

    based_on: (topic, partition) → the sink's last offset when the round was added up, which is left out of it.

    Raises:
        MovedError: it is another one now. Nothing may be committed.
    """
    for each in ranges:
        now, then = tx.last_offset(each.topic, each.partition), based_on[each.topic, each.partition]
        if now != then:
            raise MovedError(
                f"{each.topic} [{each.partition}] is at offset {now} in the database, and the sums were made from "
                f"{then} on. They were not written: nothing is lost and nothing counted twice; the round is done again."
            )
    tx.executemany(_ADD, groups)
    tx.executemany(_ADD_QUALITY, sorted(quality.items()))
    tx.executemany(_ADD_DEAD, sorted(troubles.items()))
    tx.executemany(_ADD_BATCH, _batches(client_id, ranges, parts))


def _batches(client_id: str, ranges: Sequence[Ranged], parts: Sequence[Part]) -> Iterator[tuple[object, ...]]:
    """From these rows it is checked afterwards that every offset was counted once."""
    epochs = {(each.topic, each.partition): each.epoch for each in ranges}
    now_ms = time.time_ns() // 1_000_000
    for part in parts:
        epoch = epochs[part.topic, part.partition]
        yield part.topic, part.partition, part.first, part.last, part.rows, epoch, client_id, now_ms
