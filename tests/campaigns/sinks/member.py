"""One process of writers: each thread carries out the orders that come through its pipe, all with one sink."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from random import Random
from typing import Any, Literal

from xxhash import xxh64_intdigest

from kafka_marshal.errors import ConfigurationError, SinkError, StaleEpochError
from kafka_marshal.sinks import FencedSink, PostgresSink, SqliteSink, base
from kafka_marshal.testing import supervisor
from kafka_marshal.types import SharedEpoch
from rationalizer import key_hash
from rationalizer.limits import MAX_KEY_HASH

GROUP, TOPIC = "campaign", "t"

#: Keys of a partition. Few, so that shares often end at a key's own hash.
KEYS = 40

#: One offset in 31 holds no message: a transaction's marker, for example.
HOLES = 31

#: An order that still fails after this has failed for good (s).
GIVE_UP_S = 60.0

Form = Literal["records", "record", "transaction", "progress", "nap"]
Fault = Literal["", "raise", "die", "all"]


@dataclass(frozen=True, slots=True)
class Place:
    """A database."""

    kind: Literal["sqlite", "postgres"]
    #: A path, or a dsn.
    where: str

    def sink(self) -> FencedSink[Any]:
        """A sink that gives up soon, so that errors with ``retry`` are met."""
        if self.kind == "sqlite":
            return SqliteSink(self.where, busy_timeout_s=5.0)
        return PostgresSink(self.where, lock_timeout_s=3.0, idle_timeout_s=1.0)

    def sql(self, statement: str) -> str:
        """A statement with the driver's marks of parameters."""
        return statement if self.kind == "sqlite" else statement.replace("?", "%s")


@dataclass(frozen=True, slots=True)
class Order:
    """Write these messages with this token."""

    number: int
    form: Form
    partition: int = 0
    round: int = 0
    #: (lo, hi, token) of each part of the keys, adjacent.
    parts: tuple[tuple[int, int, int], ...] = ()
    #: In the order in which they are given to the sink.
    offsets: tuple[int, ...] = ()
    stable: int = -1
    #: "all": write all messages, also those that the sink has.
    fault: Fault = ""
    #: Sleep in the transaction (s).
    pause_s: float = 0.0
    #: Also count by key in a second table, where writers meet; "up" or "mixed" is the order of its rows.
    sums: Literal["", "up", "mixed"] = ""
    #: By a new sink.
    by_new_sink: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it is of all keys, with one token."""
        return len(self.parts) == 1 and self.parts[0][:2] == (0, MAX_KEY_HASH)

    @property
    def epoch(self) -> int:
        """The token as a consumer gives it."""
        newest = max(token for _, _, token in self.parts)
        return newest if self.is_whole else SharedEpoch(newest, self.parts[0][0], self.parts[-1][1], self.parts)

    def part_of(self, offset: int) -> tuple[int, int, int] | None:
        """The part that has a message."""
        key = hash_of(self.partition, offset)
        return next((part for part in self.parts if part[0] <= key <= part[1]), None)


@dataclass(frozen=True, slots=True)
class Result:
    """How an order ended."""

    number: int
    outcome: Literal["done", "stale", "raised", "refused", "failed"]
    #: The sink said that these are stored: now or before.
    done: tuple[int, ...] = ()
    retries: int = 0
    text: str = ""
    #: Of "progress": (partition, last offset, intervals).
    progress: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...] = ()


class Sent:
    """A message, as far as sinks need it."""

    __slots__ = ("_offset", "_partition")

    def __init__(self, partition: int, offset: int) -> None:
        self._partition, self._offset = partition, offset

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return _key(self._partition, self._offset)

    def value(self) -> None:
        return None


def _key(partition: int, offset: int) -> bytes | None:
    drawn = xxh64_intdigest(b"%d/%d" % (partition, offset)) % (KEYS + 1)
    return b"%d" % drawn if drawn < KEYS else None


def is_hole(partition: int, offset: int) -> bool:
    """Whether no message has this offset."""
    return xxh64_intdigest(b"hole %d/%d" % (partition, offset)) % HOLES == 0


@cache
def hash_of(partition: int, offset: int) -> int:
    """The key hash of a message."""
    return key_hash(_key(partition, offset), offset)


class _OursError(Exception):
    """The block of a user fails."""


class Writer:
    """Carries out orders; any thread may call it."""

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._name = place, name
        self._sink = place.sink()
        self._random = Random(name)
        self._insert = place.sql(
            "INSERT INTO written (part, round, off, hash, lo, hi, token, summed, writer) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        )
        self._count = place.sql(
            "INSERT INTO sums VALUES (?, ?, ?, 1) ON CONFLICT (part, round, slot) DO UPDATE SET n = sums.n + 1"
        )

    def carry_out(self, order: Order) -> Result:
        """Until it is done or refused; errors that say so are tried again."""
        sink = self._place.sink() if order.by_new_sink else self._sink
        done: list[int] = []
        until, retries = time.monotonic() + GIVE_UP_S, 0

        def ended(outcome: Literal["done", "stale", "raised", "refused", "failed"], error: object = "") -> Result:
            return Result(order.number, outcome, tuple(done), retries, f"{type(error).__name__}: {error}")

        try:
            while True:
                try:
                    if order.form == "progress":
                        return self._progress(order, sink)
                    self._write(order, sink, done)
                    return ended("done")
                except StaleEpochError as error:
                    return ended("stale", error)
                except _OursError:
                    return ended("raised")
                except ConfigurationError as error:
                    return ended("refused", error)
                except SinkError as error:
                    if not error.retry or time.monotonic() > until:
                        return ended("failed", error)
                    retries += 1
                    time.sleep(0.05 * self._random.random())
                except Exception as error:  # noqa: BLE001 - judged by the coordinator
                    return ended("failed", error)
        finally:
            if order.by_new_sink:
                sink.close()

    def _progress(self, order: Order, sink: FencedSink[Any]) -> Result:
        found = sink.progress(GROUP)
        rows = tuple((key[1], each.last_offset, each.ranges) for key, each in found.items())
        return Result(order.number, "done", progress=rows)

    def _write(self, order: Order, sink: FencedSink[Any], done: list[int]) -> None:
        """Adds to ``done`` what is in the sink after each transaction."""
        if order.form == "nap":
            time.sleep(order.pause_s)
        elif order.form == "record":
            for offset in order.offsets:
                if offset in done:
                    continue
                with sink.record(
                    Sent(order.partition, offset),  # type: ignore[arg-type]
                    group_id=GROUP,
                    epoch=order.epoch,
                    kind="coordinated",
                    stable=order.stable,
                ) as tx:
                    if not tx.is_done or order.fault == "all":
                        self._rows(tx, order, [offset])
                done.append(offset)
        elif order.form == "transaction":
            claim = (TOPIC, order.partition, order.epoch, order.offsets[-1])
            with sink.transaction(GROUP, [claim], kind="coordinated") as last:
                at = last.last_offset(TOPIC, order.partition)
                self._rows(last, order, [offset for offset in order.offsets if offset > at])
            done.extend(order.offsets)
        else:
            messages = [Sent(order.partition, offset) for offset in order.offsets]
            with sink.records(
                messages,  # type: ignore[arg-type]
                group_id=GROUP,
                epoch=order.epoch,
                kind="coordinated",
                stable=order.stable,
            ) as several:
                wanted = order.offsets if order.fault == "all" else [new.offset() for new in several.new]
                self._rows(several, order, wanted)
            done.extend(order.offsets)

    def _rows(self, tx: Any, order: Order, offsets: Sequence[int]) -> None:
        at, summed = (order.partition, order.round), int(bool(order.sums))
        rows = [
            (*at, offset, hash_of(order.partition, offset), *(order.part_of(offset) or (0, 0, 0)), summed, self._name)
            for offset in offsets
        ]
        if rows:
            tx.executemany(self._insert, rows)
        if order.sums and offsets:
            slots = [hash_of(order.partition, offset) % 7 for offset in offsets]
            if order.sums == "up":
                slots.sort()
            tx.executemany(self._count, [(*at, slot) for slot in slots])
        if order.pause_s:
            time.sleep(order.pause_s)
        if order.fault == "raise":
            raise _OursError
        if order.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)


def serve(place: Place, name: str, connections: Sequence[Connection]) -> None:
    """The process: a thread for each connection."""
    supervisor.die_with_parent()
    # Often, so that merging meets everything else.
    for name_, often in (("MERGE_EVERY", 7), ("PATIENCE", 2)):
        setattr(base, name_, often)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    writer = Writer(place, name)

    def obey(connection: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                connection.send(writer.carry_out(connection.recv()))

    threads = [threading.Thread(target=obey, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
