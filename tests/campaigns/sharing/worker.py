"""A worker that shares partitions by batches. Its lines:

| line | meaning |
|---|---|
| ``b PARTITION FIRST LAST TOKEN COUNT TIME`` | a batch begins (of ``run``: a message, token −1) |
| ``h PARTITION FIRST LAST TOKEN COUNT TIME`` | it was handled, and the member could still prove that it has it |
| ``x PARTITION FIRST LAST TOKEN COUNT TIME`` | it was dropped: the member could not |
| ``r PARTITION FIRST LAST TOKEN COUNT TIME`` | the sink refused it: another holder came, or a reposition |
| ``p PARTITION OFFSET TOKEN`` | a message of it was set aside |
"""

from __future__ import annotations

import time
from typing import Any

from kafka_marshal import Attempt, Batches, LeaseLostError, Retry, ShareConsumer, SharedBatch
from kafka_marshal.errors import SinkError, StaleEpochError
from kafka_marshal.sinks import SqliteSink
from tests.campaigns.process import Process

INSERT = "INSERT INTO rows (place, at, token) VALUES (?, ?, ?)"

#: The share of messages that are set aside, until then.
PARKING = 0.0003


class Worker(Process):
    """All of a process."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.sink = SqliteSink(job["database"]) if job["database"] else None

    def live(self) -> None:
        """From the Marshal's constructor to the end."""
        job = self.job
        with (
            self.marshal() as marshal,
            marshal.consumer([job["topic"]], mode=Batches(), handler_timeout=job["timeout_s"]) as consumer,
        ):
            if job["kind"] == "run":
                consumer.run(self.handle, concurrency=8, retry=Retry(attempts=2, backoff=(0.001, 0.01)), park=True)
            else:
                self.batches(consumer)

    def batches(self, consumer: ShareConsumer) -> None:
        for batch in consumer.batches(max_messages=self.rng.choice((50, 500))):
            place = batch.partition, batch.first_offset, batch.last_offset, batch.token, batch.delivery_count
            self.say("b", *place, time.monotonic())
            aside = self.work_on(batch)
            if aside is None:
                self.say("x", *place, time.monotonic())
                continue
            verdict = self.store(batch, [message for message in batch if message not in aside])
            for message in aside if verdict == "h" else ():
                self.say("p", batch.partition, message.offset(), batch.token)
                batch.park(message, "Bad")
            self.say(verdict, *place, time.monotonic())
            if verdict == "h":
                batch.done()
            del batch

    def store(self, batch: SharedBatch, messages: list[Any]) -> str:
        """Store the rows of a batch, each once. Returns what to write down."""
        if self.sink is None or not messages:
            return "h"
        of: dict[str, Any] = {"group_id": batch.group_id, "epoch": batch.epoch, "kind": batch.kind}
        for _ in range(100):
            try:
                with self.sink.records(messages, **of) as tx:
                    tx.executemany(INSERT, [(x.partition(), x.offset(), batch.token) for x in tx.new])
            except StaleEpochError:
                return "r"
            except LeaseLostError:
                return "x"
            except SinkError as error:
                if not error.retry:
                    raise
                time.sleep(0.01)
            else:
                return "h"
        return "x"

    def work_on(self, batch: SharedBatch) -> list[Any] | None:
        """Returns messages to set aside; None: the batch is no longer proven to be ours."""
        aside: list[Any] = []
        is_calm = self.calm.exists()
        for message in batch:
            if not batch.is_held:
                return None
            self.take_time(message.value(), is_calm)
            if not is_calm and self.rng.random() < PARKING:
                aside.append(message)
        return aside if batch.is_held else None

    def handle(self, message: Any) -> None:
        """A handler of ``run``."""
        attempt, is_calm = Attempt.current(), self.calm.exists()
        place = message.partition(), message.offset(), message.offset(), -1, 0
        self.say("b", *place, time.monotonic())
        try:
            self.take_time(message.value(), is_calm)
            if not is_calm and self.rng.random() < PARKING:
                self.say("p", message.partition(), message.offset(), -1)
                raise ValueError("bad")
            attempt.require()
            if self.sink is not None:
                with self.sink.record() as tx:
                    tx.executemany(INSERT, [(x.partition(), x.offset(), -1) for x in tx.new])
        except (ValueError, LeaseLostError, SinkError) as error:
            self.say("r" if isinstance(error, StaleEpochError) else "x", *place, time.monotonic())
            raise
        self.say("h", *place, time.monotonic())
