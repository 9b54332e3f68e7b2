"""The base of an Admin: where its log is, and how it reads it, acts on a group, and pauses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from kafka_marshal import arguments
from kafka_marshal.adapters.opening import open_cluster
from kafka_marshal.admin.members import find_consuming, refuse_living
from kafka_marshal.admin.pause import Pause
from kafka_marshal.admin.session import Session, caught_up
from kafka_marshal.client.one_process import OneProcess
from kafka_marshal.client.options import check_log_name, says_new
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.node.config import (
    MOST_START_S,
    START_TIMEOUT_S,
    check_bootstrap,
    check_ids,
    check_threads,
    new_client_id,
)
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.serving import have_done
from kafka_marshal.ports import Cluster
from kafka_marshal.topic_names import DEFAULT_TOPIC
from kafka_marshal.types import T

#: Seconds.
DEFAULT_HEARTBEAT_INTERVAL = 3.0

#: A pause of more than a year is a mistake.
MAX_PAUSE_S = 366 * 86_400

#: A pause for one call lasts at least this long (s); it is extended while there is work.
PAUSE_S = 60.0


class AdminBase(OneProcess):
    """Base of :class:`~kafka_marshal.admin.Admin`. Each module with methods of it derives from this."""

    @says_new
    def __init__(
        self,
        bootstrap_servers: str,
        *,
        topic: str = DEFAULT_TOPIC,
        client_id: str | None = None,
        heartbeat_interval: float = DEFAULT_HEARTBEAT_INTERVAL,
        config: Mapping[str, object] | None = None,
        timeout: float = START_TIMEOUT_S,
    ) -> None:
        check_bootstrap(bootstrap_servers)
        settings = arguments.a_mapping("config", config)
        check_threads()
        self._set_up(lambda: open_cluster(bootstrap_servers, settings), topic, client_id, heartbeat_interval, timeout)

    @classmethod
    @says_new
    def on_cluster(
        cls,
        open_cluster: Callable[[], Cluster],
        *,
        topic: str = DEFAULT_TOPIC,
        client_id: str | None = None,
        heartbeat_interval: float = DEFAULT_HEARTBEAT_INTERVAL,
        timeout: float = START_TIMEOUT_S,
    ) -> Self:
        """An Admin on any implementation of Cluster; each call opens one, and closes it."""
        admin = cls.__new__(cls)
        admin._set_up(open_cluster, topic, client_id, heartbeat_interval, timeout)
        return admin

    def _set_up(
        self,
        open_cluster: Callable[[], Cluster],
        topic: str,
        client_id: str | None,
        heartbeat_interval: float,
        timeout: float,
    ) -> None:
        self.topic: str = check_log_name(topic)
        self._timeout_s = arguments.seconds("timeout", timeout, above=0, below=MOST_START_S)
        #: Unique for this Admin unless it was given.
        self.client_id: str = f"admin-{new_client_id()}" if client_id is None else client_id
        self._is_new = client_id is None
        self._open_cluster = open_cluster
        self._heartbeat_interval = heartbeat_interval
        self._heartbeat_interval_ms: int = check_ids("group", self.client_id, heartbeat_interval)

    def pause(self, group: str, expires_in: float = 300) -> Pause:
        """A pause of the group, for a ``with`` block; entering it pauses.

        ``expires_in`` (seconds): how long the group stays paused after this process has died or been idle.
        """
        self._check_group(group)
        expires_in = arguments.seconds("expires_in", expires_in, above=0, below=MAX_PAUSE_S)
        return Pause(lambda: self._open_to_pause(group), group, self.client_id, expires_in)

    # Inside.

    def _check_group(self, group: str) -> None:
        check_ids(group, self.client_id, self._heartbeat_interval)

    @contextmanager
    def _connected(self) -> Iterator[Cluster]:
        """A cluster, closed with the block. An interrupt may come anywhere in it."""
        cluster = self._open_cluster()
        try:
            yield cluster
        finally:
            cluster.close()

    def _have(self, do: Callable[[Cluster], T]) -> T:
        """Call a function with a cluster on another thread; an interrupt ends the wait only."""
        cluster = self._open_cluster()

        def done() -> T:
            try:
                return do(cluster)
            finally:
                cluster.close()

        return have_done(cluster.runtime, done)

    def _look(self, look: Callable[[Cluster, Replica], T]) -> T:
        """Call a function with a replica that has read the whole log."""
        cluster = self._open_cluster()

        def looked() -> T:
            with caught_up(cluster, self.topic, self._timeout_s) as replica:
                return look(cluster, replica)

        return have_done(cluster.runtime, looked)

    def _act(self, group: str, act: Callable[[Session], T]) -> T:
        """Call a function with its own session, on another thread; an interrupt ends the wait only."""
        cluster = self._open_cluster()
        return have_done(cluster.runtime, lambda: self._open(group, cluster).run(act))

    def _refuse_living(self, group: str, timeout: float, effect: str, remedy: str) -> None:
        """Raise AdminError if a member beats, or may still be alive after the timeout; no member is paused by this."""
        self._act(group, lambda session: refuse_living(session, timeout, effect, remedy))

    @contextmanager
    def _paused(self, group: str, timeout: float, client_id: str = "") -> Iterator[Pause]:
        """The group paused, its members gone. client_id: of a dead admin whose pause is continued."""
        length = max(PAUSE_S, 2 * timeout)
        if client_id in ("", self.client_id):
            pause = self.pause(group, length)
        else:
            pause = Pause(lambda: self._open(group, self._open_cluster(), client_id), group, client_id, length)
        with pause:
            pause.wait_released(timeout)
            yield pause

    def _open(self, group: str, cluster: Cluster, client_id: str = "") -> Session:
        return Session(
            cluster, self.topic, group, client_id or self.client_id, self._heartbeat_interval_ms, self._timeout_s
        )

    def _open_to_pause(self, group: str) -> Session:
        if not self._is_new:
            self._refuse_consumer(group)
        return self._open(group, self._open_cluster())

    def _refuse_consumer(self, group: str) -> None:
        deed = self._have(lambda cluster: find_consuming(cluster, self.topic, group, self.client_id, self._timeout_s))
        if deed is not None:
            raise ConfigurationError(
                f"client_id {self.client_id!r} is a consumer's in group {group!r}: it {deed}. Paused by it, the "
                "group's beats from that consumer would move positions. Nothing was changed. Leave client_id away, "
                "and a unique one is made"
            )

    def __repr__(self) -> str:
        return f"Admin(topic={self.topic!r}, client_id={self.client_id!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open between calls."""
