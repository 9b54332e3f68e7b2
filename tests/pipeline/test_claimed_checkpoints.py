"""Claimed batches as members of a coordinated group: a rollback cancels a job of Spark, and takes back state and sink.

What needs no Spark is in test_rounds_in_groups.py.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from kafka_marshal import Checkpoint, CheckpointPolicy, Group, Restore
from kafka_marshal.checkpoints import Folder, RestorePiece
from kafka_marshal.pipeline.claimed import ClaimedBatch, ClaimedBatches
from kafka_marshal.sinks import SinkTransaction, SqliteSink
from tests.client.conftest import Scene
from tests.pipeline.test_claimed import slow

PARTITIONS = 2
SESSION = 3_000


class Driver:
    """A driver that counts offsets in memory, and writes them to a database."""

    def __init__(self, name: str, scene: Scene, spark: SparkSession, topic: str, folder: Path) -> None:
        self.marshal = scene.member(name)
        self.spark, self.topic = spark, topic
        self.states = Folder(folder / "states")
        self.sink = SqliteSink(folder / "rows.db")
        self.counts: dict[int, Counter[int]] = {}
        self.restored: list[tuple[str, int]] = []
        #: Called with each round, before anything is written.
        self.before: Any = lambda df: None
        self.rounds = 0

    @contextmanager
    def batches(self) -> Iterator[ClaimedBatches]:
        options: dict[str, Any] = {
            "mode": Group(session_timeout=SESSION / 1000),
            "checkpoints": CheckpointPolicy(every=None, timeout=20, on_checkpoint=self.save, on_restore=self.restore),
        }
        with ClaimedBatches(self.spark, self.marshal, [self.topic], **options) as made:
            yield made

    def save(self, checkpoint: Checkpoint) -> None:
        for piece in checkpoint.pieces:
            state = json.dumps(list(self.counts[piece.partition].items()))
            self.states.save(checkpoint.id, piece, state.encode())

    def restore(self, restore: Restore) -> None:
        def undo(
            tx: SinkTransaction[sqlite3.Connection],
            piece: RestorePiece,
            position: int,
            ranges: tuple[tuple[int, int], ...],
        ) -> None:
            tx.execute("CREATE TABLE IF NOT EXISTS seen (place INTEGER, at INTEGER)")
            tx.execute("DELETE FROM seen WHERE place = ? AND at >= ?", (piece.partition, position))

        self.sink.restore(restore, undo)
        for piece in restore.pieces:
            self.counts[piece.partition] = Counter(dict(json.loads(self.states.load(piece) or b"[]")))
            self.restored.append((restore.why, piece.position))

    def fn(self, df: DataFrame, batch: ClaimedBatch) -> None:
        self.rounds += 1
        self.before(df)
        rows = [(row.partition, row.offset) for row in df.select("partition", "offset").collect()]
        with self.sink.transaction(batch.group_id, batch.leases, kind=batch.kind) as tx:
            new = [row for row in rows if row[1] > tx.last_offset(self.topic, row[0])]
            tx.executemany("INSERT INTO seen VALUES (?, ?)", new)
        for partition, offset in rows:  # last: a round that raises leaves the state as it was
            self.counts[partition][offset] += 1


def written(folder: Path) -> Counter[tuple[int, int]]:
    with sqlite3.connect(folder / "rows.db") as database:
        return Counter(database.execute("SELECT place, at FROM seen").fetchall())


def everything(messages: int) -> Counter[tuple[int, int]]:
    return Counter((partition, offset) for partition in range(PARTITIONS) for offset in range(messages))


def counted(driver: Driver) -> Counter[tuple[int, int]]:
    rows = ((partition, counts) for partition, counts in driver.counts.items())
    return Counter({(partition, offset): times for partition, counts in rows for offset, times in counts.items()})


def test_rows_and_state_go_back_with_a_rollback_that_cancels_the_job_at_work(
    spark: SparkSession, scene: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = scene.topic(PARTITIONS, 20)
    a = Driver("a", scene, spark, topic, tmp_path)
    with a.batches() as batches:
        batches.foreach_batch(a.fn, available_now=True)  # takes the checkpoint that shows it
        assert a.restored == [("joined", 0)] * PARTITIONS
        assert counted(a) == written(tmp_path) == everything(20)
        twenty = batches.checkpoints.newest
        scene.publish(topic, PARTITIONS, 10)
        batches.foreach_batch(a.fn, until=dict.fromkeys(((topic, 0), (topic, 1)), 30))
        assert batches.checkpoints.newest != twenty
        scene.publish(topic, PARTITIONS, 10)

        def back(df: DataFrame) -> None:
            """While a job of the round runs, all go back to the first of the two."""
            a.before = lambda df: None
            batches.rollback(twenty)
            slow(df)

        a.before, rounds = back, a.rounds
        batches.foreach_batch(a.fn, available_now=True)
        assert a.rounds > rounds + 1, "the round at work was cancelled, and dropped"
        assert "stopped with its lease" in caplog.text
        assert a.restored[PARTITIONS:] == [("rollback", 20)] * PARTITIONS
        assert counted(a) == written(tmp_path) == everything(40)
