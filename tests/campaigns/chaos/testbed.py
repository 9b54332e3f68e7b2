"""The testbed of a campaign: brokers behind proxies, topics, a writer of messages, and their faults."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from random import Random
from types import TracebackType
from typing import Self

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.errors import MarshalError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.ports import Ack
from kafka_marshal.testing.broker import LocalCluster
from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.proxy import Direction, TcpProxy

__all__ = ["COORDINATION", "Ground", "Writer"]

COORDINATION = "__marshal"

#: Time-out of requests to the broker without faults.
PATIENCE_S = 30.0

#: Messages of a burst, and how many times as many are written singly in between.
BURST = 60
BURST_EVERY = 3


class Ground:
    """One broker or three, each behind a proxy. ``fault`` breaks something for a while; any thread may call it."""

    def __init__(self, brokers: int, coordination_partitions: int, topics: Mapping[str, int], rng: Random) -> None:
        self.counts: Counter[str] = Counter()
        #: (name, begin, end) of all faults (wall clock, ms).
        self.outages: list[tuple[str, float, float]] = []
        self._count = brokers
        self._coordination_partitions = coordination_partitions
        self._topics = dict(topics)
        self._rng = rng
        self._stack = ExitStack()
        self._proxies: list[TcpProxy] = []
        self._cluster: LocalCluster | None = None
        self._fault: threading.Thread | None = None
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        try:
            self._proxies = [self._stack.enter_context(TcpProxy()) for _ in range(self._count)]
            advertised = {i + 1: proxy.port for i, proxy in enumerate(self._proxies)}
            cluster = self._stack.enter_context(LocalCluster(self._count, advertised_ports=advertised))
            for i, proxy in enumerate(self._proxies):
                proxy.target_port = cluster.port_of(i + 1)
            self._cluster = cluster
            kafka = KafkaCluster(self.bootstrap)
            try:
                create_topic(kafka, COORDINATION, self._coordination_partitions, PATIENCE_S)
            finally:
                kafka.close()
            probe = Probe(self.bootstrap)
            for topic, partitions in self._topics.items():
                probe.create_topic(topic, partitions, min(3, self._count), {})
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._fault is not None:
            self._fault.join(60)
        self._stack.close()

    @property
    def bootstrap(self) -> str:
        """The proxies' addresses, for clients."""
        assert self._cluster is not None
        return self._cluster.bootstrap_servers

    # What goes wrong.

    def fault(self, heartbeat_interval_s: float, *, brokers: bool) -> bool:
        """Begin a fault of the network or (brokers) of a broker; False if another one is active."""
        if self._fault is not None and self._fault.is_alive():
            return False
        self.check()
        kind = "broker" if brokers else self._rng.choice(("cut", "delay", "lost acks", "lost requests", "split"))
        proxy = self._rng.randrange(self._count)
        lasts = heartbeat_interval_s * self._rng.uniform(0.2, 3.0)
        self._fault = threading.Thread(target=self._run, args=(kind, proxy, lasts), daemon=True)
        self._fault.start()
        return True

    def _run(self, kind: str, which: int, lasts: float) -> None:
        began = time.time() * 1000
        proxy = self._proxies[which]
        try:
            match kind:
                case "broker":
                    assert self._cluster is not None
                    self._cluster.kill(which + 1)
                    time.sleep(lasts)
                    self._cluster.restart(which + 1)
                case "cut":
                    proxy.cut()
                case "delay":
                    proxy.delay(min(lasts, 1.0) * 0.2)
                case "lost acks":
                    proxy.black_hole(Direction.TO_CLIENT)
                case "lost requests":
                    proxy.black_hole(Direction.TO_BROKER)
                case "split":
                    proxy.black_hole()
            if kind != "broker":
                time.sleep(lasts)
                if kind in ("lost acks", "split"):
                    proxy.cut()  # answers sent meanwhile never arrive
                proxy.restore()
        except (LocalBrokerError, OSError) as error:  # raised by check(), in the thread that can react to it
            self._failure = error
        self.counts[kind] += 1
        self.outages.append((kind, began, time.time() * 1000))

    def check(self) -> None:
        """Raise an error of a fault itself."""
        if self._failure is not None:
            raise self._failure

    def heal(self) -> None:
        """Wait for the end of an active fault."""
        if self._fault is not None:
            self._fault.join(60)
        self.check()


class Writer:
    """A thread that writes numbered messages to topics, evenly, and records acknowledgements."""

    def __init__(self, bootstrap: str, topics: Mapping[str, int], messages_a_second: float) -> None:
        #: (topic, partition) → offset → acknowledged number.
        self.acknowledged: dict[tuple[str, int], dict[int, int]] = {
            (topic, partition): {} for topic, count in topics.items() for partition in range(count)
        }
        self.written = 0
        self.refused = 0
        self._cluster = KafkaCluster(bootstrap)
        self._appenders = {topic: self._cluster.appender(topic, delivery_timeout_ms=60_000) for topic in topics}
        self._places = sorted(self.acknowledged)
        self._pause_s = 1.0 / messages_a_second
        self._end = threading.Event()
        self._failure: MarshalError | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = time.monotonic()
        try:
            while not self._end.is_set():
                # Sometimes a burst for one partition: its holder has many messages in flight when a fault occurs.
                burst = BURST if self.written % (BURST_EVERY * BURST) < len(self._places) else 1
                due = max(due + burst * self._pause_s, time.monotonic() - 1.0)
                place = self._places[self.written % len(self._places)]
                for _ in range(burst):
                    self._write(*place)
                self._end.wait(max(0.0, due - time.monotonic()))
        except MarshalError as error:
            self._failure = error

    def _write(self, topic: str, partition: int) -> None:
        number = self.written
        self.written += 1

        def answered(ack: Ack) -> None:
            if ack.error is not None:
                self.refused += 1
            elif ack.offset is not None:
                self.acknowledged[topic, partition][ack.offset] = number

        self._appenders[topic].append(partition, str(number).encode(), answered)
        for appender in self._appenders.values():
            appender.poll()

    def close(self) -> None:
        """Stop writing and wait for acknowledgements. Raises the thread's error."""
        self._end.set()
        self._thread.join(30)
        try:
            for appender in self._appenders.values():
                appender.flush(60.0)
        finally:
            for appender in self._appenders.values():
                appender.close()
            self._cluster.close()
        if self._failure is not None:
            raise self._failure
