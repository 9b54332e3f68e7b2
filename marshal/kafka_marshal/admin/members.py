"""A group's pause, kept without a break; and its members meanwhile: what each holds, when it released, which live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from shlex import quote

from kafka_marshal.admin.session import Asked, Session, by_sharer, key_of
from kafka_marshal.engine.settings import proof_margin_ms
from kafka_marshal.errors import AdminError, GroupPausedError, MarshalError
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.fold import is_of_worker, shows_life
from kafka_marshal.observe.words import what
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.types import LeaseInfo, Placed
from rationalizer import (
    ForgetGroup,
    Group,
    Lease,
    LeaveGroup,
    Member,
    Outcome,
    PausedGroup,
    Piece,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
)
from rationalizer.groups.group import done_in
from rationalizer.leases.shares import Share
from rationalizer.limits import MAX_TIME_MS, STALE_AFTER_INTERVALS


@dataclass(frozen=True, slots=True)
class InHand(Placed):
    """A partition whose holder has not finished all it had in flight when the pause began.

    With the topic "": a member of a coordinated group that owns nothing, and has not left yet.
    """

    topic: str
    partition: int
    #: client_id of the holder, or of the one that released too late.
    client_id: str
    epoch: int
    #: "fresh" or "unknown": still at work. "stale": silent for longer than two heartbeat intervals. "late": released
    #: near the end of these, when a member gives up its messages in flight, or by an operator (evict). For "stale" and
    #: "late" these are repeated. "slow": released when silent for about one interval. It finished, or gave up since
    #: its last heartbeat was long on its way: the log does not show which, so its messages in flight may be repeated.
    state: str
    #: Everything up to this offset is done; None: nothing.
    stable: int | None

    def __str__(self) -> str:
        if not self.topic:
            return f"{self.client_id!r} ({self.state}; owns nothing)"
        done = "nothing" if self.stable is None else f"up to offset {self.stable}"
        return f"{self.topic} [{self.partition}] by {self.client_id!r} ({self.state}; handed in: {done})"


#: (topic, partition, epoch)
_Epoch = tuple[str, int, int]


class Members:
    """Follows the members through the log. All methods are called under the session's lock."""

    def __init__(self, session: Session, is_ours: Callable[[int], bool] = lambda cp: False) -> None:
        """is_ours: whether our pause is in force in a coordination partition; their records there are followed."""
        self._session = session
        self._is_ours = is_ours
        #: What was not handed in in time, and is not held any more.
        self._late: list[InHand] = []
        #: Epoch → the share: when it is released, its lease has it no longer.
        self._shares: dict[_Epoch, Share] = {}
        #: member_id → a member of a coordinated group, and what it owned before the present record.
        self._were: dict[str, tuple[Member, list[tuple[str, int, Piece]]]] = {}
        #: Epochs, and member_ids, that an operator has said to evict (C20).
        self._evicted: set[_Epoch | str] = set()
        #: instance_id of another process with our client_id; "": there is none.
        self.twin: str = ""
        #: client_id → its first record during the pause: it is alive.
        self.signs_of_life: dict[str, str] = {}

    def applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        """Our replica applied a record."""
        session = self._session
        record = outcome.record
        if record is None or record.group_id != session.group_id:
            return
        if record.instance_id == session.instance_id:
            if isinstance(record, ReleaseGroup) and outcome.accepted:
                self._begun(cp)
            return
        if isinstance(record, Tick) or not self._is_ours(cp):
            return
        if record.client_id == session.client_id:
            if shows_life(outcome):
                self.twin = record.instance_id
            return
        is_eviction = self._is_eviction(record, outcome)
        if not is_eviction:
            self.signs_of_life.setdefault(record.client_id, outcome.type or "")
        if isinstance(record, ReleasingPartition) and outcome.accepted:
            self._released(record, outcome, is_eviction)
        elif cp == session.home and outcome.accepted:
            leaver = record.member_id if isinstance(record, LeaveGroup) and not is_eviction else None
            self._left(leaver, outcome.log_time)

    def _begun(self, cp: int) -> None:
        """The CP is paused: from now on no beat is accepted there, and nothing is claimed."""
        for lease in self._session.worlds[cp].leases():
            if lease.group_id == self._session.group_id:
                self._shares.update(((*key_of(lease), share.epoch), share) for share in lease.shares or ())
        if cp == self._session.home:
            self._look()

    def _is_eviction(self, record: Record, outcome: Outcome) -> bool:
        """Whether an operator wrote it: the record that names it, or the one in the member's name (C20)."""
        what: _Epoch | str
        owner: Lease | Share | Member | None
        if isinstance(record, ReleasingPartition):
            what = record.topic, record.partition, record.epoch
            owner = self._holder(record)
        elif isinstance(record, LeaveGroup) and record.member_id in self._were:
            what, owner = record.member_id, self._were[record.member_id][0]
        else:
            return False
        if not outcome.accepted and owner is not None and owner.client_id not in (None, record.client_id):
            self._evicted.add(what)
            return True
        is_bare = not isinstance(record, ReleasingPartition) or record.last_offset is None
        return outcome.accepted and is_bare and what in self._evicted

    def _holder(self, record: ReleasingPartition) -> Lease | Share | None:
        """What a release is about."""
        lease = self._session.lease((record.topic, record.partition))
        share = self._shares.get((record.topic, record.partition, record.epoch))
        return share or (lease if lease is not None and lease.epoch == record.epoch else None)

    def _released(self, record: ReleasingPartition, outcome: Outcome, is_eviction: bool) -> None:
        key = record.topic, record.partition
        lease, held = self._session.lease(key), self._holder(record)
        if lease is None or held is None:
            return
        state = "late" if is_eviction else _lateness(outcome.log_time - held.last_beat, held.heartbeat_interval_ms)
        if state:
            self._add(key, record.client_id, record.epoch, state, lease.progress.stable)

    def _add(self, key: TopicPartition, client_id: str, epoch: int, state: str, done: int) -> None:
        self._late.append(InHand(*key, client_id, epoch, state, done if done >= 0 else None))

    def _left(self, leaver: str | None, log_time: int) -> None:
        """Members of a coordinated group may be gone. Another's record removes those that are overdue (G8).

        leaver: one that has left by itself, after what it had in flight.
        """
        before, group = self._were, self._session.group()
        self._look()
        if group is None:
            return
        for member_id, (member, owned) in before.items():
            is_gone = member_id not in self._were and member_id != leaver
            if is_gone and (member_id in self._evicted or member.is_overdue(log_time)):
                state = "late" if member_id in self._evicted else "stale"
                for topic, partition, piece in owned:
                    done = done_in(group, topic, partition, piece.lo, piece.hi)
                    self._add((topic, partition), member.client_id, piece.since, state, done)

    def _look(self) -> None:
        """Note what the members of a coordinated group own."""
        self._were = {}
        if (group := self._session.group()) is None or not group.members:
            return
        by_slot = {slot: self._were.setdefault(x.member_id, (x, []))[1] for slot, x in group.members.items()}
        for topic, partition, pieces, *_ in group.assigned():
            for piece in pieces:
                if piece.owner in by_slot:
                    by_slot[piece.owner].append((topic, partition, piece))

    def held(self, chosen: frozenset[TopicPartition] | None) -> list[LeaseInfo]:
        """What other clients hold, stale or not; of the chosen partitions (None: of all).

        All of a coordinated group: it may have no member while positions are set, not even idle ones.
        """
        group = self._session.group()
        infos = [part for info in self._session.infos() for part in by_sharer(info)]
        return [
            info
            for info in [*infos, *([] if group is None else self._idle(group))]
            if info.client_id not in (None, self._session.client_id)
            and (chosen is None or group is not None or (info.topic, info.partition) in chosen)
        ]

    def _idle(self, group: Group) -> list[LeaseInfo]:
        """Members that own nothing, as rows without a partition."""
        owners = {info.client_id for info in self._session.infos()}
        log_time = self._session.worlds[self._session.home].log_time
        return [
            LeaseInfo(
                topic="",
                partition=-1,
                client_id=member.client_id,
                instance_id=member.instance_id,
                epoch=0,
                freshness="stale" if member.is_overdue(log_time) else "fresh",
                heartbeat_interval_ms=member.heartbeat_interval_ms,
                last_beat=member.last_beat,
                stable=None,
                ranges=(),
                granted=None,
                group_id=group.group_id,
                kind="coordinated",
                lo=member.slot,
            )
            for member in group.members.values()
            if member.client_id not in owners
        ]

    def at_work(self, chosen: frozenset[TopicPartition] | None) -> list[LeaseInfo]:
        """Those of `held` that are not stale."""
        return [info for info in self.held(chosen) if info.freshness != "stale"]

    def in_hand(self, chosen: frozenset[TopicPartition] | None) -> list[InHand]:
        """What is still held, or was released too late, sorted."""
        found = [late for late in self._late if chosen is None or late.key in chosen]
        for info in self.held(chosen):
            if info.topic or info.freshness != "stale":
                of_holder = info.client_id or "", info.epoch, info.freshness, info.stable
                found.append(InHand(info.topic, info.partition, *of_holder))
        return sorted(found, key=lambda each: (*each.key, each.epoch))

    def tick_times(self, infos: Iterable[LeaseInfo]) -> dict[int, float]:
        """CP → time by our clock (ms) at which a Tick will show one of these as stale."""
        session = self._session
        now = session.now_ms()
        due: dict[int, float] = {}
        for info in infos:
            key = (info.topic, info.partition)
            if info.kind == "claimed":
                cp, at = session.cp_of(key), session.driver.engine.peers.opens_at(key, now)
            else:
                cp = session.home
                over = info.last_beat + STALE_AFTER_INTERVALS * info.heartbeat_interval_ms
                at = now + max(0, over + 1 - session.worlds[cp].log_time)
            due[cp] = min(due.get(cp, float("inf")), at)
        return due

    def check(self) -> None:
        """Raise AdminError if another process works under our client_id."""
        if self.twin:
            raise AdminError(
                f"another process (instance {self.twin}) acts as client_id {self._session.client_id!r} in group "
                f"{self._session.group_id!r} while this admin has it paused. Nothing more was changed. See that each "
                "admin and each worker has a client_id of its own, then do it again"
            )


def _lateness(silence_ms: int, heartbeat_interval_ms: int) -> str:
    """The state of what was released after this silence; "": its holder certainly had not given up by its own clock.

    It gives up one margin before 2·HI after the sending of its last beat (T4). That took up to HI to the log (L1).
    """
    margin = proof_margin_ms(heartbeat_interval_ms)
    if silence_ms >= 2 * heartbeat_interval_ms - 2 * margin:
        return "late"
    return "slow" if silence_ms >= heartbeat_interval_ms - margin else ""


# -- the pause -------------------------------------------------------------------------------------------------------


#: The least time between two Ticks while log time is awaited (T3).
TICK_AGAIN_MS = 100.0


@dataclass(frozen=True, slots=True)
class _Term:
    """The pause in one CP, as our own replica shows it."""

    #: Log time (ms) at which it ends.
    expires: int
    #: Own clock (ms) until which it is certainly in force, unless a broker's clock is set.
    until: float


class PauseKeeper:
    """Keeps the group of a session paused. All methods but ``seconds_left`` may block."""

    def __init__(self, session: Session, length_ms: int) -> None:
        self._session = session
        self._length_ms = length_ms
        self._terms: dict[int, _Term] = {}
        #: CPs that may be paused by one of our records, applied or not.
        self._touched: set[int] = set()
        self._last_ticks = 0.0
        self.members: Members = Members(session, self.is_ours)
        session.on_applied = self.members.applied

    @property
    def seconds_left(self) -> float:
        """How long the pause lasts without an extension, by our clock (s)."""
        until = min((term.until for term in list(self._terms.values())), default=0.0)  # any thread may ask
        return max(0.0, until - self._session.now_ms()) / 1000

    @property
    def _extend_at(self) -> float:
        return min((term.until for term in self._terms.values()), default=float("inf")) - self._length_ms / 2

    def begin(self) -> None:
        """Pause every CP. Raises GroupPausedError if another client has, AdminError if the log is silent."""
        session = self._session
        session.tick(session.cps)
        with session.locked():
            self._refuse_others([session.worlds[cp].pause(session.group_id) for cp in session.cps])
        # CP 0 first and alone: one of two admins is refused there, before it has paused another CP.
        first, *others = session.cps
        self._pause([first])
        self._pause(others)

    def extend_if_short(self) -> None:
        """Extend the pause if less than half of it is left. Raises AdminError if it had expired before."""
        if self._session.now_ms() >= self._extend_at:
            self._pause(self._session.cps)

    def extend(self) -> int:
        """Extend the pause to its whole length from now on; the log time (ms) at which the first CP's ends."""
        self._pause(self._session.cps)
        return min(term.expires for term in self._terms.values())

    def forget(self, cp: int) -> bool:
        """Let the CP forget the group, and pause it again; whether it was accepted.

        A ForgetGroup ends the pause; the next one follows at once, so that no member gets in between.
        """
        session = self._session
        stamp = session.tick([cp])[cp]
        self._touched.add(cp)
        again = ReleaseGroup(*session.ids, min(MAX_TIME_MS, stamp + self._length_ms))
        forgotten, paused = session.ask((cp, ForgetGroup(*session.ids)), (cp, again))
        return forgotten.accepted and self._take_in(paused)

    def _pause(self, cps: Sequence[int]) -> None:
        """Pause these CPs, or replace the expiry there, counted from the timestamp of a new Tick (C11)."""
        session = self._session
        stamps = session.tick(cps)
        self._touched.update(cps)
        records: list[tuple[int, Record]] = [
            (cp, ReleaseGroup(*session.ids, min(MAX_TIME_MS, stamps[cp] + self._length_ms))) for cp in cps
        ]
        answers = session.ask(*records)
        self._refuse_others([x.pause for x in answers if x.outcome is not None and not x.accepted])
        silent = [x.cp for x in answers if x.outcome is None]
        if silent:
            raise AdminError(f"partition(s) {silent} of the coordination topic did not show the pause in time")
        lapsed = [x.cp for x in answers if not self._take_in(x)]
        if lapsed:
            raise AdminError(
                f"the pause of {session.group_id!r} ran out in partition(s) {lapsed} of the coordination topic before "
                "it was seen, or extended: members may have been at work meanwhile. Pause again, for longer"
            )

    def _take_in(self, asked: Asked) -> bool:
        """Whether an answer shows the CP paused by us, with time left, and without a break since the last time."""
        outcome, pause = asked.outcome, asked.pause
        before = self._terms.get(asked.cp)
        if outcome is None or pause is None or pause.client_id != self._session.client_id:
            return False
        if before is not None and outcome.log_time >= before.expires:
            return False
        self._terms[asked.cp] = _Term(pause.expires, asked.sent_at + (pause.expires - outcome.log_time))
        return True

    def _refuse_others(self, pauses: Iterable[PausedGroup | None]) -> None:
        group_id = self._session.group_id
        for pause in pauses:
            if pause is not None and pause.client_id != self._session.client_id:
                raise GroupPausedError(
                    f"group {group_id!r} is paused by {pause.client_id!r} until {_clock(pause.expires)}. Nothing was "
                    "changed. Let that admin finish; a dead one's pause ends by itself then, or now with "
                    f"kafka-marshal release-group {quote(group_id)} --resume",
                    client_id=pause.client_id,
                    expires=pause.expires,
                )

    def is_ours(self, cp: int) -> bool:
        """Whether the log shows the CP paused by our client_id at this moment; the lock is held."""
        pause = self._session.worlds[cp].pause(self._session.group_id)
        return pause is not None and pause.client_id == self._session.client_id

    def check(self) -> None:
        """Raise AdminError unless it is in force everywhere, by log and clock, and no other process is this client."""
        now = self._session.now_ms()
        with self._session.locked():
            over = [
                cp
                for cp in self._session.cps
                if cp not in self._terms or now >= self._terms[cp].until or not self.is_ours(cp)
            ]
        if over:
            raise AdminError(
                f"the pause of {self._session.group_id!r} has run out, or was ended, in partition(s) {over} of the "
                "coordination topic: members may be at work again. Nothing more was changed. Pause again, for longer"
            )
        with self._session.locked():
            self.members.check()

    def wait(self, met: Callable[[], object], timeout_s: float, ticks: Callable[[], dict[int, float]] = dict) -> bool:
        """Wait until met() is true, under the lock, at most timeout_s; whether it became true.

        Meanwhile the pause is extended when time runs short. ticks(): CP → time (our clock, ms) at which a Tick is
        appended there, so that silent leases go stale.
        """
        deadline = self._session.now_ms() + timeout_s * 1000
        while True:
            with self._session.locked():
                due = ticks()
            tick_at = max(min(due.values(), default=float("inf")), self._last_ticks + TICK_AGAIN_MS)
            if self._session.wait_for(met, min(deadline, self._extend_at, tick_at)):
                return True
            now = self._session.now_ms()
            if now >= deadline:
                return False
            self.extend_if_short()
            if now >= tick_at:
                self._session.tick(sorted(cp for cp, at in due.items() if at <= now))
                self._last_ticks = self._session.now_ms()

    def end(self) -> str:
        """End the pause in every CP; what went wrong, in words, "" for nothing."""
        session = self._session
        cps = sorted(self._touched)
        try:
            answers = session.ask(*((cp, ReleaseGroup(*session.ids, 0)) for cp in cps))
        except MarshalError as error:
            reason, left = str(error), cps
        else:
            # A rejected one needs nothing: another client's pause is there, so ours had ended before.
            reason, left = "no answer in time", [x.cp for x in answers if x.outcome is None]
        if not left:
            return ""
        return (
            f"The pause of {session.group_id!r} by {session.client_id!r} may still be in force in partition(s) {left} "
            f"of the coordination topic ({reason}). It ends by itself within {self._length_ms / 1000:g} s; or end it "
            f"now: kafka-marshal release-group {quote(session.group_id)} --resume --client-id "
            f"{quote(session.client_id)}"
        )


def _clock(time_ms: int) -> str:
    """Log time in local time with its offset; the number itself outside of the calendar."""
    try:
        return (
            f"{(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)).astimezone():%Y-%m-%d %H:%M:%S%z}"
        )
    except (OverflowError, ValueError):
        return f"log time {time_ms}"


# -- without a pause -------------------------------------------------------------------------------------------------


#: The most members that a message names.
_LISTED = 4


def refuse_living(session: Session, timeout_s: float, effect: str, remedy: str) -> None:
    """Raise AdminError if a member beats, or may still be alive after timeout_s (*blocking*).

    It waits until a member that has just died is silent for long enough. Only Ticks are written.
    effect: what was not done. remedy: what to do first.
    """
    members = Members(session)
    beating: set[str] = set()

    def applied(_cp: int, _offset: int, outcome: Outcome) -> None:
        record = outcome.record
        if record is None or record.group_id != session.group_id or record.client_id == session.client_id:
            return
        if shows_life(outcome):
            beating.add(record.client_id)

    session.on_applied = applied
    until = session.now_ms() + timeout_s * 1000
    try:
        session.tick(session.cps)
        while True:
            with session.locked():
                busy = members.at_work(None)
                due = members.tick_times(busy)
            if beating:
                names = ", ".join(map(repr, sorted(beating)[:_LISTED]))
                raise AdminError(
                    f"group {session.group_id!r} is alive: {names} beat meanwhile. {effect}, nobody was paused, and it "
                    f"goes on. {remedy}"
                )
            if not busy:
                return
            if session.now_ms() >= until:
                names = ", ".join(sorted({repr(info.client_id) for info in busy})[:_LISTED])
                raise AdminError(
                    f"group {session.group_id!r} may be at work: after {timeout_s:g} s {names} are not silent for long "
                    f"enough to be gone. {effect}, nobody was paused, and it goes on. {remedy}",
                    in_hand=sorted({(info.topic, info.partition) for info in busy if info.topic}),
                )
            session.wait_for(lambda: beating or not members.at_work(None), min(until, *due.values()) if due else until)
            now = session.now_ms()
            session.tick([cp for cp, at in due.items() if at <= now])
    finally:
        session.on_applied = None


def find_consuming(cluster: Cluster, topic: str, group_id: str, client_id: str, timeout_s: float) -> str | None:
    """The first thing in the log that a consumer of this client_id did, in words; None: there is no such thing.

    An admin must not pause under that name: the consumer's beats would then reposition the group. Reads the whole
    log (*blocking*). An admin's instance differs from a consumer's: it pauses a CP before it claims anything there.
    """
    replica = Replica(cluster, topic, timeout_s)
    admins: set[str] = set()
    found: list[str] = []

    def applied(cp: int, offset: int, outcome: Outcome) -> None:
        record = outcome.record
        if record is None or record.client_id != client_id or record.group_id != group_id or found:
            return
        if isinstance(record, ReleaseGroup):
            admins.add(record.instance_id)
        elif record.instance_id not in admins and is_of_worker(outcome):
            found.append(f"{what(record, None, outcome.log_time)} (offset {offset} of partition {cp})")

    try:
        replica.catch_up(timeout_s, applied=applied)
    finally:
        replica.close()
    return found[0] if found else None
