"""From ``Marshal.claim`` to an owned lease, divided by a bare produce-to-own-consumer round trip on the same broker.

Each after 10 ms of idleness, one after the other, interleaved:

    python -m benchmarks.claim [--claims N] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
import uuid
from statistics import median, quantiles

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.common import Row, bench_kafka, report
from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.coordination import create_topic

IDLE_S = 0.010


class RawPair:
    """A bare producer and consumer with the best settings for latency."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._topic = topic
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": 0}
        )
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "raw", "enable.auto.commit": False, "fetch.min.bytes": 1}
        )
        self._consumer.assign([TopicPartition(topic, 0, 0)])

    def round_trip(self) -> float:
        """Seconds until a record of 75 bytes is seen by the own consumer."""
        began = time.perf_counter()
        self._producer.produce(self._topic, b"x" * 75, partition=0)
        self._producer.poll(0)
        while (message := self._consumer.poll(1.0)) is None or message.error() is not None:
            pass
        return time.perf_counter() - began

    def close(self) -> None:
        """Free both."""
        self._producer.flush(5)
        self._consumer.close()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--claims", type=int, default=300)
    parser.add_argument("--json")
    args = parser.parse_args()
    claims: list[float] = []
    trips: list[float] = []
    with bench_kafka() as bootstrap:
        cluster = KafkaCluster(bootstrap, {})
        coordination, topic = (f"{name}-{uuid.uuid4().hex[:8]}" for name in ("__marshal", "raw"))
        create_topic(cluster, coordination, 8, 10)
        cluster.create_topic(topic, 1, 1, {}, 10)
        raw = RawPair(bootstrap, topic)
        with Marshal(bootstrap, group_id="bench", topic=coordination) as marshal:
            for number in range(args.claims + 20):
                time.sleep(IDLE_S)
                trip = raw.round_trip()
                time.sleep(IDLE_S)
                began = time.perf_counter()
                lease = marshal.claim("bench", number)
                owned = time.perf_counter() - began
                lease.release()
                if number >= 20:  # connections are warm
                    trips.append(trip * 1000)
                    claims.append(owned * 1000)
        raw.close()
        cluster.close()
    ratio = median(claims) / median(trips)
    rows = [Row("claim to owned, p50", median(claims), median(trips), ratio, 2.5, "ms", at_most=True)]
    p95 = (quantiles(claims, n=20)[-1], quantiles(trips, n=20)[-1])
    rows.append(Row("claim to owned, p95", *p95, p95[0] / p95[1], None, "ms", at_most=True))
    report("claim", rows, args.json, claims=args.claims)


if __name__ == "__main__":
    main()
