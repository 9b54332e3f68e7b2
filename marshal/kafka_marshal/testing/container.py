"""Brokers in containers, through testcontainers, if an engine answers.

Needs the extra ``kafka-marshal[containers]``. testcontainers' reaper removes the containers when this process is
gone. The image (``KAFKA_MARSHAL_IMAGE``, by default Kafka's own of the version that runs natively too) is configured
by environment variables made from the same settings as the native broker's.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from kafka_marshal.adapters.probe import Probe
from kafka_marshal.testing.errors import BrokerDiedError, LocalBrokerError
from kafka_marshal.testing.jars import KAFKA_VERSION
from kafka_marshal.testing.layout import common_settings
from kafka_marshal.testing.ports import free_ports

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
    """Like :class:`~kafka_marshal.testing.LocalCluster`, in containers."""

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
