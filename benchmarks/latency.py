"""From handing a record to the producer until the own replica has applied it, divided by a bare produce/consume pair.

Same broker, interleaved, each after 10 ms of idleness:

    python -m benchmarks.latency [--rounds N] [--json FILE]

Ours is the whole way: engine, encoding, producer, broker, tail, decoding, replay, and waking the waiting thread.
"""

from __future__ import annotations

import argparse
import time
import uuid
from statistics import median, quantiles

from benchmarks.claim import IDLE_S, RawPair
from benchmarks.common import Row, bench_kafka, report
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.coordination import create_topic
from rationalizer import Outcome, Tick

WARM_UP = 20


class OwnRoundTrip:
    """Appends Ticks through a Marshal's driver, and waits for its replica."""

    def __init__(self, marshal: Marshal, partitions: int) -> None:
        self._driver = marshal._driver
        self._partitions = partitions
        self._number = 0
        self._seen = 0
        self._driver.listeners.append(self._applied)

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        if outcome.type == "Tick":
            self._seen += 1

    def round_trip(self) -> float:
        """Seconds until a Tick is applied and the waiting thread knows."""
        self._number += 1
        wanted = self._seen + 1
        began = time.perf_counter()
        with self._driver.locked() as engine:
            engine.outbox.append(self._number % self._partitions, Tick(*engine.ids))
        with self._driver.condition:
            self._driver.wait_for(lambda: self._seen >= wanted, 10)
        return time.perf_counter() - began


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json")
    args = parser.parse_args()
    ours: list[float] = []
    bare: list[float] = []
    with bench_kafka() as bootstrap:
        cluster = KafkaCluster(bootstrap, {})
        coordination, topic = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("__marshal", "raw"))
        create_topic(cluster, coordination, 8, 10)
        cluster.create_topic(topic, 1, 1, {}, 10)
        raw = RawPair(bootstrap, topic)
        with Marshal(bootstrap, group_id="bench", topic=coordination) as marshal:
            own = OwnRoundTrip(marshal, 8)
            for number in range(args.rounds + WARM_UP):
                time.sleep(IDLE_S)
                trip = raw.round_trip()
                time.sleep(IDLE_S)
                applied = own.round_trip()
                if number >= WARM_UP:
                    bare.append(trip * 1000)
                    ours.append(applied * 1000)
        raw.close()
        cluster.close()
    rows = [Row("produce to applied, p50", median(ours), median(bare), median(ours) / median(bare), 2.0, "ms", True)]
    p95 = (quantiles(ours, n=20)[-1], quantiles(bare, n=20)[-1])
    rows.append(Row("produce to applied, p95", *p95, p95[0] / p95[1], None, "ms", at_most=True))
    report("latency", rows, args.json, rounds=args.rounds)


if __name__ == "__main__":
    main()
