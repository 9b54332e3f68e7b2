"""The usual own solution: threads with a queue each, keys by hash, commits of the lowest done offset."""

from __future__ import annotations

import queue
import threading
import time
import zlib

from confluent_kafka import Consumer, Message, TopicPartition

from benchmarks.lane_peers.work import FailedError, Order, Work

#: Most messages that wait for one thread, to bound memory.
QUEUED = 1_000

COMMIT_S = 1.0


class Done:
    """The done offsets, up to the first gap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beyond: set[int] = set()
        self.next = 0

    def add(self, offset: int) -> None:
        """This one is."""
        with self._lock:
            self._beyond.add(offset)
            while self.next in self._beyond:
                self._beyond.remove(self.next)
                self.next += 1


def serve(waiting: queue.Queue[Message], work: Work, done: Done) -> None:
    """One thread."""
    while True:
        message = waiting.get()
        while True:
            try:
                work.handle(message.offset() or 0, message.key() or b"", message.value() or b"")
                break
            except FailedError:
                time.sleep(0.002)
        done.add(message.offset() or 0)


def read(order: Order, queues: list[queue.Queue[Message]], done: Done) -> None:
    """Read, deal out, commit."""
    consumer = Consumer(
        {
            "bootstrap.servers": order.bootstrap,
            "group.id": order.group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 1,
            "fetch.min.bytes": 1,
        }
    )
    consumer.subscribe([order.topic])
    committed, commit_at = 0, 0.0
    while True:
        for message in consumer.consume(500, 0.1):
            if message.error() is None:
                queues[zlib.crc32(message.key() or b"") % len(queues)].put(message)
        if time.monotonic() > commit_at and done.next > committed:
            commit_at, committed = time.monotonic() + COMMIT_S, done.next
            consumer.commit(offsets=[TopicPartition(order.topic, 0, committed)], asynchronous=True)


def main() -> None:
    """Until it is over."""
    order = Order.given()
    work, done = Work(order), Done()
    queues: list[queue.Queue[Message]] = [queue.Queue(QUEUED) for _ in range(order.concurrency)]
    for waiting in queues:
        threading.Thread(target=serve, args=(waiting, work, done), daemon=True).start()
    threading.Thread(target=read, args=(order, queues, done), daemon=True).start()
    work.wait()
    work.tell_and_end()


if __name__ == "__main__":
    main()
