"""A worker of any mode: it holds partitions whole, or shares them by keys or by batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kafka_marshal import (
    Attempt,
    Batches,
    Consumer,
    Group,
    GroupConsumer,
    Keys,
    LeaseLostError,
    Marshal,
    Retry,
    ShareConsumer,
)
from tests.campaigns.process import POISON, Process

#: A message whose tries fail, until the folder has a file ``calm``.
BAD = b"bad"

RETRY = Retry(attempts=2, backoff=(0.001, 0.01))


class Worker(Process):
    """All of a process. Its kind is one of those of the account."""

    def live(self) -> None:
        with self.marshal() as marshal, self.consumer(marshal) as consumer:
            if self.job["kind"] in ("loop", "batches"):
                self.loop(consumer)
            else:
                order = "none" if self.job["kind"] == "shared" else "key"
                consumer.run(self.handle, concurrency=8, order=order, retry=RETRY, park=True)

    @contextmanager
    def consumer(self, marshal: Marshal) -> Iterator[Any]:
        job = self.job
        found: Consumer | ShareConsumer | GroupConsumer
        match job["kind"]:
            case "batches" | "shared":
                found = marshal.consumer([job["topic"]], mode=Batches())
            case "keys":
                ranges = [tuple(each) for each in job["ranges"]]
                found = marshal.consumer(
                    mode=Keys({(job["topic"], number): ranges for number in range(job["partitions"])})
                )
            case "group" | "pieces":
                found = marshal.consumer(
                    [job["topic"]],
                    mode=Group(session_timeout=(4 * job["hi_ms"]) / 1000, allow_key_share=job["kind"] == "pieces"),
                )
            case _:
                found = marshal.consumer([job["topic"]])
        with found as consumer:
            yield consumer

    def loop(self, consumer: Any) -> None:
        """Batches, of a partition that is held whole or shared; a message that fails is set aside by hand."""
        is_shared = self.job["kind"] == "batches"
        for batch in consumer.batches(max_messages=self.rng.choice((20, 200))):
            for message in batch:
                if not self.one(batch, message, is_shared):
                    break
                if self.fails(message):
                    (batch if is_shared else consumer).park(message, "Bad")
            else:
                batch.done()
            del batch

    def one(self, batch: Any, message: Any, is_shared: bool) -> bool:
        """Handle one message. Returns whether the batch is still proven to be ours."""
        place = self.job["kind"], message.partition(), message.offset()
        self.say("b", *place, time.monotonic())
        value = message.value() if is_shared or message.value() != POISON else BAD  # no loop counts tries
        self.take_time(value, self.calm.exists())
        ended = time.monotonic()
        if not batch.is_held:
            self.say("x", *place, ended)
            return False
        self.say("p" if self.fails(message) else "h", *place, ended)
        return True

    def fails(self, message: Any) -> bool:
        """Whether its tries fail, here."""
        return message.value() in (BAD, POISON) and not self.calm.exists()

    def handle(self, message: Any) -> None:
        """A handler of ``run``."""
        attempt = Attempt.current()
        place = self.job["kind"], message.partition(), message.offset()
        self.say("b", *place, time.monotonic())
        self.take_time(message.value(), self.calm.exists())
        ended = time.monotonic()
        try:
            attempt.require()
        except LeaseLostError:
            self.say("x", *place, ended)
            raise
        if self.fails(message):
            self.say("p" if attempt.is_last else "f", *place, ended)
            raise ValueError("bad")
        self.say("h", *place, ended)
