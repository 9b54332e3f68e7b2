"""A Kafka to test against.

The order of choice for fixtures, tests and benchmarks:

1. ``KAFKA_MARSHAL_TEST_BOOTSTRAP=host:port``: a running Kafka. Tests create and delete topics on it, but never stop
   it. ``KAFKA_MARSHAL_BOOTSTRAP``, which names an operator's cluster, has no effect here.
2. A container, if an engine answers and the extra ``[containers]`` is installed.
3. A local broker.

``KAFKA_MARSHAL_BROKER=native`` or ``=container`` decides between the last two.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from kafka_marshal import arguments
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError
from kafka_marshal.testing.broker import LocalCluster
from kafka_marshal.testing.errors import LocalBrokerError

#: Environment variable with a Kafka for tests. Never the operator's, as tests delete topics.
TEST_BOOTSTRAP = "KAFKA_MARSHAL_TEST_BOOTSTRAP"


class RunningKafka(Protocol):
    """The interface of every Kafka to test against: :class:`LocalCluster`, a container's, or an external one."""

    @property
    def bootstrap_servers(self) -> str:
        """``host:port``, several with commas."""

    @property
    def client_config(self) -> dict[str, object]:
        """librdkafka properties that clients need besides bootstrap.servers."""

    @property
    def broker_ids(self) -> tuple[int, ...]:
        """The brokers' ids, ascending."""

    def kill(self, broker_id: int = 1) -> None:
        """Kill it with -9."""

    def pause(self, broker_id: int = 1) -> None:
        """Let it hang."""

    def resume(self, broker_id: int = 1) -> None:
        """End of the hang."""

    def restart(self, broker_id: int = 1) -> None:
        """Same ports, same data."""

    def log_tail(self, broker_id: int = 1, lines: int = 40) -> str:
        """What a broker said last."""

    def check(self) -> None:
        """Raise BrokerDiedError if a broker ended by itself."""

    def stop(self) -> None:
        """End what this object started."""


class ExternalKafka:
    """An external Kafka, which can be used but not killed."""

    def __init__(self, bootstrap_servers: str, *, timeout_s: float = 10.0) -> None:
        """Check that it answers.

        Raises:
            KafkaUnavailableError: it does not, within timeout_s.
        """
        self.bootstrap_servers = bootstrap_servers
        self.client_config: dict[str, object] = {}
        ids = Probe(bootstrap_servers).broker_ids(timeout_s)
        if not ids:
            raise KafkaUnavailableError(
                f"{TEST_BOOTSTRAP}={bootstrap_servers} does not answer within {timeout_s:.0f} s. Nothing was "
                "started or sent. Start that Kafka, correct the address, or unset the variable to have a local broker "
                "started."
            )
        self.broker_ids: tuple[int, ...] = tuple(sorted(ids))

    def kill(self, broker_id: int = 1) -> None:
        """Refused."""
        self._refuse("killed")

    def pause(self, broker_id: int = 1) -> None:
        """Refused."""
        self._refuse("paused")

    def resume(self, broker_id: int = 1) -> None:
        """Refused."""
        self._refuse("resumed")

    def restart(self, broker_id: int = 1) -> None:
        """Refused."""
        self._refuse("restarted")

    def log_tail(self, broker_id: int = 1, lines: int = 40) -> str:
        """We don't see its log."""
        return ""

    def check(self) -> None:
        """Nothing: we started no process."""

    def stop(self) -> None:
        """Nothing: we started no process."""

    def _refuse(self, what: str) -> None:
        raise LocalBrokerError(
            f"{self.bootstrap_servers} is not ours and is not {what} from here. It was left alone. Use LocalBroker or "
            f"LocalCluster, or unset {TEST_BOOTSTRAP}."
        )


def open_kafka(
    brokers: int = 1,
    *,
    port: int | None = None,
    keep: str | os.PathLike[str] | None = None,
    properties: Mapping[str, str] | None = None,
    controllable: bool = False,
    progress: Callable[[str], None] | None = None,
    start_timeout_s: float | None = None,
) -> RunningKafka:
    """A Kafka that answers, by the order of choice above. Call its stop() at the end.

    Args:
        brokers: their number, if started here.
        port: of the first broker, if started here.
        keep: folder for the data; native brokers only, so it rules out a container.
        properties: further broker settings, if started here.
        controllable: start a new one, as it will be killed or paused, or as the caller wants a new one.
        progress: called with lines of text during the start.
        start_timeout_s: how long it may take to answer; None: the default of LocalCluster or the container.

    Raises:
        LocalBrokerError: (or a subclass) none could be started.
        KafkaUnavailableError: the one named does not answer.
    """
    arguments.a_whole("brokers", brokers, 1)
    named = os.environ.get(TEST_BOOTSTRAP)
    if named and not controllable:
        return ExternalKafka(named)
    wish = os.environ.get("KAFKA_MARSHAL_BROKER", "").strip().lower()
    if wish not in ("", "native", "container"):
        raise ConfigurationError(
            f"KAFKA_MARSHAL_BROKER={wish!r} is neither 'native' nor 'container'. Nothing was started."
        )
    if wish != "native" and keep is None:
        from kafka_marshal.testing import container

        if wish == "container" or container.engine_answers():
            try:
                if progress is not None:
                    progress("starting a container; its image is pulled the first time")
                return container.ContainerCluster(
                    brokers, port=port, properties=properties, start_timeout_s=start_timeout_s or 120.0
                ).start()
            except LocalBrokerError as error:
                if wish == "container":
                    raise
                sys.stderr.write(f"kafka-marshal: {error} A native broker is started instead.\n")
    return LocalCluster(
        brokers,
        port=port,
        keep=keep,
        properties=properties,
        start_timeout_s=start_timeout_s or 60.0,
        progress=progress,
    ).start()


def run_broker(
    port: int | None,
    brokers: int,
    keep: Path | None,
    announce: Callable[[RunningKafka], None],
    *,
    stop: threading.Event | None = None,
    progress: Callable[[str], None] | None = None,
    start_timeout_s: float | None = None,
) -> None:
    """Run a Kafka until Ctrl-C, SIGTERM or stop; what ``kafka-marshal broker`` does.

    Ctrl-C during the start raises KeyboardInterrupt; nothing is left running.

    Args:
        port: of the first broker; None: a free one.
        brokers: their number.
        keep: folder for the data; None: it is removed at the end.
        announce: called once, when it answers.
        stop: ends it from another thread.
        progress: as for open_kafka.
        start_timeout_s: as for open_kafka.

    Raises:
        LocalBrokerError: (or a subclass) it could not be started, or a broker died.
    """
    done = stop or threading.Event()
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: done.set()) if in_main else None
    kafka = None
    try:
        kafka = open_kafka(
            brokers, port=port, keep=keep, controllable=True, progress=progress, start_timeout_s=start_timeout_s
        )
        with contextlib.suppress(KeyboardInterrupt):
            announce(kafka)
            while not done.wait(0.5):
                kafka.check()
    finally:
        if kafka is not None:
            kafka.stop()
        if in_main:
            signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
