"""Members of a real client that share a partition by key, one with batches, one with handlers: one sink."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path
from typing import Any

from kafka_marshal import Attempt, Group, Keys, Marshal
from kafka_marshal.sinks import SqliteSink
from kafka_marshal.types import SharedEpoch
from rationalizer import ConfigureGroup, Upgrade, encode, key_hash
from tests.broker.helpers import eventually
from tests.faults.stories import GROUP, TOPIC, memory_cluster

MESSAGES = 300


class Sharer:
    """A member in a separate thread, until it is stopped."""

    def __init__(self, cluster: Any, client_id: str, sink: SqliteSink, in_batches: bool) -> None:
        self.sink, self.in_batches, self.tokens = sink, in_batches, list[SharedEpoch]()
        self.error: BaseException | None = None
        self.marshal = Marshal.on_cluster(cluster.connect(client_id), group_id=GROUP, client_id=client_id)
        self.consumer = self.marshal.consumer([TOPIC], mode=Group(session_timeout=2.0, allow_key_share=True))
        self.thread = threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        try:
            if not self.in_batches:
                self.consumer.run(self._handle, concurrency=4)
                return
            for batch in self.consumer.batches(max_messages=20, timeout=0.05):
                with self.sink.records(batch) as tx:
                    tx.executemany("INSERT INTO rows VALUES (?)", [(each.offset(),) for each in tx.new])
                batch.done()
        except BaseException as error:  # noqa: BLE001 - raised in the test's thread
            self.error = error

    def _handle(self, message: Any) -> None:
        epoch = Attempt.current().epoch
        assert isinstance(epoch, SharedEpoch)
        assert epoch.lo <= key_hash(message.key(), message.offset()) <= epoch.hi
        self.tokens.append(epoch)
        with self.sink.record() as tx:
            if not tx.is_done:
                tx.execute("INSERT INTO rows VALUES (?)", (message.offset(),))

    def end(self) -> None:
        self.consumer.stop()
        self.thread.join(30)
        self.marshal.close()
        if self.error is not None:
            raise self.error


def test_members_that_share_a_partition_write_each_row_once(tmp_path: Path) -> None:
    cluster = memory_cluster(1, 0)
    for record in (Upgrade("i", "o", "any", 2), ConfigureGroup("i", "o", GROUP, (("accept_range_fetch", (TOPIC,)),))):
        cluster.broker.produce("__marshal", 0, encode(record))
    database = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    database.execute("CREATE TABLE rows (offset_ integer)")

    def produce(first: int, last: int) -> None:
        for number in range(first, last):
            cluster.broker.produce(TOPIC, 0, b"", b"k%d" % (number % 17))

    def has_all(count: int) -> bool:
        return database.execute("SELECT count(DISTINCT offset_) FROM rows").fetchall() == [(count,)]

    with SqliteSink(tmp_path / "x.db") as sink:
        sharers = [Sharer(cluster, "a", sink, in_batches=True)]
        try:
            produce(0, 50)
            eventually(lambda: has_all(50), what="the first has all keys")
            sharers.append(Sharer(cluster, "b", sink, in_batches=False))
            eventually(lambda: [each.lo for x in sharers for each in x.consumer.pieces()][1:] != [], what="two shares")
            produce(50, 200)
            eventually(lambda: has_all(200), what="both wrote")
            assert len(sink.progress(GROUP)[TOPIC, 0].fences) == 2
            assert sharers[1].tokens
            sharers.pop().end()
            produce(200, MESSAGES)
            eventually(lambda: has_all(MESSAGES), what="the first has all keys again")
        finally:
            for each in sharers:
                each.end()
        assert database.execute("SELECT count(*) FROM rows").fetchone() == (MESSAGES,)
        at = sink.progress(GROUP)[TOPIC, 0]
        assert (at.last_offset, at.ranges) == (MESSAGES - 1, ())
        assert len(at.fences) == 2, "it kept its keys' token, and has a newer one for the others"
    database.close()


def test_members_that_name_their_keys_write_each_row_once(tmp_path: Path) -> None:
    """Of a claimed group: each share has its epoch, and neither refuses the other, however old it is."""
    cluster, middle = memory_cluster(1, 0), 2**62
    for number in range(MESSAGES):
        cluster.broker.produce(TOPIC, 0, b"", b"k%d" % (number % 17))
    database = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    database.execute("CREATE TABLE rows (offset_ integer)")
    marshals = [Marshal.on_cluster(cluster.connect(x), group_id=GROUP, client_id=x) for x in "ab"]
    ranges = [[(0, middle - 1)], [(middle, 2**63 - 1)]]
    errors: list[BaseException] = []
    with SqliteSink(tmp_path / "x.db") as sink:

        def work(consumer: Any) -> None:
            try:
                for batch in consumer.batches(max_messages=10, timeout=0.05):
                    assert isinstance(batch.epoch, SharedEpoch)
                    with sink.records(batch) as tx:
                        tx.executemany("INSERT INTO rows VALUES (?)", [(each.offset(),) for each in tx.new])
                    batch.done()
            except BaseException as error:  # noqa: BLE001 - raised in the test's thread
                errors.append(error)

        consumers = [x.consumer(mode=Keys({(TOPIC, 0): mine})) for x, mine in zip(marshals, ranges, strict=True)]
        threads = [threading.Thread(target=work, args=(each,)) for each in consumers]
        for thread in threads:
            thread.start()
        try:
            found = "SELECT count(*), count(DISTINCT offset_) FROM rows"
            eventually(lambda: errors or database.execute(found).fetchone() == (MESSAGES, MESSAGES), what="all rows")
        finally:
            for each in marshals:
                each.stop()
            for thread in threads:
                thread.join(20)
            for each in marshals:
                each.close()
        assert errors == []
        assert len(sink.progress(GROUP)[TOPIC, 0].fences) == 2
    database.close()
