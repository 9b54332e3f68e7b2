"""What chaos found on real brokers (docs/chaos.md), each as a test that needs none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kafka_marshal import ClaimTimeoutError, ConfigurationError, Marshal
from kafka_marshal.adapters.memory import AppendFate, MemoryCluster
from kafka_marshal.consumer import CLOCK_STRIDE
from kafka_marshal.coordination import create_topic
from kafka_marshal.runtime import Threads
from rationalizer import ReleasingPartition, decode

HI = 600


class Looks(Threads):
    """Counts the looks at the clock that an iteration makes; the time between messages is what the test says."""

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
    return Marshal.on_cluster(connected, group_id="g", client_id=client_id, heartbeat_interval_ms=HI)


@pytest.mark.parametrize("delivery", ["at-least-once", "at-most-once"])
@pytest.mark.parametrize(("message_ms", "looks"), [(0.7, 400), (0.2, 400), (0.05, 400 / CLOCK_STRIDE)])
def test_t4_the_clock_is_looked_at_before_each_message_unless_eight_take_less_than_a_millisecond(
    cluster: MemoryCluster, delivery: str, message_ms: float, looks: float
) -> None:
    """A worker that took 0.7 ms a message, stopped by SIGSTOP for 3 HI, was handed seven more when it went on."""
    cluster.broker.create_topic("t", 1)
    for number in range(400):
        cluster.broker.produce("t", 0, str(number).encode())
    clock = cluster.runtime = Looks()
    with member(cluster) as marshal, marshal.consumer(["t"], delivery=delivery) as consumer:
        for handled, _ in enumerate(consumer, 1):
            clock.ms += message_ms
            if handled == 400:
                break
    assert looks <= clock.looks <= looks + 12  # one or two more for every run


def held_up(cluster: MemoryCluster) -> Callable[[], None]:
    """Releases get lost until the returned function is called."""

    def fate(_client: str, topic: str, _partition: int, value: bytes) -> AppendFate:
        is_release = topic == "__marshal" and isinstance(decode(value), ReleasingPartition)
        return AppendFate.LOST if is_release else AppendFate.WRITTEN

    before = cluster.broker.faults.append
    cluster.broker.faults.append = fate

    def restore() -> None:
        cluster.broker.faults.append = before

    return restore


def test_c8_a_claim_waits_for_our_own_release(cluster: MemoryCluster) -> None:
    """A claim after a release that was lost with a broker said that this Marshal had the lease, as if wrongly used."""
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
