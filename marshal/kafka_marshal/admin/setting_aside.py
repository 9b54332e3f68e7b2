"""The methods of an Admin about open messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from kafka_marshal import arguments
from kafka_marshal.admin.open_messages import OpenMessage, Place, describe, messages_of
from kafka_marshal.admin.positions import check_name, lost_positions
from kafka_marshal.admin.redriving import RedrivenLetters, plan_letters, redrive_letters
from kafka_marshal.admin.session import Session, kind_in, progress_in
from kafka_marshal.admin.settling import BY_AN_OPERATOR, Settled, Wish, settle
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.client.one_process import OneProcess
from kafka_marshal.errors import AdminError, ConfigurationError
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.holes import holdings_of
from kafka_marshal.observe.names import names_of, no_group
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.topic_names import is_topic_name
from rationalizer import InvalidRecordError, SettlingMessages, route_group, route_lease
from rationalizer.limits import MAX_REASON_BYTES


class OpenMessages(OneProcess):
    """Base of :class:`~kafka_marshal.admin.Admin`: messages that are set aside, or wait for their next try."""

    topic: str
    _timeout_s: float
    _heartbeat_interval_ms: int
    _open_cluster: Callable[[], Cluster]
    _look: Callable[..., Any]
    _check_group: Callable[[str], None]
    _act: Callable[[str, Callable[[Session], Any]], Any]

    def open_messages(
        self, group: str, partitions: Iterable[TopicPartition] | None = None, *, parked: bool = False
    ) -> list[OpenMessage]:
        """The open messages of a group, sorted by topic, partition and offset; nothing is appended.

        Those that are set aside (parked), those that wait for their next try, and those in a worker's batch.
        ``partitions``: of these only. ``parked``: only those that are set aside. Keys, and the beginnings of values,
        are read from Kafka; ``gone`` says that the message is not in the topic any more, ``unread`` why nothing was
        read: if the topic was recreated, other messages have these offsets.
        Raises AdminError if the log knows no such group.
        """
        self._check_group(group)
        wanted = None if partitions is None else set(arguments.partitions("partitions", partitions))
        arguments.a_flag("parked", parked)

        def found(cluster: Cluster, replica: Replica) -> list[OpenMessage]:
            worlds = replica.worlds
            kind = kind_in(worlds, group)
            if kind is None:
                raise AdminError(no_group(group, names_of(worlds.values())))
            holdings = [
                each
                for each in holdings_of(worlds, group)
                if (wanted is None or each.key in wanted) and (each.hole.is_parked or not parked)
            ]
            home = route_group(group, len(worlds)) if kind == "coordinated" else None
            return describe(
                cluster,
                self.topic,
                list(messages_of(group, holdings)),
                lambda key: route_lease(*key, len(worlds)) if home is None else home,
                self._timeout_s,
                lost=lost_positions(cluster, {each.key for each in holdings}, partial(progress_in, worlds, group)),
            )

        return self._look(found)  # type: ignore[no-any-return]

    def redrive(
        self,
        group: str,
        messages: Iterable[Place] | Literal["all"] | None = None,
        *,
        reason: str | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Settled:
        """Free messages that were set aside: their owners handle them again, with all their tries.

        ``messages``: (topic, partition, offset) of each, or ``"all"``. ``reason``: all that were set aside for it.
        ``rate``: at most this number in a second. ``dry_run``: only return what would be done. ``progress`` is called
        with (messages settled, messages in all).
        Each is freed once, whatever other operators do; after an interruption call it again. A message that is not in
        the topic any more can't be delivered: it counts as done, and is in ``gone`` of the result.
        Raises AdminError if the log knows no such group, the topic was recreated, or the log did not answer (it says
        what was done before that).
        """
        wish = self._wish(group, messages, reason)
        if rate is not None:
            rate = arguments.a_rate("rate", rate)
        return self._settle(
            group,
            lambda session: settle(session, "redrive", wish, rate=rate, dry_run=dry_run, progress=progress),
            dry_run,
            progress,
        )

    def discard(
        self,
        group: str,
        messages: Iterable[Place] | Literal["all"] | None = None,
        *,
        reason: str | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Settled:
        """Count messages as done that were set aside, or wait for their next try: no worker gets them any more.

        ``"all"`` and ``reason`` mean those that were set aside. One in a worker's batch is discarded by that worker:
        the call waits for it. Otherwise as :meth:`redrive`. The messages stay in their topic.
        """
        wish = self._wish(group, messages, reason)
        return self._settle(
            group,
            lambda session: settle(session, "discard", wish, dry_run=dry_run, progress=progress),
            dry_run,
            progress,
        )

    def park(
        self,
        group: str,
        messages: Iterable[Place],
        *,
        reason: str = BY_AN_OPERATOR,
        dry_run: bool = False,
    ) -> Settled:
        """Set messages aside that keep failing, and wait for their next try: their keys continue without them.

        Only messages whose tries are in the log can be set aside, or that are in a worker's batch (``open_messages``
        shows them). ``reason``: at most 64 bytes.
        """
        wish = self._wish(group, messages, None)
        try:
            SettlingMessages("i", "c", "g", "t", 0, None, 0, parked=((0, 0, 0, reason),))
        except (InvalidRecordError, TypeError) as error:
            raise arguments.wrong(
                "reason", f"1 to {MAX_REASON_BYTES} bytes without control characters", reason
            ) from error
        return self._settle(
            group, lambda session: settle(session, "park", wish, reason=reason, dry_run=dry_run), dry_run, None
        )

    def redrive_letters(
        self,
        group: str,
        source: str,
        to: str,
        *,
        reason: str | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> RedrivenLetters:
        """Produce the dead letters of a group in the topic ``source`` into the topic ``to``: key, value and headers.

        Each is produced in a transaction that also says that it was, by a group ``GROUP.redrive``: for readers of
        committed messages none is there twice, and after an interruption another call continues. Copies of a letter
        are left out. ``reason``: only letters with this class of exception; later calls begin behind the others, too,
        which stay in ``source``. ``rate``, ``dry_run`` and ``progress`` as in :meth:`redrive`.
        Raises AdminError if there is no such topic, MarshalError.
        """
        self._check_group(group)
        for name, topic in (("source", source), ("to", to)):
            if not is_topic_name(arguments.text(name, topic)):
                raise arguments.wrong(name, "the name of a topic", topic)
        if reason is not None:
            arguments.text("reason", reason)
        if rate is not None:
            rate = arguments.a_rate("rate", rate)
        arguments.a_flag("dry_run", dry_run)
        cluster = self._open_cluster()
        try:
            plan = plan_letters(cluster, group, source, to, reason, self._timeout_s, progress if dry_run else None)
            if dry_run:
                return plan.found
            return redrive_letters(self._open_member, cluster, plan, rate, progress)
        finally:
            cluster.close()

    # Inside.

    def _open_member(self, group: str) -> Marshal:
        return Marshal.on_cluster(
            self._open_cluster(), group_id=group, topic=self.topic, heartbeat_interval_ms=self._heartbeat_interval_ms
        )

    def _wish(self, group: str, messages: object, reason: str | None) -> Wish:
        self._check_group(group)
        if reason is not None:
            arguments.text("reason", reason)
        if messages == "all" or (messages is None and reason is not None):
            return Wish(None, reason)
        if messages is None or reason is not None:
            raise ConfigurationError(
                "say which messages are meant: a list of (topic, partition, offset), or 'all', or reason=. Nothing was "
                "changed"
            )
        places: list[Place] = []
        for each in arguments.several("messages", messages, "(topic, partition, offset) of each, or 'all'"):
            try:
                topic, partition, offset = each
            except (TypeError, ValueError):
                raise arguments.wrong("messages", "(topic, partition, offset) of each, or 'all'", each) from None
            check_name((topic, partition))
            places.append((topic, partition, arguments.a_whole("offset", offset)))
        return Wish(tuple(places))

    def _settle(
        self,
        group: str,
        act: Callable[[Session], Settled],
        dry_run: bool,
        progress: Callable[[int, int], None] | None,
    ) -> Settled:
        arguments.a_flag("dry_run", dry_run)
        if progress is not None:
            arguments.a_function("progress", progress, "messages settled, messages there are")
        return self._act(group, act)  # type: ignore[no-any-return]
