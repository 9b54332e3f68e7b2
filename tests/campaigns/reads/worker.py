"""One process with several members.

Each member has a thread, and a range of keys of each partition. It opens a Marshal, works for some seconds, fast or
slow, or takes nothing for a while, closes it, and opens the next. What was read together is
appended to a file beside the lines, as ``HITS MISSES``.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from kafka_marshal import Keys, Marshal
from kafka_marshal.client import shared_reads
from kafka_marshal.errors import KafkaUnavailableError
from tests.campaigns.process import Process

#: How much is kept for others: all, or so little that the slow ones are left behind.
KEPT = (200 * 2**20, 2**20, 200_000)


class Worker(Process):
    """All of a process."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        self.ended = threading.Event()
        self.kept = self.rng.choice(KEPT) if job["shared"] else 0
        self.open: list[Marshal] = []

    def live(self) -> None:
        shared_reads.SILENT_S = 1.0  # a campaign is too short for ten seconds
        signal.signal(signal.SIGTERM, lambda *_: self.end())
        threads = [
            threading.Thread(target=self.member, args=(number, tuple(span)))
            for number, span in enumerate(self.job["spans"])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)  # a signal's handler runs between

    def end(self) -> None:
        self.ended.set()
        for marshal in list(self.open):
            marshal.stop()

    def member(self, number: int, span: tuple[int, int]) -> None:
        """One of its members, again and again."""
        rng = Random(f"{self.job['seed']} {number}")
        while not self.ended.is_set():
            try:
                self.once(f"{self.job['name']}-{number}", span, rng)
            except KafkaUnavailableError:
                time.sleep(0.2)
            except BaseException as error:
                self.say("e", f"{type(error).__name__}: {error}".replace("\n", " "))
                raise

    def once(self, name: str, span: tuple[int, int], rng: Random) -> None:
        """From the Marshal's constructor to its end."""
        job, is_calm = self.job, self.calm.exists()
        ranges = {(job["topic"], number): [span] for number in range(job["partitions"])}
        with Marshal(
            job["bootstrap"],
            group_id=job["group"],
            client_id=name,
            topic=job["log"],
            heartbeat_interval=(job["hi_ms"]) / 1000,
            max_bytes_shared_reads=self.kept,
        ) as marshal:
            timer = threading.Timer(rng.uniform(0.5, 8.0), marshal.stop)
            timer.daemon = True
            self.open.append(marshal)
            if self.ended.is_set():
                marshal.stop()
            elif not is_calm:
                timer.start()
            try:
                with marshal.consumer(mode=Keys(ranges), batch_size=rng.choice((10, 100))) as consumer:
                    self.work(consumer, 0.0 if is_calm else rng.choice((0.0, 0.0, 0.0005, 0.004)), rng)
            finally:
                self.open.remove(marshal)
                timer.cancel()
                counts = {each.outcome: each.count for each in marshal.metrics().shared_reads}
                with Path(f"{job['out']}.reads").open("a") as file:
                    file.write(f"{counts.get('hit', 0)} {counts.get('miss', 0)}\n")

    def work(self, consumer: Any, work_s: float, rng: Random) -> None:
        """Loop over the batches."""
        for batch in consumer.batches(max_messages=rng.choice((20, 500))):
            for message in batch:
                place = "keys", batch.partition, message.offset()
                self.say("b", *place, time.monotonic())
                time.sleep(0.0 if self.calm.exists() else work_s)
                ended = time.monotonic()
                if not batch.is_held:
                    self.say("x", *place, ended)
                    return  # later ones of its keys must not go before it
                self.say("h", *place, ended)
            batch.done()
            if not self.calm.exists() and rng.random() < 0.01:
                time.sleep(rng.choice((0.3, 2.0)))
            del batch
