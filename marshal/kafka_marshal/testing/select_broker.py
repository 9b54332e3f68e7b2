"""A Kafka to test against.

The order of choice for fixtures, tests and benchmarks:

1. ``KAFKA_MARSHAL_TEST_BOOTSTRAP=host:port``: a running Kafka. Tests create and delete topics on it, but never stop
   it. ``KAFKA_MARSHAL_BOOTSTRAP``, which names an operator's cluster, has no effect here.
2. A container, if an engine answers and the extra ``[containers]`` is installed.
3. A local broker.

``KAFKA_MARSHAL_BROKER=native`` or ``=container`` decides between the last two.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from kafka_marshal import arguments
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError
from kafka_marshal.testing.broker import LocalCluster
from kafka_marshal.testing.errors import BrokerDiedError, LocalBrokerError
from kafka_marshal.testing.jars import KAFKA_VERSION
from kafka_marshal.testing.layout import common_settings, free_ports

if TYPE_CHECKING:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.network import Network

_CLIENT_PORT = 9092
_INTERNAL_PORT = 29092
_CONTROLLER_PORT = 29093


def engine_answers() -> bool:
    """Whether testcontainers is installed and finds a container engine that answers."""
    if importlib.util.find_spec("testcontainers") is None:
        return False
    from testcontainers.core.docker_client import DockerClient

    try:
        client = DockerClient().client
    except Exception:  # noqa: BLE001 - many kinds, all of which mean that there is no engine
        return False
    try:
        return bool(client.ping())
    except Exception:  # noqa: BLE001
        return False
    finally:
        client.close()


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Broker settings as environment variables, by the image's rule: ``a.b`` → KAFKA_A_B, _ → __, - → ___."""
    return {
        "KAFKA_" + name.replace("_", "__").replace("-", "___").replace(".", "_").upper(): value
        for name, value in settings.items()
    }


class ContainerCluster:
    """Like :class:`~kafka_marshal.testing.LocalCluster`, in containers, through testcontainers.

    Needs the extra ``kafka-marshal[containers]``. testcontainers' reaper removes the containers when this process is
    gone. The image (``KAFKA_MARSHAL_IMAGE``, by default Kafka's own of the version that runs natively too) is
    configured by environment variables made from the same settings as the native broker's.
    """

    def __init__(
        self,
        brokers: int = 1,
        *,
        port: int | None = None,
        properties: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        """As for LocalCluster; start_timeout_s does not count the time to pull the image."""
        self.broker_ids: tuple[int, ...] = tuple(range(1, brokers + 1))
        self.client_config: dict[str, object] = {}
        self._ports = [port + i for i in range(brokers)] if port is not None else free_ports(brokers)
        self._properties = dict(properties or {})
        self._start_timeout_s = start_timeout_s
        self._image = os.environ.get("KAFKA_MARSHAL_IMAGE") or f"apache/kafka:{KAFKA_VERSION}"
        self._host = "localhost"
        self._network: Network | None = None
        self._containers: dict[int, DockerContainer] = {}

    @property
    def bootstrap_servers(self) -> str:
        """What clients connect to."""
        return ",".join(f"{self._host}:{port}" for port in self._ports)

    def start(self) -> Self:
        """Start all brokers and wait until each of them answers and knows all the others.

        Raises:
            LocalBrokerError: the engine refused, the image is unavailable, or a broker died. Nothing is left.
        """
        if importlib.util.find_spec("testcontainers") is None:
            raise LocalBrokerError(
                "KAFKA_MARSHAL_BROKER=container needs the extra: pip install 'kafka-marshal[containers]'. Nothing was "
                "started."
            )
        try:
            with self._mapped("start"):
                self._start_containers()
            self._wait_until_up(set(self.broker_ids))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Remove the containers and their data."""
        containers, self._containers = self._containers, {}
        network, self._network = self._network, None
        with self._mapped("remove"):
            for container in containers.values():
                container.stop()
            if network is not None:
                network.remove()

    def kill(self, broker_id: int = 1) -> None:
        """Kill it with -9. Its data stays; :meth:`restart` brings it back."""
        self._do(broker_id, "kill")

    def pause(self, broker_id: int = 1) -> None:
        """Freeze it: it keeps its connections but does not answer."""
        self._do(broker_id, "pause")

    def resume(self, broker_id: int = 1) -> None:
        """End of :meth:`pause`."""
        self._do(broker_id, "unpause")

    def restart(self, broker_id: int = 1) -> None:
        """Restart it with the same ports and data; wait until it answers."""
        self._do(broker_id, "restart")
        self._wait_until_up({broker_id})

    def log_tail(self, broker_id: int = 1, lines: int = 40) -> str:
        """The last lines that a broker printed."""
        if broker_id not in self._containers:
            return ""
        with self._mapped("read the log of"):
            said: bytes = self._containers[broker_id].get_wrapped_container().logs(tail=lines)
        return "\n".join(f"  {line}" for line in said.decode(errors="replace").splitlines())

    def check(self) -> None:
        """Raise BrokerDiedError if a broker ended unexpectedly."""
        for broker_id, container in self._containers.items():
            with self._mapped("look at"):
                wrapped = container.get_wrapped_container()
                wrapped.reload()
            if wrapped.status in ("exited", "dead"):
                raise BrokerDiedError(
                    f"Broker {broker_id} ended in its container ({wrapped.status}). It said last:\n"
                    f"{self.log_tail(broker_id)}"
                )

    def _start_containers(self) -> None:
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.docker_client import DockerClient
        from testcontainers.core.network import Network

        self._host = DockerClient().host()
        self._network = Network().create()
        cluster_id = "a" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        for broker_id, port in zip(self.broker_ids, self._ports, strict=True):
            settings = {**self._settings(broker_id, port), **self._properties}
            container = DockerContainer(self._image, env={"CLUSTER_ID": cluster_id, **environment(settings)})
            container.with_network(self._network).with_network_aliases(f"kafka-{broker_id}")
            container.with_bind_ports(_CLIENT_PORT, port)
            self._containers[broker_id] = container
            container.start()

    def _settings(self, broker_id: int, port: int) -> dict[str, str]:
        return {
            **common_settings(len(self.broker_ids)),
            "node.id": str(broker_id),
            "controller.quorum.voters": ",".join(f"{i}@kafka-{i}:{_CONTROLLER_PORT}" for i in self.broker_ids),
            "listeners": f"CLIENT://:{_CLIENT_PORT},INTERNAL://:{_INTERNAL_PORT},CONTROLLER://:{_CONTROLLER_PORT}",
            "advertised.listeners": f"CLIENT://{self._host}:{port},INTERNAL://kafka-{broker_id}:{_INTERNAL_PORT}",
        }

    def _wait_until_up(self, wanted: set[int]) -> None:
        until = time.monotonic() + self._start_timeout_s
        for broker_id in sorted(wanted):
            address = f"{self._host}:{self._ports[broker_id - 1]}"
            probe = Probe(address, self.client_config)
            while not wanted <= (probe.broker_ids(2.0) or set()):
                self.check()
                if time.monotonic() >= until:
                    raise BrokerDiedError(
                        f"Broker {broker_id} did not answer on {address} within {self._start_timeout_s:.0f} s. It said "
                        f"last:\n{self.log_tail(broker_id)}"
                    )
                time.sleep(0.05)

    def _do(self, broker_id: int, what: str) -> None:
        if broker_id not in self._containers:
            raise LocalBrokerError(f"There is no running broker {broker_id}: call start() first.")
        with self._mapped(what):
            action: Callable[[], Any] = getattr(self._containers[broker_id].get_wrapped_container(), what)
            action()

    @contextlib.contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        """Convert the engine's exceptions to LocalBrokerError."""
        try:
            yield
        except LocalBrokerError:
            raise
        except Exception as error:
            raise LocalBrokerError(
                f"The container engine could not {what} a Kafka ({self._image}): {type(error).__name__}: {error}. "
                "Check the engine, or set KAFKA_MARSHAL_BROKER=native."
            ) from error


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
    if wish != "native" and keep is None and (wish == "container" or engine_answers()):
        try:
            if progress is not None:
                progress("starting a container; its image is pulled the first time")
            return ContainerCluster(
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
