"""What one consumer has as a member of a coordinated group: pieces as the log shows them, and what is done of them.

Nothing is asked for: who owns what follows from the log (G16). A partition is taken up when all of its keys are ours
and meant for us, and let go when a part of it is meant for somebody else: finished, committed, and no more (G18).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import inf
from random import Random
from typing import NamedTuple, cast

from kafka_marshal.engine.effects import Key, Note, Outbox, Warn
from kafka_marshal.engine.groups.member import Membership, MemberState
from kafka_marshal.engine.groups.pieces import HeldPiece, LettingGo
from kafka_marshal.engine.groups.refusals import below_level, refusal_of
from kafka_marshal.engine.kinds import claimed_group
from kafka_marshal.engine.plane import PAUSED, HandIn, Loss, Owner, Ownership, Work
from kafka_marshal.engine.settings import BEATS_PER_INTERVAL, EngineSettings, GroupOptions
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import ClientReplacedError, GroupForgottenError, MarshalError
from rationalizer import (
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    ForgetGroup,
    JoinGroup,
    LeaveGroup,
    Outcome,
    Piece,
    Progress,
    ReleaseGroup,
    World,
    codes,
)
from rationalizer.limits import HEAD_FIELDS, MAX_COMMIT_RANGES, MAX_KEY_HASH
from rationalizer.wire.unpacking import Message
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

__all__ = ["GroupClient", "Host"]

#: Why a partition is let go when it is meant for another member.
REVOKED = "it is assigned to another member"

#: Why a partition is lost when the log shows it as ours no longer, for people.
NOT_OURS = "the log shows it as another member's, or this process as no member"

#: An evicted member leaves the group alone for this many sessions (G20).
EVICTED_SESSIONS = 3

#: Coordinated groups came with this level of the log (E4).
GROUPS_LEVEL = 2

#: Entries of one CommitOffsets. 1,000 entries of the longest names stay below the 900,000 bytes of L1.
MAX_ENTRIES = 1_000


class Host(NamedTuple):
    """What a member asks of its engine, and tells it."""

    #: Why everything is to be let go; "": it is not.
    lets_all_go: Callable[[], str]
    #: An operator, of this instance_id, asks this process to hand over (C19).
    drain: Callable[[str], object]
    #: Somebody set these positions (P11).
    unblock: Callable[[Collection[Key]], object]


class GroupClient:
    """The source of a consumer's partitions: a :class:`~kafka_marshal.engine.plane.PartitionSource`."""

    def __init__(
        self,
        settings: EngineSettings,
        options: GroupOptions,
        subscription: Subscription,
        worlds: Mapping[int, World],
        outbox: Outbox,
        rng: Random,
        host: Host,
    ) -> None:
        self._host = host
        self.member = Membership(settings, options, subscription, worlds, outbox, rng)
        self.lets_all_go = host.lets_all_go
        self.pieces: dict[Key, HeldPiece] = {}
        self._settings = settings
        self._options = options
        self._subscription = subscription
        self._worlds = worlds
        self._outbox = outbox
        #: Why we are no member, and will be none; None: we are, or try to be.
        self.failure: MarshalError | None = None
        #: To be committed with the next flush.
        self._entries: list[CommitEntry] = []
        #: The generation that our pieces were looked at in; −1: they are to be looked at anew.
        self._seen = -1
        #: When they are looked at anew in any case.
        self._look_at = inf
        self._errors: list[Exception] = []

    @property
    def _again_ms(self) -> float:
        """What the log does not answer is sent again after this time."""
        return self._options.session_timeout_ms / BEATS_PER_INTERVAL

    @property
    def session_timeout_ms(self) -> int:
        """As it joins with."""
        return self._options.session_timeout_ms

    def state(self, now: float) -> MemberState:
        """By name only (G7). DOWN: it is no member, and joins no more."""
        is_over = self.failure is not None or (not self.member.joined and bool(self.lets_all_go()))
        return MemberState.DOWN if is_over else self.member.state(now)

    def attach(self, work: Work, errors: list[Exception]) -> None:
        """For whom; once, before anything else. errors: to be raised from the user's next call."""
        self._work = work
        self._errors = errors

    # What is known.

    def progress(self, key: Key) -> Progress | None:
        group = self.member.group
        kept = None if group is None else group.kept(*key)
        return None if kept is None else kept.progress

    def is_held(self, key: Key) -> bool:
        me = self.member.me  # of what is ours we report ourselves, whether or not we work on it
        return any(me is None or part.owner != me.slot for part in self._parts(key))

    def is_first(self, key: Key) -> bool:
        return self.progress(key) is None

    def came_later(self, key: Key) -> bool:
        group = self.member.group
        return group is not None and bool(group.progress.get(key[0]))

    def sets_start(self, key: Key) -> bool:
        return self.is_first(key)

    def claims_before(self, key: Key) -> Mapping[int, int] | None:
        return None

    def closed(self, cp: int, now: float) -> str:
        world = self._worlds[cp]
        if world.required_level is not None:
            return "its part of the coordination topic needs a newer release"
        return PAUSED if self._is_paused() else ""

    # What the log is told.

    def beat(self, own: Ownership, last_offset: int, now: float) -> None:
        if self.is_first(own.key):
            self._commit(CommitEntry(*own.key, action=START, through=last_offset))
        elif last_offset > self._stable(own.key):
            self._commit(CommitEntry(*own.key, through=last_offset))
        else:  # the log knows: it would not answer
            _piece(own).owner.beaten(last_offset, True, now)

    def commit(self, own: Ownership, ranges: Sequence[tuple[int, int]]) -> None:
        self._commit(CommitEntry(*own.key, ranges=tuple(ranges)))

    def grant(self, own: Ownership, last_offset: int, now: float) -> None:
        self._commit(CommitEntry(*own.key, through=last_offset))

    def let_go(self, own: Ownership, last_offset: int | None, why: str, now: float) -> None:
        piece = _piece(own)
        piece.letting_go = LettingGo(last_offset, why, now)
        piece.prove(piece.valid_until)
        self._outbox.add(Note("released", piece.key))
        self._commit(CommitEntry(*piece.key, action=LET_GO, through=last_offset))

    def give_back(self, own: Ownership, last_offset: int | None) -> None:
        """What was done of a piece that is over for us: the log says whether it counts."""
        if last_offset is not None:
            self._commit(CommitEntry(*own.key, through=last_offset))

    def lose(self, own: Ownership, reason: Loss, now: float) -> None:
        self._end(_piece(own), reason, now)
        if reason is Loss.HANDLER_TIMEOUT and self.member.joined and not self.member.leaving:
            self._send_commits(now)
            for other in list(self.pieces.values()):
                self._end(other, reason, now)
            self._leave(now)

    def drop(self, own: Ownership) -> None:
        _piece(own).end()
        self.pieces.pop(own.key, None)

    def _commit(self, *entries: CommitEntry) -> None:
        """Goes out with the next flush: many partitions begin, or end, at once."""
        self._entries.extend(entries)

    def flush(self, now: float) -> None:
        """Append what is to be committed, in as few records as can be."""
        while self._entries and self.member.joined:
            taken = ranges = 0
            for entry in self._entries[:MAX_ENTRIES]:
                ranges += len(entry.ranges)
                if taken and ranges > MAX_COMMIT_RANGES:
                    break
                taken += 1
            entries, self._entries = self._entries[:taken], self._entries[taken:]
            member = self.member
            ids = (*self._settings.ids, member.member_id)
            member.send(CommitOffsets(*ids, member.generation, False, tuple(entries)), now)  # in_order: nobody asks
        self._entries.clear()

    # What it is told.

    def changed(self, key: Key) -> None:
        pass

    def look_again(self) -> None:
        self._seen = -1

    def owes_after(self, reason: str) -> bool:
        return reason in (Loss.EVICTED, Loss.HANDLER_TIMEOUT)

    def evicted(self, key: Key, now: float) -> None:
        pass

    def measured(self, own: Ownership, done: int, log_end: int, now: float) -> None:
        pass

    def is_claim_over(self, own: Ownership, now: float) -> bool:
        return False

    def claim_due(self, own: Ownership, now: float) -> float:
        return inf

    def acked(self, token: int, offset: int | None, now: float) -> None:
        """The broker answered an append."""
        self.member.proof.acked(token, offset)
        self._prove()

    def compare_clocks(self, now: float) -> None:
        """T5."""
        if self.member.proof.compare_clocks(self._worlds[self.member.home].log_time, now):
            self.member.beat_soon(now)
            self._prove()

    def _prove(self) -> None:
        until = self.member.proof.valid_until
        for piece in self.pieces.values():
            if piece.valid_until != until:
                piece.prove(until)

    # Records that our replica has applied.

    def applied(self, cp: int, offset: int, outcome: Outcome, now: float) -> None:
        """Our replica applied one record, of whatever group."""
        message = outcome.message
        if self.failure is not None or message is None or message[4] != self._settings.group_id:
            return
        if outcome.type == ConfigureGroup.__name__:
            self._refused(outcome)
            self.member.marked(now)
        if cp != self.member.home:
            return
        own = message[2] == self._settings.instance_id and message[3] == self._settings.client_id
        group = self.member.group
        if outcome.accepted and group is not None:
            self.member.witness.heard(group, message[3], now)
        if own and outcome.type == JoinGroup.__name__:
            self.member.join_answered()
            self._join_applied(outcome, now)
        if own and outcome.accepted and outcome.of_group and outcome.type != LeaveGroup.__name__:
            self.member.proof.applied(cp, offset, outcome.log_time, now)
            self._prove()
        if outcome.type in (ForgetGroup.__name__, ReleaseGroup.__name__):
            self._seen = -1
        if outcome.type == LeaveGroup.__name__ and not own and not outcome.accepted:
            self._ask_to_leave(message)
        self._verify(outcome, own, now)
        if outcome.type == CommitOffsets.__name__ and outcome.entries is not None:
            self._commits_applied(message[HEAD_FIELDS:], outcome, own, now)
        if self.member.joined and self.member.generation != self._seen:
            self.member.witness.look(self.member.group, now)
            self._look_at_all(now)

    def _join_applied(self, outcome: Outcome, now: float) -> None:
        if outcome.accepted and outcome.member is not None:
            self.member.has_joined(outcome.member, now)
            self._seen = -1
        elif outcome.code == codes.UNKNOWN_CONSUMER:
            self._expelled(Loss.FENCED, now)
        else:
            self._refused(outcome)

    def _refused(self, outcome: Outcome) -> None:
        error = refusal_of(outcome.code, self._settings, self._options)
        if error is not None and not outcome.accepted:
            self.fail(error)

    def _ask_to_leave(self, message: Message) -> None:
        """A LeaveGroup that names us under an instance that is not ours: an operator asks us to hand over (C19).

        A watchdog that speaks late for an older instance names that one's member_id.
        """
        if message[3] == self._settings.client_id and message[HEAD_FIELDS] == self.member.member_id:
            self._host.drain(cast("str", message[2]))

    def _verify(self, outcome: Outcome, own: bool, now: float) -> None:
        """Whatever happened: the log shows us as a member, or we are none (G20)."""
        if not self.member.joined or self.member.me is not None:
            return
        group = self.member.group
        if self.member.leaving:
            self._expelled(Loss.FENCED, now)
            return
        if own and outcome.type == LeaveGroup.__name__ and outcome.accepted:  # ours was not sent
            self._outbox.add(Warn("an operator removed this member from its group (kafka-marshal evict)"))
            self._expelled(Loss.EVICTED, now, EVICTED_SESSIONS * self._options.session_timeout_ms)
            return
        if group is None:
            self.fail(
                GroupForgottenError(
                    f"group {self._settings.group_id!r} was forgotten (kafka-marshal forget-group): its progress is "
                    "gone from the log, and this member has ended. What it had in hand and had not committed counts as "
                    "not done. Start it anew to begin a new group"
                )
            )
        elif self._settings.client_id in group.clients:
            self.fail(
                ClientReplacedError(
                    f"a newer instance of client_id {self._settings.client_id!r} has joined the group: this member has "
                    "ended and commits nothing more. Give every worker of a group its own client_id; a restarted one "
                    "keeps its old one"
                )
            )
        else:
            self._outbox.add(
                Warn("this member was silent for longer than its session, and was taken for dead; it joins again")
            )
        self._expelled(Loss.FENCED, now)

    def _expelled(self, reason: Loss, now: float, again_after_ms: float = 0.0) -> None:
        self.member.expelled(now, again_after_ms)
        self._entries.clear()
        for piece in list(self.pieces.values()):
            if piece.letting_go is None:
                self._end(piece, reason, now)
            else:
                self._released(piece, now)

    def end(self, now: float) -> None:
        """This Marshal has ended."""
        for piece in list(self.pieces.values()):
            self._end(piece, Loss.ENDED, now)

    def fail(self, error: MarshalError) -> None:
        """We are no member, and will be none."""
        if self.failure is None:
            self.failure = error
            self._errors.append(error)

    def _commits_applied(self, fields: Sequence[object], outcome: Outcome, own: bool, now: float) -> None:
        entries = cast("Sequence[tuple[str, int, int, int, int, int | None, object, object]]", fields[-1])
        for (topic, partition, _, _, action, through, _, _), code in zip(entries, outcome.entries or (), strict=True):
            key = (topic, partition)
            accepted = code in codes.ACCEPTED
            # Whether or not we are a member: under a pause nobody is.
            if not own and action == COMMIT and code == codes.REPOSITIONED:
                self._host.unblock([key])
            if own and (piece := self.pieces.get(key)) is not None:
                self._own_entry_applied(piece, action, through, code, now)
            if (action == LET_GO and accepted) or (own and not accepted):
                self._look(key, now)

    def _own_entry_applied(self, piece: HeldPiece, action: int, through: int | None, code: str, now: float) -> None:
        accepted = code in codes.ACCEPTED
        if action == START:  # whoever was first: it goes on from what the log says (P9)
            piece.owner.beaten(through, accepted or code == codes.ALREADY_STARTED, now)
        elif action == COMMIT and through is not None:
            piece.owner.beaten(through, accepted, now)
            piece.owner.answered(through, accepted, code, now)
        elif action == LET_GO and accepted and piece.letting_go is not None:
            piece.owner.handed_in(HandIn(through, code, pausing=False))
            self._released(piece, now)
        elif action == LET_GO and piece.letting_go is not None:
            piece.letting_go.sent_at = -inf  # by an older order: once more, if it is still to go (G14)

    # What is ours.

    def _parts(self, key: Key) -> Sequence[Piece]:
        group = self.member.group
        topic = None if group is None else group.pieces.get(key[0])
        return () if topic is None else topic[key[1]]

    def _look_at_all(self, now: float) -> None:
        group, me = self.member.group, self.member.me
        if group is None or me is None:
            return
        self._seen, self._look_at = group.generation, inf
        keys = {(name, number) for name, topic in group.pieces.items() for number, _ in topic.owned_by(me.slot)}
        for key in sorted(keys | self.pieces.keys()):
            self._look(key, now)

    def _look(self, key: Key, now: float) -> None:
        """What the log shows of a partition, and what follows (G18)."""
        me = self.member.me
        if me is None:
            return
        parts = self._parts(key)
        ours = [part for part in parts if part.owner == me.slot]
        whole = len(ours) == len(parts) and sum(part.hi - part.lo + 1 for part in parts) == MAX_KEY_HASH + 1
        since = max((part.since for part in ours), default=-1)
        meant = whole and all(part.target == me.slot for part in ours)
        piece = self.pieces.get(key)
        if piece is not None and (not whole or piece.epoch != since):
            if piece.letting_go is None:
                self._end(piece, Loss.FENCED, now)
            else:
                self._released(piece, now)
            piece = None
        if piece is None and meant:
            self._take_up(key, since, now)
        elif piece is None:
            self._let_go_unworked(key, [part for part in ours if part.revoked >= 0], now)
        elif not meant and piece.letting_go is None:
            self._work.let_go(key, REVOKED, now)

    def _take_up(self, key: Key, since: int, now: float) -> None:
        is_open = now >= self.member.open_at and not self.member.leaving and not self._must_go()
        if not is_open or key in self._work.parts or key in self._work.blocked or self._work.owes:
            return
        if key not in self._subscription.partitions:
            return  # the cluster has not shown it to us yet, or no longer

        def want(owner: Owner) -> Ownership:
            piece = HeldPiece(key, self.member.home, since, self._options.session_timeout_ms, owner)
            piece.prove(self.member.proof.valid_until)
            self.pieces[key] = piece
            return piece

        self._work.take_on(key, self.is_first(key), want)
        self._outbox.add(Note("claimed", key, words="took up"))
        self.pieces[key].owner.granted(now)

    def _let_go_unworked(self, key: Key, parts: Sequence[Piece], now: float) -> None:
        """What was revoked before we began with it."""
        if parts and not self.member.leaving:
            self._look_at = min(self._look_at, now + self._again_ms)  # the log may not answer
            self._commit(*(CommitEntry(*key, part.lo, part.hi, LET_GO) for part in parts))

    def _end(self, piece: HeldPiece, reason: Loss, now: float) -> None:
        if self.pieces.get(piece.key) is piece:
            del self.pieces[piece.key]
        if piece.held:
            self._outbox.add(Note("lost", piece.key, NOT_OURS if reason is Loss.FENCED else reason))
        piece.end()
        piece.owner.lost(reason, now)

    def _released(self, piece: HeldPiece, now: float) -> None:
        if self.pieces.get(piece.key) is piece:
            del self.pieces[piece.key]
        piece.end()
        piece.owner.released(now)

    def _stable(self, key: Key) -> int:
        progress = self.progress(key)
        return -1 if progress is None else progress.stable

    def _is_paused(self) -> bool:
        return self._worlds[self.member.home].pause(self._settings.group_id) is not None

    def _must_go(self) -> bool:
        return not self._work.takes_on or bool(self.lets_all_go()) or self._is_paused() or self.failure is not None

    # Time.

    def step(self, now: float) -> None:
        """Be a member, and take up what is ours. (Not while the consumer closes, or lets all go.)"""
        if self.failure is not None or self._must_go():
            return
        if not self.member.joined:
            self._try_to_join(now)
            return
        self.member.report(now)
        opens = -inf < self.member.open_at <= now
        if opens:
            self.member.open_at = -inf
        if opens or self._seen != self.member.generation or now >= self._look_at:
            self._look_at_all(now)

    def _try_to_join(self, now: float) -> None:
        if self._work.owes:
            return
        if any(world.level < GROUPS_LEVEL for world in self._worlds.values()):
            self.fail(below_level(self._settings))
        elif self.member.generation == 0 and self.member.is_claimed():
            self.fail(claimed_group(self._settings.group_id))
        else:
            self.member.join(now)

    def wake(self, now: float) -> None:
        """Beats, and what goes out again; also while the consumer closes."""
        if not self.member.joined:
            return
        if self.member.leaving or (self._must_go() and not self._work.parts):
            self._leave(now)
            return
        self.member.wake(now, self._send_commits)
        for piece in self.pieces.values():
            going = piece.letting_go
            if going is not None and now >= going.sent_at + self._again_ms:
                going.sent_at = now
                self._commit(CommitEntry(*piece.key, action=LET_GO, through=going.last_offset))

    def _leave(self, now: float) -> None:
        self.flush(now)
        self.member.leave(now)

    def _send_commits(self, now: float) -> bool:
        """Beat with what is done; False: nothing is that the log does not know."""
        for piece, last_offset in self.uncommitted():
            self._commit(CommitEntry(*piece.key, through=last_offset))
        return bool(self._entries)

    def uncommitted(self) -> Iterator[tuple[HeldPiece, int]]:
        """Pieces of which more is done without a gap than the log knows: each with the last offset done."""
        for piece in self.pieces.values():
            if piece.letting_go is None and (last_offset := piece.owner.progress_to_report()) is not None:
                yield piece, last_offset

    def last_words(self, now: float) -> None:
        """Before ending without a letting-go."""
        self._send_commits(now)
        self.flush(now)

    def commit_all(self, now: float) -> None:
        """Commit what is done now, out of turn."""
        if self.member.joined:
            self._send_commits(now)

    @property
    def is_committed(self) -> bool:
        """Whether the log shows all that is done without a gap."""
        return next(self.uncommitted(), None) is None

    @property
    def has_left(self) -> bool:
        """Whether the log shows us as no member, nor will."""
        return self.failure is not None or not (self.member.joined or self.member.under_way == "join")

    @property
    def deadline(self) -> float:
        return inf

    def due(self, now: float) -> float:
        """When ``wake`` or ``step`` has something to do again."""
        if self.failure is not None and not self.member.joined:
            return inf
        going = [piece.letting_go for piece in self.pieces.values() if piece.letting_go is not None]
        times = [letting_go.sent_at + self._again_ms for letting_go in going]
        if self.member.joined or not self._must_go():
            times.append(self.member.deadline(now))
        if self.member.joined and not self._must_go():
            times.append(self._look_at)
        return min(times, default=inf)


def _piece(own: Ownership) -> HeldPiece:
    return cast("HeldPiece", own)  # it comes from ``_take_up``, above
