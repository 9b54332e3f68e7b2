"""Positions imported from Kafka's own consumer groups, and exported to them (G21). All calls block.

Nothing is changed unless both sides are empty: neither the Kafka group nor the coordinated group has members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from shlex import quote
from typing import Any, Literal

from kafka_marshal import arguments
from kafka_marshal.adapters.transactions import OffsetsPendingError
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.groups import configure
from kafka_marshal.admin.pause import PauseWork
from kafka_marshal.admin.positions import LOOKUP_TIMEOUT_S, Move, lost_positions, moves_to
from kafka_marshal.admin.repositioning import set_around
from kafka_marshal.admin.session import GroupKind, kind_in, wrong_kind
from kafka_marshal.engine.work.copies import Copy, done_from
from kafka_marshal.engine.work.topic_mark import kafka_counts
from kafka_marshal.errors import AdminError, KafkaUnavailableError
from kafka_marshal.node.jobs import progress_of_all
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.stuck import offsets_held_text
from kafka_marshal.observe.text import count, listed
from kafka_marshal.ports import Cluster, KafkaGroup, TopicPartition
from rationalizer import Progress, route_group
from rationalizer.holes import Hole
from rationalizer.levels import SHARING_LEVEL
from rationalizer.limits import MAX_METADATA_BYTES

#: The progress of a partition; None: the group never had it.
ProgressOf = Callable[[TopicPartition], Progress | None]

#: What happens to open messages where there is no place for them: they come again, or count as done. None: refused.
Open = Literal["repeat", "drop"] | None


class GroupTransfers(AdminBase):
    """Methods of :class:`~kafka_marshal.admin.Admin` that move groups from Kafka, and to Kafka."""

    def import_group(
        self, group: str, *, force: bool = False, dry_run: bool = False, timeout: float = 30.0
    ) -> list[Move]:
        """Import the committed offsets of Kafka's own consumer group of that name into a coordinated group.

        Neither the Kafka group (classic or KIP-848) nor the coordinated group may have members; the latter is created
        if it is missing. Metadata of up to 255 bytes is kept. If members wrote the offsets (``mirror_offsets``, or
        since the log was harmed), open messages come along (``restored``).

        ``force``: replace positions it has already.

        ``dry_run``: only return what would be set.

        ``timeout`` (seconds): how long to wait until dead members are silent for long enough.

        Returns the moves: ``after`` is the offset to read next.

        Raises AdminError if there is nothing to import or one side is not empty, WrongKindError for a claimed group.
        """

        def planned(cluster: Cluster, replica: Replica) -> list[Move]:
            kafka = empty_kafka_group(cluster, group)
            found = progress_of_all(replica.worlds, group)
            level = replica.worlds[route_group(group, len(replica.worlds))].level
            return planned_import(group, kind_in(replica.worlds, group), kafka, found.get, level, force=force)

        return self._planned_or_done(group, planned, _import, force, dry_run, timeout)

    def export_group(
        self,
        group: str,
        *,
        force: bool = False,
        dry_run: bool = False,
        timeout: float = 30.0,
        open_messages: Open = None,
    ) -> list[Move]:
        """Commit the group's positions to Kafka's own consumer group of that name: stable + 1, never above.

        Claimed groups can be exported, too. Neither side may have members.

        ``force``: even if Kafka's offsets move back.

        ``open_messages``: Kafka's group has no place for open messages: with ``"repeat"`` they come again there, and
        all above them; with ``"drop"`` they count as done; None: AdminError if there are some.

        Lost positions (``lost``) are skipped. Returns the moves: ``before`` is Kafka's offset, ``done_ahead`` the
        number of done offsets above ``after``, which will be repeated.

        Raises AdminError if there is nothing to export or one side is not empty.
        """

        def planned(cluster: Cluster, replica: Replica) -> list[Move]:
            kafka = empty_kafka_group(cluster, group)
            found = progress_of_all(replica.worlds, group)
            return planned_export(cluster, group, kafka, found, force=force, open_messages=open_messages)

        check_open(open_messages)
        return self._planned_or_done(group, planned, _export, force, dry_run, timeout, open_messages)

    def _planned_or_done(
        self,
        group: str,
        planned: Callable[[Cluster, Replica], list[Move]],
        do: Callable[..., list[Move]],
        force: bool,
        dry_run: bool,
        timeout: float,
        *more: object,
    ) -> list[Move]:
        self._check_group(group)
        timeout = arguments.seconds("timeout", timeout)
        moves = self._look(planned)
        if dry_run:
            return moves
        self._refuse_living(group, timeout, "Nothing was changed", "Stop its members first")
        with self._paused(group, timeout) as pause:
            return pause.carry_out("move positions", do, force, *more)


def check_open(open_messages: object) -> None:
    """Raise ConfigurationError if this is none of Open."""
    if open_messages is not None:
        arguments.one_of("open_messages", open_messages, ("repeat", "drop"))


def _import(work: PauseWork, force: bool) -> list[Move]:
    """Import the committed offsets of Kafka's own group of that name, under our pause; what was set."""
    session = work.session
    work.ready()
    kafka = empty_kafka_group(session.cluster, session.group_id)
    with session.locked():
        kind = session.kind()
        level = session.worlds[session.home].level
        moves = planned_import(session.group_id, kind, kafka, session.progress, level, force=force)
    configure(session, {})  # it is a coordinated group in every CP from now on (G2)
    copies = _copies(kafka, level)
    metadata = {key: x.metadata for key, x in copies.items() if 0 < len(x.metadata.encode()) <= MAX_METADATA_BYTES}
    set_around(
        session,
        {move.key: move.after for move in moves},
        {key: x.open for key, x in copies.items() if x.open},
        metadata,
    )
    return moves


def _copies(kafka: KafkaGroup, level: int) -> dict[TopicPartition, Copy]:
    """What Kafka's group holds, as far as a log of this level can hold it."""
    copies = {key: Copy.read(*kafka.committed[key]) for key in sorted(kafka.committed)}
    return copies if level >= SHARING_LEVEL else {key: each.as_one_number for key, each in copies.items()}


def planned_import(
    group_id: str, kind: GroupKind | None, kafka: KafkaGroup, progress_of: ProgressOf, level: int, *, force: bool
) -> list[Move]:
    """What an import would set in a log of this level. Raises AdminError if it is not allowed."""
    if kind == "claimed":
        raise wrong_kind(group_id, kind)
    if not kafka.committed:
        raise AdminError(
            f"Kafka has no committed offsets of a consumer group {group_id!r}. Nothing was changed. "
            "kafka-consumer-groups --list names those there are. (On a broker with ACLs Kafka leaves out the topics "
            "on which the principal you connect as lacks the right DESCRIBE)"
        )
    copies = _copies(kafka, level)
    moves = [
        replace(
            move,
            done_ahead=move.done_ahead or copies[move.key].ahead,
            restored=tuple(each.first for each in copies[move.key].open),
        )
        for move in moves_to({key: each.position for key, each in copies.items()}, progress_of)
    ]
    known = [move for move in moves if move.before not in (None, move.after)]
    if known and not force:
        raise AdminError(
            f"group {group_id!r} has positions already, which the import would replace: "
            f"{listed([*map(str, known)], 3)}. Nothing was changed. Force it if Kafka's are the right ones"
        )
    return moves


def _export(work: PauseWork, force: bool, open_messages: Open = None) -> list[Move]:
    """Commit the group's positions to Kafka's own group of that name, under our pause; what was committed."""
    session = work.session
    work.ready()
    kafka = empty_kafka_group(session.cluster, session.group_id)
    with session.locked():
        group = session.group()
        found = progress_of_all(session.worlds, session.group_id)
        kept = {} if group is None else {key: group.kept(*key) for key in found}
        metadata = {key: each.metadata for key, each in kept.items() if each is not None and each.metadata}
    moves = planned_export(session.cluster, session.group_id, kafka, found, force=force, open_messages=open_messages)
    work.hold.check()
    offsets = {move.key: (move.after, metadata.get(move.key, "")) for move in moves if not move.lost}
    session.cluster.commit_for_group(session.group_id, offsets, LOOKUP_TIMEOUT_S)
    return moves


def planned_export(
    cluster: Cluster,
    group_id: str,
    kafka: KafkaGroup,
    found: Mapping[TopicPartition, Progress],
    *,
    force: bool,
    open_messages: Open = None,
) -> list[Move]:
    """What an export would commit: stable + 1, never above. Raises AdminError if it is not allowed.

    open_messages: whether those come again, with all above them, or count as done; None: there must be none.

    `before` is Kafka's offset, `done_ahead` the number of offsets that will be repeated. `lost` ones are skipped.
    """
    if not found:
        raise AdminError(f"group {group_id!r} has no positions here. Nothing was changed")
    refuse_transactional(
        group_id,
        found,
        "Kafka's own group of this name has the exact offsets already: begin with them. Nothing was changed",
    )
    if open_messages is None:
        refuse_open(group_id, found, lambda _: True)
    targets = {key: found[key].stable + 1 for key in sorted(found)}
    if open_messages == "repeat":
        targets = {key: min([at, *(hole.first for hole in found[key].open)]) for key, at in targets.items()}
    lost = lost_positions(cluster, targets, found.get)
    there = cluster.topic_info({topic for topic, _ in targets}, LOOKUP_TIMEOUT_S)
    lost |= {key: "there is no such topic any more" for key in targets if key[0] not in there}
    moves = [
        replace(move, before=kafka.committed.get(move.key, (None, ""))[0], **_exported(found[move.key], move.after))
        for move in moves_to(targets, found.get, lost)
    ]
    back = [move for move in moves if move.before is not None and move.before > move.after and not move.lost]
    if back and not force:
        raise AdminError(
            f"Kafka's own group {group_id!r} has committed more than is done here: "
            f"{listed([*map(str, back)], 3)}. Nothing was changed. Force it if it is to go back"
        )
    return moves


def _exported(progress: Progress, after: int) -> dict[str, Any]:
    """What is different in Kafka's own group: it knows no open messages, and nothing that is done above a position."""
    passed = tuple((hole.first, min(hole.last, after - 1)) for hole in progress.open if hole.first < after)
    return {"done_ahead": done_from(progress, after), "closed": passed, "parked": ()}


def refuse_transactional(group_id: str, found: Mapping[TopicPartition, Progress], text: str) -> None:
    """Raise AdminError if partitions are processed in transactions: the log's positions may be behind Kafka's (M8)."""
    marked = [f"{key[0]} [{key[1]}]" for key, progress in sorted(found.items()) if kafka_counts(progress)]
    if marked:
        raise AdminError(f"group {group_id!r} processes in transactions ({listed(marked, 3)}). {text}")


def refuse_open(group_id: str, found: Mapping[TopicPartition, Progress], is_left: Callable[[Hole], bool]) -> None:
    """Raise AdminError if messages are open (H1) that what they are moved to has no place for."""
    some = {key: holes for key, each in sorted(found.items()) if (holes := [x for x in each.open if is_left(x)])}
    if some:
        places = listed([f"{topic} [{partition}]" for topic, partition in some], 3)
        amount = count(sum(hole.last - hole.first + 1 for holes in some.values() for hole in holes), "open message")
        raise AdminError(
            f"group {group_id!r} has {amount} ({places}): set aside, or not finished. Nothing was "
            "changed. Finish, redrive or discard them first (kafka-marshal open-messages "
            f"{quote(group_id)} lists them). Or have them come again with what was done behind them "
            "(--open repeat), or count as done (--open drop)"
        )


def empty_kafka_group(cluster: Cluster, group_id: str) -> KafkaGroup:
    """Kafka's own group. Raises AdminError if it has members."""
    try:
        kafka = cluster.kafka_group(group_id, LOOKUP_TIMEOUT_S)
    except OffsetsPendingError as error:
        raise KafkaUnavailableError(f"{error}{offsets_held_text(cluster, group_id)}") from error
    if kafka.members:
        raise AdminError(
            f"Kafka's own consumer group {group_id!r} has members: {', '.join(kafka.members[:4])}. Nothing was "
            "changed. Stop them first; those that died are dropped by Kafka after their session timeout"
        )
    return kafka
