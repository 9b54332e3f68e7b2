"""A broker that answers late, partially, or not at all for a while: nothing is lost or, at most once, repeated."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import Producer

from kafka_marshal import Consumer, Delivery, Marshal, MarshalError
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import LocalBroker
from kafka_marshal.testing.proxy import Direction, TcpProxy

pytestmark = [pytest.mark.broker, pytest.mark.slow]

PARTITIONS, MESSAGES = 4, 2_000

#: Large enough that an answer takes many packets and is cut in the middle of one.
SIZE = 2_000

SEED = 7
TROUBLE_S = 4.0
WITHIN_S = 60.0


@dataclass
class Ground:
    bootstrap: str
    proxy: TcpProxy


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    with TcpProxy() as proxy, LocalBroker(advertised_port=proxy.port) as broker:
        proxy.target_port = broker.port
        yield Ground(broker.bootstrap_servers, proxy)


def trouble(proxy: TcpProxy, seed: int) -> None:
    """Inject random network faults for a while."""
    rng = random.Random(seed)
    until = time.monotonic() + TROUBLE_S
    while time.monotonic() < until:
        match rng.randrange(4):
            case 0:
                proxy.delay(rng.uniform(0.01, 0.3), rng.choice(list(Direction)))
            case 1:
                proxy.cut()
            case 2:
                proxy.black_hole(rng.choice(list(Direction)))
            case _:
                proxy.restore()
        time.sleep(rng.uniform(0.02, 0.3))
    proxy.restore()


def work(consumer: Consumer, seen: list[tuple[int, int]], ended: threading.Event) -> None:
    while not ended.is_set():
        try:
            message = consumer.poll(0.1)
        except MarshalError:  # reported; continue
            continue
        if message is not None:
            seen.append((message.partition() or 0, message.offset() or 0))
            consumer.done(message)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
def test_nothing_is_lost_behind_a_bad_network(ground: Ground, delivery: Delivery) -> None:
    topic, log, group = f"data-{delivery}", f"__marshal-{delivery}", f"g-{delivery}"
    cluster = KafkaCluster(ground.bootstrap, {})
    create_topic(cluster, log, 2, 30)
    cluster.create_topic(topic, PARTITIONS, 1, {}, 30)
    producer = Producer({"bootstrap.servers": ground.bootstrap})
    for number in range(MESSAGES):
        producer.produce(topic, b"%d" % number + bytes(SIZE), partition=number % PARTITIONS)
    assert producer.flush(60) == 0

    seen: list[tuple[int, int]] = []
    given_up: set[tuple[int, int]] = set()
    ended = threading.Event()
    members = [
        Marshal(ground.bootstrap, group_id=group, client_id=name, topic=log, heartbeat_interval=0.6)
        for name in ("a", "b")
    ]
    consumers = [member.consumer([topic], delivery=delivery, batch_size=50) for member in members]
    threads = [
        threading.Thread(target=work, args=(consumer, seen, ended), daemon=True) for consumer in consumers for _ in "12"
    ]
    for thread in threads:
        thread.start()
    trouble(ground.proxy, SEED)

    def missing() -> set[tuple[int, int]]:
        for consumer in consumers:
            for _, partition, first, last in consumer.unprocessed:
                given_up.update((partition, offset) for offset in range(first, last + 1))
        everything = {(p, o) for p in range(PARTITIONS) for o in range(MESSAGES // PARTITIONS)}
        return everything.difference(seen, given_up)

    until = time.monotonic() + WITHIN_S
    while missing() and time.monotonic() < until:
        time.sleep(0.1)
    ended.set()
    for thread in threads:
        thread.join(10)
    for member in members:
        member.close(10)
    assert not missing(), f"{len(missing())} neither handed out nor reported: {sorted(missing())[:5]}"
    if delivery == "at-most-once":
        twice = [place for place, times in Counter(seen).items() if times > 1]
        assert not twice, f"{len(twice)} handed out twice: {sorted(twice)[:5]}"
        assert not given_up.intersection(seen), "reported as unprocessed, and handed out"
    else:
        assert not given_up
    assert not any(thread.is_alive() for thread in threads)
    cluster.close()
