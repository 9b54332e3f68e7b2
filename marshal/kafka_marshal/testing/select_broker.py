"""A Kafka to test against, wherever it comes from.

The order of choice for the fixtures, our own tests and benchmarks:

1. ``KAFKA_MARSHAL_TEST_BOOTSTRAP=host:port``: a Kafka that runs already. Tests create and delete topics on it, but
   never stop it. ``KAFKA_MARSHAL_BOOTSTRAP``, which names the cluster that an operator works on, has no effect here.
2. A container, where an engine answers and the extra ``[containers]`` is installed.
3. A broker of our own, started natively.

``KAFKA_MARSHAL_BROKER=native`` or ``=container`` leaves out the choice between the last two.
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

__all__ = ["TEST_BOOTSTRAP", "ExternalKafka", "RunningKafka", "open_kafka", "run_broker"]

#: The environment variable that names a Kafka for tests. Never the operator's: tests delete topics.
TEST_BOOTSTRAP = "KAFKA_MARSHAL_TEST_BOOTSTRAP"


class RunningKafka(Protocol):
    """What every Kafka to test against offers: :class:`LocalCluster`, a container's, or somebody else's."""

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
        """End what was started here."""


class ExternalKafka:
    """A Kafka that somebody else runs: it can be used, but not killed."""

    def __init__(self, bootstrap_servers: str, *, timeout_s: float = 10.0) -> None:
        """Look whether it answers.

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
        """Nothing of ours can have died."""

    def stop(self) -> None:
        """Nothing of ours runs."""

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
    """A Kafka that answers, by the order of choice above. Call its stop() in the end.

    Args:
        brokers: how many, where we start it.
        port: of the first broker, where we start it.
        keep: folder for the data; native brokers only, so it rules out a container.
        properties: broker settings on top of ours, where we start it.
        controllable: it must be one that is started here, because it will be killed or paused, or because the caller
            asked for a new one.
        progress: called with a line of text as the start proceeds.
        start_timeout_s: how long it may take to answer; None: as LocalCluster and its like have it.

    Raises:
        LocalBrokerError: (one of its kinds) none could be started.
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

    Ctrl-C before it is up raises KeyboardInterrupt, as anywhere; nothing is left then.

    Args:
        port: of the first broker; None: a free one.
        brokers: how many.
        keep: folder for the data, None: it is removed in the end.
        announce: called once, when it answers.
        stop: ends it from another thread.
        progress, start_timeout_s: as for open_kafka.

    Raises:
        LocalBrokerError: (one of its kinds) it could not be started, or a broker died.
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
