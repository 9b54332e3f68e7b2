"""Operations on coordinated groups (G2, G19-G21). All of them block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from shlex import quote
from types import MappingProxyType

from kafka_marshal.admin.aside import open_again
from kafka_marshal.admin.positions import Move, moves_to
from kafka_marshal.admin.session import Asked, Session, in_own_name, wrong_kind
from kafka_marshal.client.view import holdings
from kafka_marshal.engine.work.copies import Aside
from kafka_marshal.errors import AdminError, ConfigurationError, GroupPausedError
from kafka_marshal.observe.checkpoint_words import repeated_text
from kafka_marshal.observe.text import count
from kafka_marshal.ports import TopicPartition
from kafka_marshal.types import LeaseInfo
from rationalizer import (
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    Group,
    InvalidRecordError,
    LeaveGroup,
    Member,
    Settings,
    codes,
)
from rationalizer.levels import GROUPS_LEVEL
from rationalizer.limits import MAX_COMMIT_ENTRIES, MAX_METADATA_BYTES, MAX_WRITTEN_BYTES

#: The most bytes of an entry without its topic, with room for the ids.
_ENTRY_BYTES = 64

#: Why messages that wait for their next try are set aside for a moment; it stays if we are killed in between.
_AWAITED = "it waited for its next try"


def check_settings(settings: Mapping[str, object]) -> ConfigureGroup:
    """The record for these settings (without ids). Raises ConfigurationError for invalid settings."""
    known = [field.name for field in fields(Settings)]
    for name in settings:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
            raise ConfigurationError(f"a group has no setting {name!r}: {hint} Nothing was changed")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    try:
        return ConfigureGroup("i", "c", "g", tuple(values.items()))  # type: ignore[arg-type]  # it checks itself
    except (InvalidRecordError, TypeError) as error:
        raise ConfigurationError(f"{dict(settings)!r} can't be set. {error}") from error


def configure(session: Session, settings: Mapping[str, object]) -> Settings:
    """Set these in every CP, which creates a coordinated group if it is unknown; returns all settings."""
    record = ConfigureGroup(*session.ids, check_settings(settings).settings)
    with session.locked():
        if session.kind() == "claimed":
            raise wrong_kind(session.group_id, "claimed")
        low = [cp for cp in session.cps if session.worlds[cp].level < GROUPS_LEVEL]
    if low:
        raise AdminError(
            f"partition(s) {low} of the coordination topic are below level {GROUPS_LEVEL} of the protocol, which "
            "coordinated groups need. Nothing was changed. Raise the topic first: kafka-marshal upgrade"
        )
    # Home first: what it refuses is marked nowhere.
    answers = session.ask((session.home, record))
    _check_configured(session, answers)
    answers = session.ask(*((cp, record) for cp in session.cps if cp != session.home))
    _check_configured(session, answers)
    with session.locked():
        group = session.group()
        return Settings() if group is None else group.settings


def _check_configured(session: Session, answers: Sequence[Asked]) -> None:
    for asked in answers:
        code = None if asked.outcome is None else asked.outcome.code
        where = f"partition {asked.cp} of the coordination topic"
        if asked.pause is not None and code == codes.PAUSED:
            raise GroupPausedError(
                f"group {session.group_id!r} is paused by {asked.pause.client_id!r}: its settings can't be changed "
                f"until that ends. Do it again then, or end a dead admin's pause: kafka-marshal release-group "
                f"{quote(session.group_id)} --resume",
                client_id=asked.pause.client_id,
                expires=asked.pause.expires,
            )
        if code == codes.WRONG_KIND:
            raise wrong_kind(session.group_id, "claimed")
        if code is None:
            raise AdminError(f"{where} did not show the settings in time; they may be written or not. Do it again")
        if not asked.accepted:
            raise AdminError(f"{where} rejected the settings ({code}). Nothing was changed there")


def member_of(session: Session, client_id: str) -> tuple[Group, Member]:
    """The member of this client_id; call under ``locked()``. Raises AdminError if there is none."""
    group = session.group()
    member = None if group is None else group.clients.get(client_id)
    if group is None or member is None:
        raise AdminError(
            f"{client_id!r} is no member of group {session.group_id!r}. Nothing was changed. kafka-marshal group "
            f"{quote(session.group_id)} names its members"
        )
    return group, member


def evict(session: Session, client_id: str, *, force: bool, dry_run: bool) -> list[LeaseInfo]:
    """Leave the group in a member's name; returns what it owned. dry_run: only check."""
    session.tick([session.home])
    with session.locked():
        group, member = member_of(session, client_id)
        owned = _owned(session, client_id)
        silence = session.worlds[session.home].log_time - member.last_beat
        record = LeaveGroup(member.instance_id, client_id, session.group_id, member.member_id, group.generation)
        session_ms = member.session_timeout_ms
        repeated = repeated_text(group.checkpoints)
    if 2 * silence <= session_ms and not force:
        raise AdminError(
            f"{client_id!r} beat {silence} ms ago, within half its session ({session_ms} ms), and may be alive. "
            f"Nothing was changed. End that process and wait, or force it: {repeated} then, and it joins again only "
            "when its handler has come back and three sessions have gone by"
        )
    if dry_run:
        return owned
    _, asked = session.ask((session.home, in_own_name(session, record)), (session.home, record))
    if asked.outcome is None:
        raise AdminError(
            f"the log did not show that {client_id!r} leaves in time; it may be written or not. Look at kafka-marshal "
            f"group {quote(session.group_id)}, and do it again"
        )
    if not asked.accepted:
        raise AdminError(
            f"{client_id!r} is no member any more as it was ({asked.outcome.code}): somebody was faster. Nothing was "
            "changed"
        )
    return owned


def _owned(session: Session, client_id: str) -> list[LeaseInfo]:
    found = holdings(session.worlds[session.home], session.group_id)
    return [info for info, _ in found if info.client_id == client_id]


def ask_to_leave(session: Session, client_id: str, timeout: float | None) -> list[LeaseInfo]:
    """Ask a member to finish, to commit and to leave; returns what it owned (*blocking*).

    The request is a LeaveGroup that names it under our own instance: every replica rejects it, and the member reads it.
    timeout: seconds to wait until it owns nothing; None: do not wait.
    """
    session.tick([session.home])
    with session.locked():
        group, member = member_of(session, client_id)
        owned = _owned(session, client_id)
        record = LeaveGroup(session.instance_id, client_id, session.group_id, member.member_id, group.generation)
    if session.ask((session.home, record))[0].outcome is None:
        raise AdminError(
            f"the log did not show the request to {client_id!r} in time; it may be written or not. Nothing was taken "
            "from it. Do it again"
        )
    if timeout is None:
        return owned

    def left() -> list[LeaseInfo]:
        return _owned(session, client_id)

    if not session.wait_for(lambda: not left(), session.now_ms() + timeout * 1000):
        with session.locked():
            keys = tuple(sorted({(info.topic, info.partition) for info in left()}))
        raise AdminError(
            f"{client_id!r} was asked to hand over, and owns {count(len(keys), 'partition')} still after "
            f"{timeout:g} s, such as {keys[0][0]} [{keys[0][1]}]: it finishes what it has in hand first. Nothing is "
            "lost. Wait, or look for a handler that hangs: kafka-marshal status --members",
            in_hand=keys,
        )
    return owned


def refuse_kept(group_id: str, moves: Sequence[Move]) -> None:
    """Raise AdminError if work above a new position shall stay done: setting a position drops it."""
    if kept := [move for move in moves if move.kept]:
        raise AdminError(
            f"group {group_id!r} is coordinated, and setting its positions drops what is done above them: "
            f"{', '.join(map(str, kept[:5]))}{' …' * (len(kept) > 5)}. Nothing was changed. Without keep_done "
            "(--keep-done) these offsets come again; or wait until what lies below them is done"
        )


def set_positions(
    session: Session,
    targets: Mapping[TopicPartition, int],
    metadata: Mapping[TopicPartition, str] = MappingProxyType({}),
) -> list[Move]:
    """Set each partition's position to its offset (the next to read), under our pause.

    metadata: stored with it; of other partitions it stays.
    Raises AdminError, which says what moved and what did not; a second call finishes it.
    """
    with session.locked():
        moves = moves_to(targets, session.progress)
    done: list[Move] = []
    for chunk in _chunks(moves, _ENTRY_BYTES + (MAX_METADATA_BYTES if metadata else 0)):
        (asked,) = session.ask((session.home, _record(session, chunk, metadata)))
        outcome = asked.outcome
        under_pause = asked.pause is not None and asked.pause.client_id == session.client_id
        if outcome is not None and outcome.accepted and outcome.code != codes.PARTIAL and under_pause:
            done += [replace(move, epoch=asked.offset) for move in chunk]
            continue
        why = "the log did not show it in time" if outcome is None else outcome.code
        unknown = chunk if outcome is None else []
        raise AdminError(
            f"positions of {session.group_id!r} were not moved: {why}. "
            + (f"Moved before that: {', '.join(map(str, done))}. " if done else "Nothing was moved. " * (not unknown))
            + ("The rest may be moved or not. " if unknown else "")
            + "Do it again"
            + (" once its members have left (kafka-marshal group names them)" if why == codes.GROUP_ACTIVE else ""),
            moved=[move.key for move in done],
            unknown=[move.key for move in unknown],
        )
    return done


def set_around(
    session: Session,
    targets: Mapping[TopicPartition, int],
    some: Mapping[TopicPartition, Sequence[Aside]],
    metadata: Mapping[TopicPartition, str] = MappingProxyType({}),
    passed: Callable[[str], object] = str,
) -> None:
    """Set positions, and open messages around them, under our pause. Raises AdminError as ``set_positions`` does.

    A position that is set leaves below it what is set aside, so all of that is, first (G21). Then it is opened again.
    """
    below = {key: [each for each in found if each.first < targets[key]] for key, found in some.items()}
    if first := {key: found[0].first for key, found in below.items() if found}:
        set_positions(session, dict.fromkeys(first, 0))  # nothing is left of an earlier run
        set_positions(session, first)
        for key, found in below.items():
            open_again(session, key, [each._replace(reason=each.reason or _AWAITED) for each in found])
        passed("set aside")
    set_positions(session, targets, metadata)
    for key, wanted in some.items():
        open_again(session, key, [each for each in wanted if each.reason is None or each.first >= targets[key]])


def _record(session: Session, moves: Sequence[Move], metadata: Mapping[TopicPartition, str]) -> CommitOffsets:
    entries = tuple(
        CommitEntry(move.topic, move.partition, through=move.last_offset, metadata=metadata.get(move.key))
        for move in moves
    )
    return CommitOffsets(*session.ids, "", 0, False, entries)


def _chunks(moves: list[Move], entry_bytes: int) -> list[list[Move]]:
    """The fewest possible records: each partition moves in one record, usually all of them together."""
    size = sum(len(move.topic.encode()) + entry_bytes for move in moves)
    if len(moves) <= MAX_COMMIT_ENTRIES and size <= MAX_WRITTEN_BYTES:
        return [moves] if moves else []
    half = len(moves) // 2
    return [*_chunks(moves[:half], entry_bytes), *_chunks(moves[half:], entry_bytes)]
