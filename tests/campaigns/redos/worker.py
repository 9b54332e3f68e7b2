"""A worker that counts in a fenced sink how often it wrote each row. Its lines are those of an account."""

from __future__ import annotations

import time
from typing import Any

from kafka_marshal import Attempt, Batches, Group, LeaseLostError, Retry
from kafka_marshal.errors import SinkError, StaleEpochError
from kafka_marshal.sinks import base
from tests.campaigns.process import Process
from tests.sinks.conftest import sink_of

#: Value of messages whose first two tries fail, until the folder has a file ``calm``; not in batches.
FLAKY = b"flaky"

UPSERT = "INSERT INTO written VALUES (?, ?, ?, 1) ON CONFLICT (name, place, at) DO UPDATE SET times = written.times + 1"


class Worker(Process):
    """All of a process."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        base.MERGE_EVERY = 7  # type: ignore[attr-defined]  # often, so that merging meets everything else
        self.sink = sink_of(job["database"], job["where"])
        self.upsert = UPSERT if job["database"] == "sqlite" else UPSERT.replace("?", "%s")

    def live(self) -> None:
        """From the Marshal's constructor to the end."""
        topics, hi_s = [self.job["topic"]], self.job["hi_ms"] / 1000
        retry = Retry(10, (0.01, 0.1))
        with self.marshal() as marshal:
            if self.job["kind"] == "batches":
                with marshal.consumer(topics, mode=Batches()) as sharer:
                    self.batches(sharer)
                return
            mode = Group(session_timeout=4 * hi_s, allow_key_share=True)
            is_claimed = self.job["kind"] == "run"
            with marshal.consumer(topics) if is_claimed else marshal.consumer(topics, mode=mode) as consumer:
                consumer.run(self.handle, concurrency=8, order="key", retry=retry, park=True, drain_timeout=5.0)

    def write(self, tx: Any, messages: list[Any]) -> None:
        """Their rows."""
        tx.executemany(self.upsert, [(self.job["group"], x.partition(), x.offset()) for x in messages])

    def handle(self, message: Any) -> None:
        """The handler of ``run``; it can be killed before its transaction, in it, and after it."""
        attempt, place = Attempt.current(), (self.job["kind"], message.partition(), message.offset())
        self.say("b", *place, time.monotonic())
        fails = message.value() == FLAKY and attempt.number <= 2 and not self.calm.exists()
        try:
            self.take_time(message.value(), is_calm=True)
            with self.sink.record() as tx:
                if not tx.is_done:
                    self.write(tx, [message])
                if fails:
                    raise ValueError("it works when it is tried again")
            self.take_time(message.value(), is_calm=True)
            ended = time.monotonic()
            attempt.require()
        except ValueError:
            self.say("p" if attempt.is_last else "f", *place, time.monotonic())
            raise
        except (LeaseLostError, SinkError):
            self.say("x", *place, time.monotonic())
            raise
        self.say("h", *place, ended)

    def batches(self, consumer: Any) -> None:
        """Whole batches, each in one transaction."""
        for batch in consumer.batches(max_messages=self.rng.choice((5, 50))):
            messages = list(batch)
            places = [(self.job["kind"], x.partition(), x.offset()) for x in messages]
            for place in places:
                self.say("b", *place, time.monotonic())
            self.take_time(None, is_calm=True)
            is_stored = self.store(batch)
            self.take_time(None, is_calm=True)
            ended = time.monotonic()
            is_handled = is_stored and batch.is_held
            for place in places:
                self.say("h" if is_handled else "x", *place, ended)
            if is_handled:
                batch.done()
            del batch

    def store(self, batch: Any) -> bool:
        """Whether the sink has all rows of a batch, which is tried while it is ours."""
        while batch.is_held:
            try:
                with self.sink.records(batch) as tx:
                    self.write(tx, tx.new)
            except (LeaseLostError, StaleEpochError):
                return False
            except SinkError as error:
                if not error.retry:
                    raise
                time.sleep(0.01)
            else:
                return True
        return False
