"""The open messages of a group: set aside (parked), waiting for their next try, or acquired; listed and settled.

Progress has passed them, or will, and they are not done all the same. Settled from outside they are freed for another
try (redrive), done without one (discard), or set aside (park). Each entry is a compare-and-set against what our replica
shows: of several operators, and of the copies of one record, one is accepted. So an operation that was interrupted
anywhere is done again, and finds what is left.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from kafka_marshal import arguments
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.positions import LOOKUP_TIMEOUT_S, check_name, lost_positions
from kafka_marshal.admin.session import Session, kind_in, never, progress_in
from kafka_marshal.errors import AdminError, ConfigurationError
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.holes import PlacedHole, PointReads, holdings_of, read_at
from kafka_marshal.observe.text import names_of, no_group
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.types import due_of
from rationalizer import (
    InvalidRecordError,
    Progress,
    Record,
    SettleOffsets,
    SettlingMessages,
    codes,
    decode,
    key_hash,
    route_group,
    route_lease,
)
from rationalizer.holes import NO_KEY, NO_OWNER, Hole
from rationalizer.levels import SHARING_LEVEL, SUPPORTED_LEVEL
from rationalizer.limits import MAX_REASON_BYTES
from rationalizer.wire.records import Opened, Parked

State = Literal["parked", "later", "waiting", "acquired"]

Action = Literal["redrive", "discard", "park"]

#: (topic, partition, offset)
Place = tuple[str, int, int]

#: The reason of a message that an operator sets aside.
BY_AN_OPERATOR: Final = "OPERATOR"

#: Bytes of a value that are kept.
_MOST_OF_A_VALUE = 400

#: Why a message is left as it is; and how long (ms) its worker has to settle it, and after how long it is asked again.
IN_A_BATCH: Final = "a worker has it in its batch"
ANSWERS_MS, AGAIN_MS = 10_000.0, 1_000.0

#: Entries of one record. With a rate, as many as are due in this time (s).
MOST_ENTRIES = 1_000
STEP_S = 0.25


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A message that is not done, though its partition's position may be beyond it."""

    group: str
    topic: str
    partition: int
    offset: int
    #: Where its key lies in the key space; None: the log does not say (a batch).
    key_hash: int | None
    #: How often it was delivered, to all owners together.
    delivery_count: int
    #: "parked": set aside until ``redrive`` or ``discard``. "waiting": its owner, or the next worker, tries it again.
    #: "later": the same, at the time ``until``. "acquired": in a worker's batch.
    state: State
    #: Why it was set aside: the class of the exception, as a rule; "LATER" and a time if it waits until then. None: it
    #: is in no such state.
    reason: str | None
    #: The offset of the record that says so, in its partition of the coordination log.
    since: int
    #: The time (ms) of that record, and the client that wrote it. None: it was pruned.
    time: int | None = None
    client: str | None = None
    #: As in Kafka. None: it has none, or it was not read (``gone``, ``unread``), or the message is acquired.
    key: bytes | None = None
    #: The beginning of its value.
    value: bytes | None = None
    #: It is not in the topic any more: retention, compaction or a deletion removed it.
    gone: bool = False
    #: Why it could not be read; "": it was, or need not be.
    unread: str = ""

    @property
    def place(self) -> Place:
        """(topic, partition, offset)"""
        return self.topic, self.partition, self.offset

    @property
    def until(self) -> int | None:
        """Until when (ms since 1970) it waits for its next try; None: it does not wait for a time."""
        return due_of(self.reason)


@dataclass(frozen=True, slots=True)
class Settled:
    """What was done with open messages, or would be (``dry_run``)."""

    group: str
    action: Action
    #: (topic, partition, offset) of each message that was redriven, discarded, or set aside.
    messages: tuple[Place, ...]
    #: By redrive: messages that are not in the topic any more. Nothing can deliver them; they count as done now.
    gone: tuple[Place, ...] = ()
    #: Messages that were asked for and left as they are, and why.
    left: Mapping[Place, str] = field(default_factory=dict)
    #: How many messages of the group were set aside when it began, by reason.
    reasons: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Wish:
    """Which messages: these places, or (None) all that are parked; those with this reason, if there is one."""

    places: tuple[Place, ...] | None
    reason: str | None = None


def places_of(messages: object) -> tuple[Place, ...]:
    """(topic, partition, offset) of each. Raises ConfigurationError."""
    places: list[Place] = []
    for each in arguments.several("messages", messages, "(topic, partition, offset) of each, or 'all'"):
        try:
            topic, partition, offset = each
        except (TypeError, ValueError):
            raise arguments.wrong("messages", "(topic, partition, offset) of each, or 'all'", each) from None
        check_name((topic, partition))
        places.append((topic, partition, arguments.a_whole("offset", offset)))
    return tuple(places)


class GroupOpenMessages(AdminBase):
    """Methods of :class:`~kafka_marshal.admin.Admin` about messages that are set aside, or wait for their next try."""

    def open_messages(
        self, group: str, partitions: Iterable[TopicPartition] | None = None, *, parked: bool = False
    ) -> list[OpenMessage]:
        """The open messages of a group, sorted by topic, partition and offset; nothing is appended.

        Those that are set aside (parked), those that wait for their next try, and those in a worker's batch.

        ``partitions``: of these only.

        ``parked``: only those that are set aside.

        Keys, and the beginnings of values, are read from Kafka; ``gone`` says that the message is not in the topic any
        more, ``unread`` why nothing was read: if the topic was recreated, other messages have these offsets.

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

        return self._look(found)

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

        ``messages``: (topic, partition, offset) of each, or ``"all"``.

        ``reason``: all that were set aside for it.

        ``rate``: at most this number in a second.

        ``dry_run``: only return what would be done.

        ``progress`` is called with (messages settled, messages in all).

        Each is freed once, whatever other operators do; after an interruption call it again. A message that is not in
        the topic any more can't be delivered: it counts as done, and is in ``gone`` of the result.

        Raises AdminError if the log knows no such group, the topic was recreated, or the log did not answer (it says
        what was done before that).
        """
        wish = self._wish(group, messages, reason)
        if rate is not None:
            rate = arguments.a_rate("rate", rate)
        return self._settle(group, "redrive", wish, dry_run, progress, rate=rate)

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
        return self._settle(group, "discard", self._wish(group, messages, reason), dry_run, progress)

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
        return self._settle(group, "park", wish, dry_run, reason=reason)

    # Inside.

    def _wish(self, group: str, messages: object, reason: str | None) -> _Wish:
        self._check_group(group)
        if reason is not None:
            arguments.text("reason", reason)
        if messages == "all" or (messages is None and reason is not None):
            return _Wish(None, reason)
        if messages is None or reason is not None:
            raise ConfigurationError(
                "say which messages are meant: a list of (topic, partition, offset), or 'all', or reason=. Nothing was "
                "changed"
            )
        return _Wish(places_of(messages))

    def _settle(
        self,
        group: str,
        action: Action,
        wish: _Wish,
        dry_run: bool,
        progress: Callable[[int, int], None] | None = None,
        **more: Any,
    ) -> Settled:
        arguments.a_flag("dry_run", dry_run)
        if progress is not None:
            arguments.a_function("progress", progress, "messages settled, messages there are")
        return self._act(
            group, lambda session: _settle(session, action, wish, dry_run=dry_run, progress=progress, **more)
        )


# -- listing ----------------------------------------------------------------------------------------------------------


def state_of(hole: Hole) -> State:
    """The state in the words of users."""
    if hole.is_later:
        return "later"
    return "parked" if hole.is_parked else "waiting" if hole.is_free else "acquired"


def messages_of(group_id: str, holdings: Iterable[PlacedHole]) -> Iterator[OpenMessage]:
    """Each message of these holes."""
    for _, topic, partition, hole in holdings:
        key_hash = None if hole.key_hash == NO_KEY else hole.key_hash
        for offset in range(hole.first, hole.last + 1):
            yield OpenMessage(
                *(group_id, topic, partition, offset, key_hash, hole.attempts, state_of(hole), hole.reason, hole.since)
            )


class _Stored(NamedTuple):
    key: bytes | None
    value: bytes | None


def _stored(message: Any) -> _Stored:
    value = message.value()
    return _Stored(message.key(), None if value is None else value[:_MOST_OF_A_VALUE])


def _written(message: Any) -> tuple[int, str] | None:
    """When a record of the log was written, and by which client."""
    try:
        record = decode(message.value(), SUPPORTED_LEVEL)
    except ValueError:  # no record
        return None
    return message.timestamp()[1], record.client_id


def describe(
    cluster: Cluster,
    log: str,
    messages: list[OpenMessage],
    cp_of: Callable[[TopicPartition], int],
    timeout_s: float,
    *,
    keys: bool = True,
    lost: Mapping[TopicPartition, str] = MappingProxyType({}),
) -> list[OpenMessage]:
    """The same, with what Kafka says: since when, by whom, keys and values (*blocking*).

    Messages in a worker's batch are not read; without `keys`, none is. lost: partitions whose position is lost, and
    why: other messages have these offsets now.
    """
    sinces: dict[TopicPartition, set[int]] = {}
    wanted: dict[TopicPartition, list[int]] = {}
    for each in messages:
        key = each.topic, each.partition
        sinces.setdefault((log, cp_of(key)), set()).add(each.since)
        if keys and each.state != "acquired" and key not in lost:
            wanted.setdefault(key, []).append(each.offset)
    written = read_at(cluster, sinces, _written, timeout_s)
    stored = read_at(cluster, wanted, _stored, timeout_s)
    stored.unread |= {key: f"{why}, and other messages have these offsets now" for key, why in lost.items()}
    return [_described(each, written.found.get((log, cp_of(each.place[:2]), each.since)), stored) for each in messages]


def _described(message: OpenMessage, written: tuple[int, str] | None, stored: PointReads[_Stored]) -> OpenMessage:
    time_ms, client = written or (None, None)
    key, value = stored.found.get(message.place, (None, None))
    return replace(
        message,
        time=time_ms,
        client=client,
        key=key,
        value=value,
        gone=message.place in stored.gone,
        unread=stored.unread.get(message.place[:2], "") if message.state != "acquired" else "",
    )


# -- settling ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Plan:
    """What is to be done, as the log was when it was made."""

    todo: list[tuple[Place, PlacedHole]] = field(default_factory=list)
    left: dict[Place, str] = field(default_factory=dict)
    gone: set[Place] = field(default_factory=set)
    #: Of messages to be parked whose hole has no key hash.
    hashes: dict[Place, int] = field(default_factory=dict)
    reasons: Mapping[str, int] = field(default_factory=dict)
    #: All that are set aside are meant: what another operator settles meanwhile is done, as the two share the work.
    is_all: bool = False


#: Called after each record that the log has shown. For tests.
passed: Callable[[], None] = lambda: None  # noqa: E731


def settle_places(session: Session, action: Action, places: tuple[Place, ...], *, dry_run: bool) -> Settled:
    """Settle these messages (*blocking*). Raises AdminError if the log does not answer; what it says was done is."""
    return _settle(session, action, _Wish(places), dry_run=dry_run)


def _settle(
    session: Session,
    action: Action,
    wish: _Wish,
    *,
    rate: float | None = None,
    reason: str = BY_AN_OPERATOR,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Settled:
    """Settle these messages (*blocking*). Raises AdminError if the log does not answer; what it says was done is."""
    with session.locked():
        if session.kind() is None:
            known = names_of(session.worlds.values())
            raise AdminError(f"{no_group(session.group_id, known)} Nothing was changed")
        if action == "park" and (level := min(world.level for world in session.worlds.values())) < SHARING_LEVEL:
            raise ConfigurationError(
                f"park: level {SHARING_LEVEL} of the coordination topic is needed, which is at level {level}. Nothing "
                "was changed. Once all members have this release, raise it: kafka-marshal upgrade"
            )
        plan = _plan(holdings_of(session.worlds, session.group_id), action, wish, session.progress)
    if action == "redrive":
        _find_gone(session, plan)
    elif action == "park":
        _find_hashes(session, plan)
    if dry_run:
        done = tuple(place for place, _ in plan.todo if place not in plan.gone)
        return Settled(session.group_id, action, done, tuple(sorted(plan.gone)), plan.left, plan.reasons)
    return _Work(session, action, plan, reason, rate, progress).carry_out()


def _plan(
    holdings: Sequence[PlacedHole], action: Action, wish: _Wish, look: Callable[[TopicPartition], Progress | None]
) -> _Plan:
    """look: the group's progress of a partition; the lock is held."""
    plan = _Plan(reasons=Counter(each.hole.reason or "" for each in holdings if each.hole.is_parked))
    if wish.places is None:
        plan.is_all = True
        plan.todo = [
            ((each.topic, each.partition, each.hole.first), each)
            for each in holdings
            if each.hole.is_parked and wish.reason in (None, each.hole.reason)
        ]
        return plan
    by_key = {key: list(of_key) for key, of_key in groupby(holdings, key=lambda each: each.key)}
    stable = {key: progress.stable for key in {place[:2] for place in wish.places} if (progress := look(key))}
    for place in sorted(set(wish.places)):
        of_key = by_key.get(place[:2], [])
        at = bisect_right(of_key, place[2], key=lambda each: each.hole.first) - 1
        found = of_key[at] if at >= 0 and place[2] <= of_key[at].hole.last else None
        why = _not_open(place[2], stable.get(place[:2])) if found is None else _why_not(action, found.hole)
        if found is None or why:
            plan.left[place] = why
        else:
            plan.todo.append((place, found))
    return plan


def _not_open(offset: int, stable: int | None) -> str:
    """Why a message that is not open is left as it is."""
    if stable is not None and offset <= stable:
        return f"it was done before: everything up to offset {stable} is, but for what is open"
    return "it is not open: done, or not reached yet"


def _why_not(action: Action, hole: Hole) -> str:
    """Why an open message can't be settled in this way; "": it can."""
    state = state_of(hole)
    if action == "redrive" and state not in ("parked", "later"):
        return IN_A_BATCH if state == "acquired" else "it waits for its next try already"
    return f"it is set aside already ({hole.reason})" if action == "park" and state == "parked" else ""


def _find_gone(session: Session, plan: _Plan) -> None:
    """Which messages retention took. Raises AdminError if another message would be delivered in place of one."""
    keys = sorted({place[:2] for place, _ in plan.todo})
    marks = session.cluster.watermarks(keys, LOOKUP_TIMEOUT_S)
    with session.locked():
        found = {key: session.progress(key) for key in keys}
    lost = {key: "the topic does not exist any more, or it has no leader" for key in keys if key not in marks}
    lost |= lost_positions(session.cluster, keys, found.get)
    if lost:
        (topic, partition), why = min(lost.items())
        raise AdminError(
            f"{topic} [{partition}]: {why}. Its open messages can't be delivered. Nothing was changed. If the topic is "
            "gone for good, discard them, or set the position: kafka-marshal release-group"
        )
    plan.gone = {place for place, each in plan.todo if place[2] < marks[each.key][0]}


def _find_hashes(session: Session, plan: _Plan) -> None:
    """The key hash of each message whose hole has none: read from Kafka."""
    wanted: dict[TopicPartition, list[int]] = {}
    for place, each in plan.todo:
        if each.hole.key_hash == NO_KEY:
            wanted.setdefault(each.key, []).append(place[2])
    with session.locked():
        progress = {key: session.progress(key) for key in wanted}
    lost = lost_positions(session.cluster, wanted, progress.get)
    wanted = {key: offsets for key, offsets in wanted.items() if key not in lost}
    found = read_at(session.cluster, wanted, lambda each: key_hash(each.key(), each.offset()), LOOKUP_TIMEOUT_S)
    plan.hashes = found.found
    for place, each in plan.todo:
        if each.hole.key_hash == NO_KEY and place not in found.found:
            why = lost.get(each.key) or found.unread.get(each.key)
            plan.left[place] = f"its key could not be read ({why})" if why else "it is not in the topic any more"
    plan.todo = [(place, each) for place, each in plan.todo if place not in plan.left]


class _Work:
    """Carries out a plan, record by record."""

    def __init__(
        self,
        session: Session,
        action: Action,
        plan: _Plan,
        reason: str,
        rate: float | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._session = session
        self._action = action
        self._plan = plan
        self._reason = reason
        self._rate = rate
        self._progress = progress
        self._done: list[Place] = []
        self._gone: list[Place] = []
        #: A worker has these in its batch, and settles them when it sees our record.
        self._asked: list[tuple[Place, PlacedHole]] = []

    def carry_out(self) -> Settled:
        """Append one record after the other."""
        begun = self._session.now_ms()
        sent = 0
        for chunk in self._chunks():
            if self._rate is not None:
                self._session.wait_for(never, begun + sent / self._rate * 1000)
            self._settle(chunk)
            sent += len(chunk)
            if self._progress is not None:
                self._progress(sent, len(self._plan.todo))
            passed()
        self._await_workers()
        found = tuple(self._done), tuple(self._gone), self._plan.left, self._plan.reasons
        return Settled(self._session.group_id, self._action, *found)

    def _await_workers(self) -> None:
        """Wait until workers have settled what they have in their batches; ask again for what has not begun."""
        session = self._session
        until = session.now_ms() + ANSWERS_MS
        while self._asked:
            asked, self._asked = self._asked, []
            again_at = min(until, session.now_ms() + AGAIN_MS)
            session.wait_for(partial(self._are_settled, asked), again_at)
            for place, was in asked:
                with session.locked():
                    is_left, hole = self._is_in_its_batch((place, was)), self._hole_at(place)
                if is_left and session.now_ms() < until:
                    self._settle([(place, was)])
                elif is_left:
                    self._plan.left[place] = f"{IN_A_BATCH}, and has not settled it (is it alive?). Try again"
                elif hole is None if self._action == "discard" else hole is not None and hole.is_parked:
                    self._done.append(place)
                else:
                    self._leave(place, hole)

    def _hole_at(self, place: Place) -> Hole | None:
        progress = self._session.progress(place[:2])
        return None if progress is None or progress.holes is None else progress.holes.at(place[2])

    def _are_settled(self, asked: Sequence[tuple[Place, PlacedHole]]) -> bool:
        return not any(map(self._is_in_its_batch, asked))

    def _is_in_its_batch(self, one: tuple[Place, PlacedHole]) -> bool:
        hole, was = self._hole_at(one[0]), one[1].hole
        return hole is not None and hole.owner == was.owner != NO_OWNER and hole.since == was.since

    def _chunks(self) -> Iterator[list[tuple[Place, PlacedHole]]]:
        most = MOST_ENTRIES if self._rate is None else max(1, min(MOST_ENTRIES, int(self._rate * STEP_S)))
        for _, of_key in groupby(self._plan.todo, key=lambda each: each[0][:2]):
            todo = list(of_key)
            for at in range(0, len(todo), most):
                yield todo[at : at + most]

    def _settle(self, chunk: list[tuple[Place, PlacedHole]]) -> None:
        session, plan = self._session, self._plan
        cp, key = chunk[0][1].cp, chunk[0][1].key
        with session.locked():
            seen = session.worlds[cp].next_offset
            is_claimed = session.kind() == "claimed"
            progress = session.progress(key)
            holes = None if progress is None else progress.holes
            now = {place: None if holes is None else holes.at(place[2]) for place, _ in chunk}
        todo: list[tuple[Place, Hole]] = []
        for place, was in chunk:
            hole = now[place]
            if hole is None or hole.since != was.hole.since or hole.owner != was.hole.owner:
                self._leave(place, hole)
            else:
                todo.append((place, hole))
        ends = [place for place, _ in todo if self._action == "discard" or place in plan.gone]
        others = [(place, hole) for place, hole in todo if place not in set(ends)]
        done = tuple((place[2], place[2]) for place in ends)
        opened: Opened = ()
        parked: Parked = ()
        if self._action == "redrive":
            opened = tuple((place[2], place[2], None, 0) for place, _ in others)
        else:
            parked = tuple(
                (place[2], plan.hashes.get(place, hole.key_hash), hole.attempts, self._reason) for place, hole in others
            )
        if todo:
            record: Record
            if is_claimed:
                record = SettlingMessages(*session.ids, *key, None, seen, done, opened, parked)
            else:
                record = SettleOffsets(*session.ids, "", 0, seen, *key, done, opened, parked)
            self._note(cp, record, [*ends, *(place for place, _ in others)], dict(chunk))

    def _note(self, cp: int, record: Record, places: list[Place], were: Mapping[Place, PlacedHole]) -> None:
        """Append the record, and note what was accepted."""
        session = self._session
        (asked,) = session.ask((cp, record))
        if asked.outcome is None or asked.outcome.entries is None:
            why = "did not show the record in time" if asked.outcome is None else f"refused it ({asked.outcome.code})"
            topic, partition, _ = places[0]
            raise AdminError(
                f"{topic} [{partition}]: the log {why}. {len(self._done) + len(self._gone):,} of "
                f"{len(self._plan.todo):,} messages were settled before that"
                + ("; those of this record may be or not" if asked.outcome is None else "")
                + ". Do it again: each is settled once"
            )
        with session.locked():
            progress = session.progress(places[0][:2])
            holes = None if progress is None else progress.holes
            now = [None if holes is None else holes.at(place[2]) for place in places]
        for place, code, hole in zip(places, asked.outcome.entries, now, strict=True):
            if code == codes.OK:
                (self._gone if place in self._plan.gone else self._done).append(place)
            elif code == codes.MAX_INDIVIDUAL_COMMIT_REACHED:
                self._plan.left[place] = "its partition has as many open messages as it may have"
            elif code == codes.FENCED and were[place].hole.owner != NO_OWNER:
                self._asked.append((place, were[place]))
            else:
                self._leave(place, hole)

    def _leave(self, place: Place, now: Hole | None) -> None:
        """This message changed after the plan was made."""
        if not self._plan.is_all:
            state = "it is not open any more" if now is None else f"it is {state_of(now)} now"
            self._plan.left[place] = f"it changed meanwhile: {state}"
