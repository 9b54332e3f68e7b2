"""Questions to the brokers: by what client, again while an error passes by itself, and what is known."""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

from confluent_kafka import KafkaError, KafkaException, Node, TopicCollection, TopicPartitionInfo
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import (
    AdminClient,
    ClusterMetadata,
    ConfigResource,
    TopicDescription,
)

from kafka_marshal.adapters.kafka.errors import (
    RETRY_CODES,
    UNKNOWN_CODES,
    ForbiddenError,
    Troubles,
    is_forbidden,
    is_refusal,
    kafka_error,
    marshal_error,
)
from kafka_marshal.errors import ClosedError, grant
from kafka_marshal.ports import TopicInfo, TopicPartition
from kafka_marshal.secret import values_of
from kafka_marshal.types import T

K = TypeVar("K")

#: librdkafka's default of metadata.max.age.ms.
METADATA_MAX_AGE_MS = 900_000


class SharedAdmin:
    """One AdminClient for any number of threads. The last use that ends after close() destroys it.

    At a known place: librdkafka aborts the process if one of its threads destroys a client. An AdminClient left to the
    garbage collector risks that: its futures are resolved on such a thread, and a collection may start there.
    """

    def __init__(self, properties: Mapping[str, object]) -> None:
        """Connect in the background; raises what AdminClient raises."""
        self._admin = AdminClient(cast("dict[str, Any]", dict(properties)))
        #: For how long it keeps what it knows of a topic, s.
        self.metadata_age_s: float = float(str(properties.get("metadata.max.age.ms", METADATA_MAX_AGE_MS))) / 1000
        self._lock = threading.Lock()
        self._uses = 0
        self._closed = False
        # It also keeps the AdminClient out of the collector's reach.
        self._unclosed = weakref.finalize(self, _destroy_elsewhere, self._admin)
        self._unclosed.atexit = False

    @contextmanager
    def use(self) -> Iterator[AdminClient]:
        """The client, which stays alive until the block is left. Raises ClosedError after close()."""
        with self._lock:
            self.check_open()
            self._uses += 1
        try:
            yield self._admin
        finally:
            self._leave()

    def list_topics(self, *args: Any, **options: Any) -> ClusterMetadata:
        """As of an AdminClient."""
        with self.use() as admin:
            return admin.list_topics(*args, **options)

    def check_open(self) -> None:
        """Raise ClosedError after close()."""
        if self._closed:
            raise ClosedError("The cluster was closed; nothing was asked. Open a new one.")

    def _leave(self) -> None:
        with self._lock:
            self._uses -= 1
            is_last = self._closed and self._uses == 0
        if is_last:
            self._destroy()

    def close(self) -> None:
        """Destroy the client, now or when it is no longer used. Idempotent."""
        with self._lock:
            is_last = not self._closed and self._uses == 0
            self._closed = True
        if is_last:
            self._destroy()

    def _destroy(self) -> None:
        self._unclosed.detach()
        _destroy(self._admin)


def _destroy(admin: AdminClient) -> None:
    admin.__exit__(None, None, None)  # confluent-kafka has no other name for it


def _destroy_elsewhere(admin: AdminClient) -> None:
    """Of a holder that was never closed: the collector may be running on a thread of librdkafka."""
    threading.Thread(target=_destroy, args=(admin,), name="kafka-marshal-destroy", daemon=True).start()


#: Wait between two tries of what passes by itself.
RETRY_S = 0.05

#: The longest wait before a question whose connection broke is asked again: they get longer, with jitter.
LONGEST_RETRY_S = 1.0

#: The broker is not the leader (any more), or became leader again since the metadata was fetched: librdkafka keeps what
#: it knows for minutes, so that all tries would end alike. (_NOENT: it knows no leader for any partition.)
_LEADER_CODES = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError._NOENT,
    }
)

#: The connection broke, or one answer did not come: what only asks is asked again, on another connection.
_BROKEN_CODES = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})

#: A future that librdkafka should have ended by its own timeout gets this much grace.
GRACE_S = 1.0

#: The shortest time-out of a request that looks for leaders on the caller's thread. librdkafka 2.x ends the process if
#: it is over before that thread has left its function (a processor taken away for a moment will do). We wait less long.
SAFE_TIMEOUT_S = 10.0

#: A try waits this long for its answer (s), each further one twice as long: one that is lost must not take all of a
#: start's time. A question with less than twice that left waits to the end.
FIRST_TRY_S = 5.0

#: A wait for an answer looks up this often: for what librdkafka says of its connections.
LOOK_S = 0.1

#: A client that was refused (wrong password, wrong certificate) waits this long for another broker to accept it.
REFUSED_S = 2.0


class Questions:
    """What a cluster asks the brokers by way of its AdminClient. Any thread may ask."""

    def __init__(self, admin: SharedAdmin, bootstrap: str, troubles: Troubles) -> None:
        self._admin = admin
        self._bootstrap = bootstrap
        self._troubles = troubles
        #: topic → until when, by the monotonic clock, librdkafka is taken to know its leaders; its partitions.
        self._leaders_known: dict[str, tuple[float, frozenset[int]]] = {}

    def describe(self, names: list[str], timeout_s: float) -> dict[str, TopicDescription]:
        """The topics among names that exist."""
        return self.ask(f"looking up {_some(names)}", timeout_s, partial(self._described, names)) if names else {}

    def _described(self, names: list[str], admin: AdminClient, left_s: float) -> dict[str, TopicDescription]:
        found = self.known(admin.describe_topics(TopicCollection(names), request_timeout=left_s), left_s)
        self.forget_leaders(name for name, topic in found.items() if not all(map(has_leader, topic.partitions)))
        return found

    def forget_leaders(self, names: Iterable[str]) -> None:
        """What librdkafka knows of these is old, or that there is none."""
        for name in names:
            self._leaders_known.pop(name, None)

    def ask_leaders(
        self,
        doing: str,
        partitions: Iterable[TopicPartition],
        timeout_s: float,
        ask: Callable[[AdminClient, list[TopicPartition], float], dict[TopicPartition, T]],
        *,
        changing: bool = False,
    ) -> dict[TopicPartition, T]:
        """Ask the partitions' leaders; about those that are not found once more, for they may be new."""
        missing = sorted(set(partitions))
        doing, deadline = f"{doing} {_some(missing)}", time.monotonic() + timeout_s
        found: dict[TopicPartition, T] = {}

        def ask_known(admin: AdminClient, left_s: float) -> dict[TopicPartition, T]:
            until = time.monotonic() + left_s
            wanted = self._with_leaders(admin, missing, left_s)
            return ask(admin, wanted, max(0.001, until - time.monotonic())) if wanted else {}

        for _ in range(2):
            if missing := [key for key in missing if key not in found]:
                found |= self.ask(doing, deadline - time.monotonic(), ask_known, changing=changing)
            self.forget_leaders(name for name, n in missing if (name, n) not in found)
        return found

    def _with_leaders(self, admin: AdminClient, keys: list[TopicPartition], left_s: float) -> list[TopicPartition]:
        """Those whose leaders librdkafka knows; metadata is fetched for it, unless it has just been.

        ListOffsets and DeleteRecords look for leaders on the caller's thread. If one is not known, metadata that
        arrives at that moment ends the search on another thread, and the caller's crashes the process (librdkafka
        2.x, rd_kafka_topic_partition_list_query_leaders_async).
        """
        now = time.monotonic()
        names = {name for name, _ in keys}
        known = {name: x[1] for name in names if (x := self._leaders_known.get(name)) is not None and x[0] > now}
        if unknown := sorted(names - known.keys()):
            for name, topic in self._described(unknown, admin, left_s).items():
                known[name] = frozenset(each.id for each in topic.partitions if has_leader(each))
                if len(known[name]) == len(topic.partitions):
                    self._leaders_known[name] = (now + self._admin.metadata_age_s / 3, known[name])
        return [key for key in keys if key[1] in known.get(key[0], ())]

    def ask(
        self,
        doing: str,
        timeout_s: float,
        ask: Callable[[AdminClient, float], T],
        *,
        changing: bool = False,
        needs: str = "",
    ) -> T:
        """Ask, again and again while the answer is one that passes by itself, or does not come, until the time is up.

        needs: the right that it takes (``rights.grant``), if the answer does not say so.
        """
        deadline, pause_s, try_s = time.monotonic() + timeout_s, RETRY_S, FIRST_TRY_S
        while True:
            with self._admin.use() as admin:
                left_s = max(0.001, deadline - time.monotonic())
                try:
                    return ask(admin, left_s if changing or left_s < 2 * try_s else try_s)
                except KafkaException as error:
                    self.serve()
                    code = kafka_error(error).code()
                    if code in _LEADER_CODES:
                        self._leaders_known.clear()
                    is_broken = code in _BROKEN_CODES and not changing
                    pause_s = min(pause_s * random.uniform(1.5, 2.5), LONGEST_RETRY_S) if is_broken else RETRY_S
                    try_s *= 2 if code == KafkaError._TIMED_OUT else 1
                    if not (is_broken or code in RETRY_CODES | _LEADER_CODES) or deadline - time.monotonic() < pause_s:
                        raise marshal_error(
                            error, doing, self._bootstrap, self._troubles, changing=changing, needs=needs
                        ) from error
                finally:
                    self.serve()
            time.sleep(pause_s)

    def known(self, answers: Mapping[K, Future[T]], timeout_s: float, operation: str = "DESCRIBE") -> dict[K, T]:
        """The answers, without those for what does not exist; raises the first other error.

        operation: the right on each topic that it takes. ForbiddenError names all topics for which it is missing.
        """
        found = {}
        forbidden: dict[str, KafkaError] = {}
        for key, answer in answers.items():
            try:
                found[key] = self.result(answer, timeout_s)
            except KafkaException as error:
                cause = kafka_error(error)
                if is_forbidden(cause):
                    forbidden[_topic_of(key)] = cause
                elif cause.code() not in UNKNOWN_CODES:
                    raise
        if forbidden:
            raise ForbiddenError(next(iter(forbidden.values())), grant(operation, "topic", forbidden))
        return found

    def known_offsets(
        self, answers: Mapping[KafkaPartition, Future[Any]], timeout_s: float, *, or_none: bool = False
    ) -> dict[KafkaPartition, int]:
        """The offsets of these answers; or_none: -1 if there is none, as a leader answers of times after the end.

        If a connection breaks at the wrong moment, librdkafka gives an answer without an offset (-1001) and without
        an error. That is no answer: it is asked again.
        """
        offsets: dict[KafkaPartition, int] = {}
        for at, found in self.known(answers, timeout_s - GRACE_S).items():  # librdkafka may wait longer
            offset: int = found.offset
            if offset < (-1 if or_none else 0):
                lacks = f"no offset of {at.topic} [{at.partition}] in the answer: {offset}"
                raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE, lacks))
            offsets[at] = offset
        return offsets

    def result(self, answer: Future[T], timeout_s: float) -> T:
        """Wait for an answer; if refused, no longer than it takes to see that no other broker accepts us."""
        began = time.monotonic()
        while True:
            waited_s = time.monotonic() - began
            try:
                return answer.result(max(0.001, min(LOOK_S, timeout_s + GRACE_S - waited_s)))
            except FutureTimeoutError as error:
                if waited_s >= timeout_s + GRACE_S:
                    raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer in time")) from error
            self.serve()
            reason = self._troubles.recent(began)
            if reason is not None and is_refusal(reason) and waited_s >= REFUSED_S:
                raise KafkaException(reason)

    def serve(self) -> None:
        """Let librdkafka say what it has to say: log lines, and why connections failed."""
        with suppress(ClosedError), self._admin.use() as admin:
            admin.poll(0)


def has_leader(partition: TopicPartitionInfo) -> bool:
    """Whether the brokers named one."""
    leader = cast("Node | None", partition.leader)
    return leader is not None and leader.id >= 0


def _topic_of(key: object) -> str:
    """The topic that an answer is about."""
    if isinstance(key, ConfigResource):
        return str(key.name)
    return key.topic if isinstance(key, KafkaPartition) else str(key)


def _some(names: list[Any]) -> str:
    """A few of the names, for an error message."""
    texts = [name if isinstance(name, str) else f"{name[0]} [{name[1]}]" for name in names[:3]]
    return ", ".join(texts) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


#: What is older than this is useless, and dropped.
KEPT_S = 60.0


class Looks:
    """The last metadata of all topics, and of each that was described, for all members of a process. Thread-safe.

    A request creates Python objects for every partition while it holds the interpreter's lock, and so many of them that
    the garbage collector runs through the whole process again and again. With ten members and 900 partitions in one
    process everything paused for 50 ms every few seconds.
    """

    def __init__(self) -> None:
        self._listed: tuple[float, dict[str, TopicInfo]] = (float("-inf"), {})
        #: By name: when it was described last, and how (None: there was none).
        self._described: dict[str, tuple[float, TopicInfo | None]] = {}

    def topics(self, max_age_s: float) -> dict[str, TopicInfo] | None:
        """All topics, if they were listed since."""
        asked_at, found = self._listed
        return dict(found) if asked_at > time.monotonic() - max_age_s else None

    def record_topics(self, found: Mapping[str, TopicInfo], asked_at: float) -> None:
        """Store a list of topics (monotonic seconds: from when on it was valid)."""
        if asked_at > self._listed[0]:
            self._listed = (asked_at, dict(found))

    def topic_info(self, names: Iterable[str], max_age_s: float) -> dict[str, TopicInfo] | None:
        """Those of names that exist, if each was described since."""
        since = time.monotonic() - max_age_s
        described, never = self._described, (float("-inf"), None)
        found = {name: described.get(name, never) for name in names}
        if any(asked_at <= since for asked_at, _ in found.values()):
            return None
        return {name: info for name, (_, info) in found.items() if info is not None}

    def record_topic_info(self, names: Iterable[str], found: Mapping[str, TopicInfo], asked_at: float) -> None:
        """Another client described these topics; those it did not find do not exist."""
        # Replaced, never changed: others may be reading it.
        described = {name: known for name, known in self._described.items() if known[0] > asked_at - KEPT_S}
        for name in names:
            if asked_at > described.get(name, (float("-inf"), None))[0]:
                described[name] = (asked_at, found.get(name))
        self._described = described


_looks: WeakValueDictionary[Hashable, Looks] = WeakValueDictionary()


def looks_with(bootstrap: str, config: Mapping[str, object]) -> Looks:
    """Shared by all clients of this process that reach the same brokers as the same user, with the same settings."""
    try:
        key = (bootstrap, frozenset((name, value) for name, value in config.items() if name != "client.id"))
    except TypeError:  # an unhashable value: it can't be compared with another's
        return Looks()
    return _looks.setdefault(key, Looks())


#: An address that has not answered for this long counts as down, and can't mislead anyone.
ANSWER_S = 10.0

#: A wait looks up this often for what librdkafka says of its connection.
ID_LOOK_S = 0.05


class AddressCheck:
    """Which cluster each bootstrap address belongs to: each is asked on its own thread, and not awaited if it is down.

    librdkafka takes whichever address answers first. If a list names brokers of two clusters, some clients of one
    process, and some members of one group, would work on the one and the rest on the other: each log consistent in
    itself, and every partition with two owners.
    """

    def __init__(self, addresses: Sequence[str], properties: Mapping[str, object]) -> None:
        self._properties = dict(properties)
        self._ids: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._ask, args=(address,), name="kafka-marshal-address", daemon=True)
            for address in addresses
        ]
        for thread in self._threads:
            thread.start()

    def ids(self, wait_s: float) -> dict[str, str]:
        """Cluster ids by address, of those that answered within wait_s from now."""
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return dict(self._ids)

    def _ask(self, address: str) -> None:
        troubles = Troubles(secrets=values_of(self._properties))
        settings = {**self._properties, "bootstrap.servers": address, "logger": troubles, "error_cb": troubles}
        try:
            admin = AdminClient(cast("dict[str, Any]", settings))
            deadline = time.monotonic() + ANSWER_S
            while time.monotonic() < deadline and troubles.recent() is None:
                with suppress(KafkaException):  # not connected yet
                    if cluster_id := admin.cluster_id(ID_LOOK_S):
                        self._ids[address] = cluster_id
                        return
                admin.poll(0)
        except (KafkaException, ValueError, TypeError):
            return  # the cluster's own client reports the same, to a caller that can act on it
