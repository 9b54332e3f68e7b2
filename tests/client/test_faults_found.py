"""Faults found by chaos and simulation (docs/chaos.md), as tests without a broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from math import inf

import pytest

from kafka_marshal import Batches, ClaimTimeoutError, ConfigurationError, Delivery, Marshal
from kafka_marshal.adapters.memory import AppendFate, MemoryCluster
from kafka_marshal.client.consumer import CLOCK_STRIDE
from kafka_marshal.client.fetching import Then
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.ports import DataFault, Message
from kafka_marshal.runtime import MachineRuntime
from rationalizer import ClaimingShare, ReleasingPartition, SettlingMessages, decode
from rationalizer.levels import SUPPORTED_LEVEL
from tests.client.conftest import wait_until

HI = 600


class Looks(MachineRuntime):
    """Counts an iteration's reads of the clock; the test sets the time between messages."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0
        self.ms = 0.0
        self.clock_gettime = self._look

    def _look(self, _clock: int) -> float:
        self.looks += 1
        return self.ms / 1000


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    made = MemoryCluster()
    create_topic(made, "__marshal", 1, 10)
    yield made
    made.close()


def member(cluster: MemoryCluster, client_id: str = "a") -> Marshal:
    connected = cluster.connect(client_id)
    connected.runtime = cluster.runtime
    return Marshal.on_cluster(connected, group_id="g", client_id=client_id, heartbeat_interval=HI / 1000)


def looks_at(cluster: MemoryCluster, delivery: Delivery, took_ms: Callable[[int], float]) -> int:
    """Reads of the clock while 400 messages are handled; ``took``: time of the nth message."""
    cluster.broker.create_topic("t", 1)
    for number in range(400):
        cluster.broker.produce("t", 0, str(number).encode())
    clock = cluster.runtime = Looks()
    with member(cluster) as marshal, marshal.consumer(["t"], delivery=delivery) as consumer:
        for number, _ in enumerate(consumer):
            clock.ms += took_ms(number)
            if number == 399:
                break
    return clock.looks


@pytest.mark.parametrize("message_ms", [0.7, 0.05])
def test_t4_the_clock_is_read_before_each_message(cluster: MemoryCluster, message_ms: float) -> None:
    """A worker with 0.7 ms per message, stopped by SIGSTOP for 3 HI, received seven more when it continued."""
    assert 400 <= looks_at(cluster, "at-least-once", lambda _: message_ms) <= 412  # one or two more per run


@pytest.mark.parametrize(
    ("took_ms", "looks"),
    [
        (lambda _: 0.7, 400),
        (lambda _: 0.2, 400),
        (lambda number: 0.01 if number % 4 else 2.0, 400),  # one quick message does not predict the next
        (lambda _: 0.05, 400 / CLOCK_STRIDE),
    ],
)
def test_t4_at_most_once_eight_quick_messages_allow_eight_without_a_look(
    cluster: MemoryCluster, took_ms: Callable[[int], float], looks: float
) -> None:
    """They are granted, so no other member gets them; a stop among them costs at most a millisecond's work."""
    assert looks <= looks_at(cluster, "at-most-once", took_ms) <= looks + 2 * CLOCK_STRIDE


def test_t5_messages_of_a_lease_in_doubt_are_waited_for_at_rest(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is overdue (its wait is over): checking it without a pause would burn a core."""
    cluster.broker.create_topic("t", 1)
    with member(cluster) as marshal, marshal.consumer(["t"]) as consumer:
        cluster.broker.produce("t", 0, b"first")
        batches = consumer.batches(10, timeout=0.3)
        next(batches).done()
        looks: list[float] = []
        pump = consumer._fetcher.pump

        def counted(timeout_s: float, then: Then | None = None) -> int:
            looks.append(time.monotonic())
            return pump(timeout_s, then)

        monkeypatch.setattr(consumer._fetcher, "pump", counted)
        cluster.broker.produce("t", 0, b"second")
        thread = threading.Thread(target=lambda: next(batches).done())
        thread.start()
        driver, lease = marshal._driver, marshal._driver.engine.book.leases["t", 0]
        wait_until(lambda: consumer._delivery.fullest(driver.now_ms()) == 1)
        lease.in_doubt_since = inf  # no beat ends it
        lease.refresh()
        began = time.monotonic()
        try:
            wait_until(lambda: looks[-1] > began + 1.0)
        finally:
            lease.in_doubt_since = None
            lease.refresh()
            thread.join(20)
        assert not thread.is_alive(), "the doubt is over, and the batch was not handed over"
        assert len(looks) < 100, "five a second are enough"


def held_up(cluster: MemoryCluster, kind: type = ReleasingPartition) -> Callable[[], None]:
    """Lose records of a kind until the returned function is called."""

    def fate(_client: str, topic: str, _partition: int, value: bytes) -> AppendFate:
        is_one = topic == "__marshal" and isinstance(decode(value, SUPPORTED_LEVEL), kind)
        return AppendFate.LOST if is_one else AppendFate.WRITTEN

    before = cluster.broker.faults.append
    cluster.broker.faults.append = fate

    def restore() -> None:
        cluster.broker.faults.append = before

    return restore


def test_c8_a_claim_waits_for_our_own_release(cluster: MemoryCluster) -> None:
    """A claim after a release lost with a broker raised as if this Marshal still had the lease."""
    with member(cluster) as marshal:
        restore = held_up(cluster)
        lease = marshal.claim("t", 0)
        lease.release(7)
        began = time.monotonic()
        with pytest.raises(ClaimTimeoutError, match="has released this lease"):
            marshal.claim("t", 0, timeout=0.1)
        assert time.monotonic() - began < HI / 1000
        restore()
        again = marshal.claim("t", 0, timeout=20)
        assert again.last_offset == 7
        with pytest.raises(ConfigurationError, match="has, or is getting, this lease"):
            marshal.claim("t", 0, timeout=20)


def test_p6_a_sharers_reader_that_moves_on_and_back_within_one_read(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the read brought from further up made the batch below look as if Kafka had removed it: it was lost."""
    cluster.broker.create_topic("t", 1)
    for number in range(10):
        cluster.broker.produce("t", 0, b"%d" % number)
    with member(cluster, "x") as other, other.consumer(["t"], mode=Batches()) as former:
        batch_below = next(former.batches(10))
        former.pause([("t", 0)])  # it takes no other
        restore = held_up(cluster, ClaimingShare)
        with member(cluster) as marshal, marshal.consumer(["t"], mode=Batches()) as consumer:
            fetcher, key, found = consumer._fetcher, ("t", 0), list[Message]()
            real, offsets = fetcher.reader.read, list[int]()

            def read(limit: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
                if found:
                    return real(limit, timeout_s)
                restore()
                no_take = held_up(cluster, SettlingMessages)
                cluster.broker.produce("t", 0, b"10")
                while not found:
                    found.extend(real(limit, 0.01)[0])
                first = fetcher._fetched[key]
                no_take()
                batch_below.give_back()
                wait_until(lambda: fetcher._fetched[key] != first)
                return found, []

            monkeypatch.setattr(fetcher.reader, "read", read)
            for batch in consumer.batches(10, timeout=10.0):
                offsets.extend(message.offset() or 0 for message in batch)
                batch.done()
                if 10 in offsets:
                    break
    assert sorted(offsets) == list(range(11))
