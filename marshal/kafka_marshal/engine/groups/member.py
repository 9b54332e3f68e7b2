"""Our membership of a coordinated group: joining, heartbeats, watching others, leaving (G2, G8, G11, G20).

::

    STARTUP ──mark every CP (G2), JoinGroup accepted──▶ PART_OF_GROUP ──LeaveGroup accepted──▶ DOWN
       ▲                                                    │
       └──the log no longer shows us as a member────────────┘        REDISCOVER: as PART_OF_GROUP, not proven in time

Until when it is proven (T4, T5): one proof for all pieces (G20).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from math import inf
from random import Random
from typing import NamedTuple

from kafka_marshal.engine.effects import Outbox
from kafka_marshal.engine.groups.refusals import other_strategy
from kafka_marshal.engine.holding import LastProof, Proof, Proofs
from kafka_marshal.engine.settings import BEATS_PER_INTERVAL, EngineSettings, GroupOptions, proof_margin_ms
from kafka_marshal.engine.subscription import Subscription
from rationalizer import (
    AnswerBarrier,
    ConfigureGroup,
    Group,
    GroupHeartbeat,
    JoinGroup,
    LeaveGroup,
    Member,
    Record,
    TopicsChanged,
    World,
    route_group,
)
from rationalizer.groups.machine import member_id_of
from rationalizer.wire.wellformed import REFUSED

#: Jitter: when a session runs out, others beat within this share of it, so that of many members few do.
WITNESS_SHARE = 1 / 20


class HeardMembers:
    """When our replica last applied a record of each member. Times: own clock, ms."""

    def __init__(self, client_id: str, rng: Random) -> None:
        self._client_id = client_id
        self._rng = rng
        self._heard: dict[int, float] = {}
        #: When the next session of another member runs out by our clock, plus jitter.
        self.due: float = inf

    def heard(self, group: Group, client_id: str, now: float) -> None:
        """A record of a member was applied as accepted."""
        member = group.clients.get(client_id)
        if member is not None:
            self._heard[member.slot] = now

    def look(self, group: Group | None, now: float) -> None:
        """Recompute ``due``: members may have joined or left, or ``due`` has passed."""
        slots: Collection[int] = () if group is None else group.members
        self._heard = {slot: self._heard.get(slot, now) for slot in slots}
        first = inf
        if group is not None:
            for slot, heard in self._heard.items():
                member = group.members[slot]
                at = heard + member.session_timeout_ms
                if member.client_id != self._client_id and now < at < first:
                    first = at + self._rng.random() * WITNESS_SHARE * member.session_timeout_ms
        self.due = first

    def is_needed(self, group: Group | None, now: float) -> bool:
        """Whether another member was silent for a whole session; it may have been heard since ``due`` was set."""
        members = {} if group is None else group.members
        return any(
            now >= heard + members[slot].session_timeout_ms
            for slot, heard in self._heard.items()
            if slot in members and members[slot].client_id != self._client_id
        )

    def forget(self) -> None:
        """We are no longer a member."""
        self._heard.clear()
        self.due = inf


class MemberProof:
    """When we sent the last record that the log accepted. Times: own clock, ms."""

    def __init__(self, session_timeout_ms: int) -> None:
        self._session_ms = session_timeout_ms
        self._proofs = Proofs()
        self.last: LastProof = LastProof(sent_at=-inf)
        #: Until when we are a member (T4); 0: not proven yet, or in doubt (T5).
        self.valid_until: float = 0.0

    @property
    def token(self) -> int:
        """The token of the newest record that proved it."""
        return self.last.token

    def sent(self, token: int, cp: int, now: float) -> None:
        """Our record that counts as a beat was passed to the producer."""
        self._proofs.sent(token, cp, now)

    def applied(self, cp: int, offset: int, log_time: int, now: float) -> None:
        """Our replica applied such a record as accepted."""
        self._proofs.forget_before(now - 2 * self._session_ms)
        self._take(self._proofs.applied(cp, offset, log_time, (), now))

    def acked(self, token: int, offset: int | None) -> None:
        """The broker answered an append."""
        self._take(self._proofs.acked(token, offset))

    def reset(self) -> None:
        """We are no longer a member."""
        self.__init__(self._session_ms)  # type: ignore[misc]

    def compare_clocks(self, log_time: int, now: float) -> bool:
        """Whether log time has run ahead of our clock: nothing is proven until a later beat is accepted (T5)."""
        if not self.last.is_ahead(log_time, now, self._session_ms):
            return False
        self.valid_until = 0.0
        return True

    def _take(self, proof: Proof | None) -> None:
        last = self.last
        if proof is None or proof.sent_at < last.sent_at:
            return
        last.sent_at, last.log_time, last.token = proof.sent_at, proof.log_time, max(last.token, proof.token)
        self.valid_until = proof.sent_at + self._session_ms - proof_margin_ms(self._session_ms)


#: A report waits for up to this share of the session, since another member may report the same (G12).
REPORT_SHARE = 1 / 20


class TopicReports:
    """Compares the topics that one member sees with those that its group knows. Times: own clock, ms."""

    def __init__(self, subscription: Subscription, session_timeout_ms: int, rng: Random) -> None:
        self.subscription: Subscription = subscription
        self._session_ms = session_timeout_ms
        self._rng = rng
        #: When the next report is sent; inf: there is nothing to report.
        self.due: float = inf
        #: What was compared last (the generation, our slot, what we see), and whether the group lacked something.
        self._compared: tuple[int, int, object] | None = None
        self._lacked = False

    def is_other(self, me: Member | None) -> bool:
        """Whether we joined with other topics than we read by now (``Subscription.change``), and know the new ones."""
        of_now = self.subscription
        if me is None or not of_now.looked:
            return False
        return me.pattern != of_now.pattern or not (me.pattern or me.topics == of_now.names)

    def is_due(self, group: Group | None, me: Member | None, now: float) -> bool:
        """Whether to report now, after a jitter in which another member may report it. me: None: do not report.

        If the group still lacks it, the next report is due one beat later.
        """
        if group is None or me is None or not self._lacks_now(group, me):
            self.due = inf
        elif self.due == inf:
            self.due = now + self._rng.random() * REPORT_SHARE * self._session_ms
        elif now >= self.due:
            self.due = now + self._session_ms / BEATS_PER_INTERVAL
            return True
        return False

    def _lacks_now(self, group: Group, me: Member) -> bool:
        """Compare again after a new generation or a check of the cluster: every step asks."""
        seen = self.subscription.partitions
        before, self._compared = self._compared, (group.generation, me.slot, seen)
        if before is None or before[:2] != self._compared[:2] or before[2] is not seen:
            self._lacked = self._lacks(group, me)
        return self._lacked

    def _lacks(self, group: Group, me: Member) -> bool:
        seen = dict(self.subscription.counts())
        with_us = {other.topics for other in group.members.values() if me.pattern and other.pattern == me.pattern}
        subscribed = me.topics.union(*with_us)
        if any(
            topic not in subscribed or count > group.counts.get(topic, -1)
            for topic, count in seen.items()
            if me.pattern or topic in me.topics
        ):
            return True
        gone = me.topics - seen.keys() if me.pattern else frozenset[str]()
        others = {other.topics for other in group.members.values() if other is not me} if gone else ()
        return any(all(topic not in topics for topics in others) for topic in gone)


#: Jitter: a beat comes after this share of its interval at the earliest (T4).
EARLIEST_BEAT = 0.8

#: If the log still shows an earlier instance as a member, joining waits up to this share of the session, at most
#: LONGEST_RESTART_MS. So a process that crashes in a loop causes fewer rebalances (G20).
RESTART_SHARE = 1 / 20
LONGEST_RESTART_MS = 500.0

#: Pieces start this long (ms) after a join, since they may move again at once if many members start (G20).
SETTLE_MS = 50.0


class MemberState(StrEnum):
    """The state of a consumer of a coordinated group (G7)."""

    DOWN = "DOWN"
    STARTUP = "STARTUP"
    PART_OF_GROUP = "PART_OF_GROUP"
    REDISCOVER = "REDISCOVER"


class Joining(NamedTuple):
    """A JoinGroup that the log has not answered: its token, and its offset once it is acknowledged."""

    token: int
    offset: int | None = None


class Membership:
    """Our membership, as our replica of the group's home shows it. Times: own clock, ms."""

    def __init__(
        self,
        settings: EngineSettings,
        options: GroupOptions,
        subscription: Subscription,
        worlds: Mapping[int, World],
        outbox: Outbox,
        rng: Random,
    ) -> None:
        self.settings = settings
        self.options = options
        self.home: int = route_group(settings.group_id, settings.coordination_partitions)
        self.member_id: str = ""
        self.proof: MemberProof = MemberProof(options.session_timeout_ms)
        self.witness: HeardMembers = HeardMembers(settings.client_id, rng)
        #: When pieces may start.
        self.open_at: float = inf
        #: Our JoinGroup in flight; None: the log answered the last one.
        self.joining: Joining | None = None
        #: Whether we have sent a LeaveGroup.
        self.leaving: bool = False
        #: Whether the group took checkpoints when we joined, and so until the end of this membership (X11).
        self.takes_checkpoints: bool = False
        self._was_member = False
        self._is_replaced = False
        self._worlds = worlds
        self._reports = TopicReports(subscription, options.session_timeout_ms, rng)
        self._outbox = outbox
        self._rng = rng
        #: When to send again what the log has not answered (marks, a join, a LeaveGroup); −inf: nothing was sent yet.
        self._again_at = -inf
        self._next_beat = inf

    # State.

    @property
    def group(self) -> Group | None:
        """The group, in our replica of its home."""
        return self._worlds[self.home].group(self.settings.group_id)

    @property
    def joined(self) -> bool:
        """Whether the log has shown us as a member, and not yet as gone."""
        return bool(self.member_id)

    @property
    def me(self) -> Member | None:
        """Our own entry in the group; None: the log does not show us as a member."""
        group = self.group
        if group is None or not self.member_id:
            return None
        return group.sender(self.member_id, self.settings.client_id, self.settings.instance_id)

    def look_for_successor(self) -> bool:
        """Whether another instance of our client_id is a member, or was one since we were one ourselves (G20)."""
        group = self.group
        found = None if group is None else group.clients.get(self.settings.client_id)
        if self._was_member and found is not None and found.instance_id != self.settings.instance_id:
            self._is_replaced = True
        return self._is_replaced

    @property
    def seen(self) -> int:
        """The offset above all records of the group's home that our replica has applied."""
        return self._worlds[self.home].next_offset

    @property
    def generation(self) -> int:
        """The generation of the group, as our replica knows it; 0: no group."""
        group = self.group
        return 0 if group is None else group.generation

    @property
    def other_strategy(self) -> str:
        """That a setting gives the group another strategy than our program names (R6); "": it does not."""
        group = self.group
        wanted = None if group is None else group.settings.strategy
        is_ours = wanted is None or wanted == self.options.strategy
        return "" if is_ours else other_strategy(self.settings, self.options, wanted or "")

    def state(self, now: float) -> MemberState:
        """The state, for display only: nothing depends on it."""
        if self.joined:
            return MemberState.PART_OF_GROUP if now < self.proof.valid_until else MemberState.REDISCOVER
        return MemberState.STARTUP

    @property
    def interval_ms(self) -> float:
        """The longest time between two beats, and before sending again what the log does not answer."""
        return self.options.session_timeout_ms / self.options.beats

    # Joining.

    def unmarked(self) -> list[int]:
        """CPs that do not know the group as coordinated yet; [] once it has a generation (G2)."""
        if self.generation > 0:
            return []
        return [cp for cp, world in self._worlds.items() if world.group(self.settings.group_id) is None]

    def is_claimed(self) -> bool:
        """Whether any CP knows a lease of the group (G1)."""
        group_id = self.settings.group_id
        return any(lease.group_id == group_id for world in self._worlds.values() for lease in world.leases())

    def join(self, now: float, may: Callable[[float], bool] = lambda now: True) -> None:
        """Mark every CP (G2), then join; repeat both if the log does not answer. may: whether to join now."""
        if now < self._again_at or _is_blind(self.generation, self._worlds, self.settings):
            return
        is_first, self._again_at = self._again_at == -inf, now + self.interval_ms
        if unmarked := self.unmarked():
            for cp in unmarked:
                self._outbox.append(cp, ConfigureGroup(*self.settings.ids))
            return
        if not may(now):
            return
        if is_first and (wait_ms := self._back_off_ms()):
            self._again_at = now + wait_ms
            return
        self.joining = Joining(self._send_join(now))

    def _send_join(self, now: float) -> int:
        return self.send(
            JoinGroup(
                *self.settings.ids,
                self.member_id,
                self._worlds[self.home].next_offset,
                self.options.session_timeout_ms,
                self.options.strategy,
                self.options.allow_key_share,
                self._reports.subscription.pattern,
                self._reports.subscription.counts(),
            ),
            now,
        )

    def _back_off_ms(self) -> float:
        """How long (ms) a restart waits. Our replica does not know when the earlier instance joined."""
        group = self.group
        if group is None or self.settings.client_id not in group.clients:
            return 0.0
        return self._rng.random() * min(RESTART_SHARE * self.options.session_timeout_ms, LONGEST_RESTART_MS)

    def marked(self, now: float) -> None:
        """A CP now knows the group."""
        if not self.unmarked():
            self.try_again(now)

    def try_again(self, now: float) -> None:
        """What we wait for before we join may have come."""
        if not self.joined:
            self._again_at = min(self._again_at, now)

    def join_answered(self) -> None:
        """Our JoinGroup was applied."""
        self.joining = None

    def has_joined(self, member_id: str, now: float) -> None:
        """Our JoinGroup was applied as accepted."""
        if not self.joined:
            self.open_at = now + SETTLE_MS
            self.takes_checkpoints = self.group is not None and self.group.checkpoints is not None
        self.member_id = member_id
        self._was_member = True
        self._beat_later(now)
        self.witness.look(self.group, now)

    def expelled(self, now: float, again_after_ms: float = 0.0) -> None:
        """The log no longer shows us as a member; we join again after this time."""
        self.member_id = ""
        self.joining, self.leaving, self.takes_checkpoints = None, False, False
        self.proof.reset()
        self.witness.forget()
        self.open_at = self._next_beat = self._reports.due = inf
        self._again_at = now + again_after_ms

    # Beats.

    def wake(self, now: float, commits: Callable[[], bool]) -> None:
        """Beat if it is due. commits: sends what is done, which counts as a beat; False: there is nothing new."""
        if not self.joined or self.leaving or now < min(self._next_beat, self.witness.due):
            return
        if now >= self.witness.due:
            is_needed = self.witness.is_needed(self.group, now)
            self.witness.look(self.group, now)
            if not is_needed and now < self._next_beat:
                return
        self._beat_later(now)
        if not commits():
            self.beat(now)

    def beat(self, now: float) -> int:
        """Send a heartbeat. Returns its token."""
        beat: Record = GroupHeartbeat(*self.settings.ids, self.member_id, self.generation)
        if self.takes_checkpoints and self._worlds[self.home].pause(self.settings.group_id) is not None:
            # During a pause only an answer passes: this one names no barrier (X16).
            beat = AnswerBarrier(*self.settings.ids, self.member_id, self.generation, 0, REFUSED, ())
        return self.send(beat, now)

    def beat_soon(self, now: float) -> None:
        """Beat at the next wake."""
        self._next_beat = min(self._next_beat, now)

    def send(self, record: Record, now: float) -> int:
        """Append our record, which also counts as a beat. Returns its token."""
        token = self._outbox.append(self.home, record)
        self.proof.sent(token, self.home, now)
        return token

    def acked(self, token: int, offset: int | None) -> None:
        """The broker answered an append."""
        if self.joining is not None and token == self.joining.token:
            self.joining = Joining(token, offset)

    def _beat_later(self, now: float) -> None:
        self._next_beat = now + self.interval_ms * self._rng.uniform(EARLIEST_BEAT, 1.0)

    # Topics.

    def report(self, now: float) -> None:
        """Send a TopicsChanged, if it is due (G12); or join again (G11): we read other topics than we joined with."""
        if not self.leaving and self._reports.is_other(self.me):
            if now >= self._again_at:
                self._again_at = now + self.interval_ms
                self._send_join(now)
        elif self._reports.is_due(self.group, None if self.leaving else self.me, now):
            self.send(TopicsChanged(*self.settings.ids, self.member_id, self._reports.subscription.counts()), now)

    # Leaving.

    def leave(self, now: float) -> None:
        """Append a LeaveGroup; repeat it if the log does not answer."""
        if not self.leaving or now >= self._again_at:
            self.joining, self.leaving = None, True
            self._again_at = now + self.interval_ms
            self._outbox.append(self.home, LeaveGroup(*self.settings.ids, self.member_id, self.generation))

    def leave_unseen(self) -> bool:
        """Leave the membership that a join in flight may create (G6); otherwise rejected. Returns whether sent."""
        joining = self.joining
        if self.joined or joining is None or joining.offset is None:
            return False
        member_id = member_id_of(self.settings.group_id, self.home, joining.offset)
        self.joining = Joining(joining.token)
        self._outbox.append(self.home, LeaveGroup(*self.settings.ids, member_id, self.generation))
        return True

    def deadline(self, now: float, stays: bool) -> float:
        """When something is due again. stays: it reports topics and starts pieces; it does not release everything."""
        if self.leaving or not self.joined:
            waits = not self.leaving and _is_blind(self.generation, self._worlds, self.settings)
            return inf if waits else self._again_at
        due = min(self._next_beat, self.witness.due)
        if not stays:
            return due
        due = min(due, self._reports.due)
        return min(due, self.open_at) if now < self.open_at else due


def _is_blind(generation: int, worlds: Mapping[int, World], settings: EngineSettings) -> bool:
    """Whether it may not join yet: before a group's first join it must read all CPs (G2). generation: at home."""
    return generation == 0 and len(worlds) < settings.coordination_partitions
