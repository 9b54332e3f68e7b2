"""Questions to the brokers, asked again while the answer is an error that passes by itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Final, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, ConfigResource, TopicDescription

from kafka_marshal.adapters.kafka.admin_client import SharedAdmin
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
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import TopicPartition
from kafka_marshal.rights import grant

T = TypeVar("T")
K = TypeVar("K")

#: Wait between two tries of what passes by itself.
RETRY_S = 0.05

#: The longest wait before a question whose connection broke is asked again: they get longer, with jitter.
LONGEST_RETRY_S = 1.0

#: A leader's answer if no message is as late as was asked for.
_NO_SUCH_OFFSET: Final = -1

#: The broker is not the leader (any more), or became leader again since the metadata was fetched.
_LEADER_CODES = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    }
)

#: The connection broke, or one answer did not come: what only asks is asked again, on another connection.
_BROKEN_CODES = frozenset({KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})

#: How long one metadata request may take in between.
METADATA_S = 2.0

#: A future that librdkafka should have ended by its own timeout gets this much grace.
GRACE_S = 1.0

#: A wait for an answer looks up this often: for what librdkafka says of its connections.
LOOK_S = 0.1

#: A client that was refused (wrong password, wrong certificate) waits this long for another broker to accept it.
REFUSED_S = 2.0


class _NoLeadersError(Exception):
    """librdkafka found no leader for any partition: unknown, new, forbidden or unreachable. It does not say which."""


class Questions:
    """What a cluster asks the brokers by way of its AdminClient. Any thread may ask."""

    def __init__(self, admin: SharedAdmin, bootstrap: str, troubles: Troubles) -> None:
        self._admin = admin
        self._bootstrap = bootstrap
        self._troubles = troubles
        #: topic → until when, by the monotonic clock, librdkafka is taken to know its leaders.
        self._leaders_known: dict[str, float] = {}

    def describe(self, names: list[str], timeout_s: float) -> dict[str, TopicDescription]:
        """The topics among names that exist."""
        if not names:
            return {}

        def ask(admin: AdminClient, left_s: float) -> dict[str, TopicDescription]:
            return self.known(admin.describe_topics(TopicCollection(names), request_timeout=left_s), left_s)

        return self.ask(f"looking up {_some(names)}", timeout_s, ask)

    def ask_leaders(
        self,
        doing: str,
        partitions: Iterable[TopicPartition],
        timeout_s: float,
        ask: Callable[[AdminClient, list[TopicPartition], float], dict[TopicPartition, T]],
        *,
        changing: bool = False,
    ) -> dict[TopicPartition, T]:
        """Ask the partitions' leaders; look again for those that librdkafka does not know, for they may be new."""
        keys = sorted(set(partitions))
        doing = f"{doing} {_some(keys)}"
        deadline = time.monotonic() + timeout_s
        self._have_leaders_known(doing, sorted({name for name, _ in keys}), timeout_s)

        def ask_for(wanted: list[TopicPartition]) -> dict[TopicPartition, T]:
            if not wanted:
                return {}
            try:
                left_s = deadline - time.monotonic()
                return self.ask(doing, left_s, lambda admin, left_s: ask(admin, wanted, left_s), changing=changing)
            except _NoLeadersError:
                return {}

        def refresh(admin: AdminClient, left_s: float) -> list[TopicPartition]:
            """Have the metadata fetched, which librdkafka otherwise keeps for minutes; what of the missing is there."""
            listing = admin.list_topics(timeout=left_s).topics
            return [
                (name, number) for name, number in missing if name in listing and number in listing[name].partitions
            ]

        found = ask_for(keys)
        missing = [key for key in keys if key not in found]
        if missing:
            there = self.ask(doing, deadline - time.monotonic(), refresh)
            # A listing omits what we may not see; asked by name, the broker reports that it is forbidden.
            absent = {name for name, _ in missing} - {name for name, _ in there}
            self.describe(sorted(absent), deadline - time.monotonic())
            found |= ask_for(there)
        return found

    def _have_leaders_known(self, doing: str, names: list[str], timeout_s: float) -> None:
        """Have librdkafka fetch the metadata of these topics, unless it has just been.

        ListOffsets and DeleteRecords look for leaders on the caller's thread. If they are not known, metadata that
        arrives at that moment ends the search on another thread, and the caller's crashes the process (librdkafka
        2.x, rd_kafka_topic_partition_list_query_leaders_async).
        """
        now = time.monotonic()
        names = [name for name in names if self._leaders_known.get(name, now) <= now]
        if not names:
            return

        def ask(admin: AdminClient, left_s: float) -> dict[str, TopicDescription]:
            return self.known(admin.describe_topics(TopicCollection(names), request_timeout=left_s), left_s)

        for name in self.ask(doing, timeout_s, ask):
            self._leaders_known[name] = now + self._admin.metadata_age_s / 3

    def ask(
        self,
        doing: str,
        timeout_s: float,
        ask: Callable[[AdminClient, float], T],
        *,
        changing: bool = False,
        needs: str = "",
    ) -> T:
        """Ask, again and again while the answer is one that passes by itself, until the time is up.

        needs: the right that it takes (``rights.grant``), if the answer does not say so.
        """
        deadline, pause_s = time.monotonic() + timeout_s, RETRY_S
        while True:
            with self._admin.use() as admin:
                left_s = max(0.001, deadline - time.monotonic())
                try:
                    return ask(admin, left_s)
                except KafkaException as error:
                    self.serve()
                    code = kafka_error(error).code()
                    if code == KafkaError._NOENT:
                        raise _NoLeadersError from error
                    is_broken = code in _BROKEN_CODES and not changing
                    pause_s = min(pause_s * random.uniform(1.5, 2.5), LONGEST_RETRY_S) if is_broken else RETRY_S
                    if not (is_broken or code in RETRY_CODES) or deadline - time.monotonic() < pause_s:
                        raise marshal_error(
                            error, doing, self._bootstrap, self._troubles, changing=changing, needs=needs
                        ) from error
                    if code in _LEADER_CODES:
                        self._fetch_metadata(admin, deadline - time.monotonic())
                finally:
                    self.serve()
            time.sleep(pause_s)

    @staticmethod
    def _fetch_metadata(admin: AdminClient, left_s: float) -> None:
        """librdkafka asks by the leader epoch that it knows, and keeps that for minutes: all tries would end alike."""
        with suppress(KafkaException):  # the next try says what is wrong
            admin.list_topics(timeout=min(left_s, METADATA_S))

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
        for at, found in self.known(answers, timeout_s).items():
            offset: int = found.offset
            if offset < (_NO_SUCH_OFFSET if or_none else 0):
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


def _topic_of(key: object) -> str:
    """The topic that an answer is about."""
    if isinstance(key, ConfigResource):
        return str(key.name)
    return key.topic if isinstance(key, KafkaPartition) else str(key)


def _some(names: list[Any]) -> str:
    """A few of the names, for an error message."""
    texts = [name if isinstance(name, str) else f"{name[0]} [{name[1]}]" for name in names[:3]]
    return ", ".join(texts) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
