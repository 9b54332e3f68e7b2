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
from kafka_marshal.engine.groups.commits import Commits
from kafka_marshal.engine.groups.member import Membership, MemberState
from kafka_marshal.engine.groups.owned import covers, meant_for, owned_since, span_of
from kafka_marshal.engine.groups.pieces import NOT_OURS, REVOKED, HeldPiece, KeyShare, LettingGo
from kafka_marshal.engine.groups.refusals import TAKEN_FOR_DEAD, below_level, forgotten, refusal_of, replaced
from kafka_marshal.engine.kinds import claimed_group
from kafka_marshal.engine.plane import PAUSED, HandIn, Loss, Owner, Ownership, Work
from kafka_marshal.engine.settings import BEATS_PER_INTERVAL, EngineSettings, GroupOptions
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import MarshalError
from kafka_marshal.types import SharedEpoch
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
from rationalizer.levels import GROUPS_LEVEL
from rationalizer.limits import HEAD_FIELDS, MAX_KEY_HASH
from rationalizer.wire.unpacking import Message
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

__all__ = ["GroupClient", "Host"]

#: An evicted member leaves the group alone for this many sessions (G20).
EVICTED_SESSIONS = 3


class Host(NamedTuple):
    """What a member asks of its engine, and tells it."""

    #: Why everything is to be let go; "": it is not.
    lets_all_go: Callable[[], str]
    #: An operator, of this instance_id, asks this process to hand over (C19).
    drain: Callable[[str], object]
    #: Somebody set these positions (P11).
    unblock: Callable[[Collection[Key]], object]
    #: The log answers a grant of what is ours no longer: key, None, last offset, accepted (C13).
    answered_late: Callable[[Key, None, int, bool], object]


class GroupClient:
    """The source of a consumer's partitions: a :class:`~kafka_marshal.engine.plane.PartitionSource`."""

    tells_start = True

    def __init__(
        self,
        settings: EngineSettings,
        options: GroupOptions,
        subscription: Subscription,
        worlds: Mapping[int, World],
        outbox: Outbox,
        rng: Random,
        host: Host,
        starts_late: bool = False,
    ) -> None:
        self._host = host
        self.member: Membership = Membership(settings, options, subscription, worlds, outbox, rng)
        self.lets_all_go: Callable[[], str] = host.lets_all_go
        self.pieces: dict[Key, HeldPiece] = {}
        self._settings = settings
        self._options = options
        #: Its ``start=`` is not "earliest": where a partition begins is settled before others get it (P9).
        self._starts_late = starts_late
        self._subscription = subscription
        self._worlds = worlds
        self._outbox = outbox
        #: Why we are no member, and will be none; None: we are, or try to be.
        self.failure: MarshalError | None = None
        self._commits = Commits(self.member)
        #: The generation that our pieces were looked at in; −1: they are to be looked at anew.
        self._seen = -1
        #: When (own clock) the home's log time moved last.
        self._moved: float | None = None
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
        progress, piece = self._whole_progress(key), self.pieces.get(key)
        if progress is None or piece is None or piece.keys is None:
            return progress
        ours = Progress()  # as though there were no other keys
        ours.through(piece.keys.stable())
        if ranges := [(first, last) for first, last in progress.ranges if last > ours.stable]:
            ours.commit(ranges)
        return ours

    def _whole_progress(self, key: Key) -> Progress | None:
        group = self.member.group
        kept = None if group is None else group.kept(*key)
        return None if kept is None else kept.progress

    def is_held(self, key: Key) -> bool:
        me = self.member.me  # of what is ours we report ourselves, whether or not we work on it
        return any(me is None or part.owner != me.slot for part in self._parts(key))

    def is_first(self, key: Key) -> bool:
        return self._whole_progress(key) is None

    def came_later(self, key: Key) -> bool:
        group = self.member.group
        return group is not None and bool(group.progress.get(key[0]))

    def claims_before(self, key: Key) -> Mapping[int, int] | None:
        return None

    def closed(self, cp: int, now: float) -> str:
        world = self._worlds[cp]
        if world.required_level is not None:
            return "its part of the coordination topic needs a newer release"
        return PAUSED if now < self._paused_until(now) else ""

    def still_lets_go(self, own: Ownership, why: str, now: float) -> bool:
        me = self.member.me
        if me is None or self.member.leaving or self._must_go(now):
            return True
        meant = meant_for(me.slot, self._parts(own.key), share=self._options.allow_key_share)
        return _piece(own).span != span_of(meant)

    # What the log is told.

    def beat(self, own: Ownership, last_offset: int, now: float) -> None:
        if self.is_first(own.key):
            self._commits.add(CommitEntry(*own.key, action=START, through=last_offset))
        elif (progress := self.progress(own.key)) is None or last_offset > progress.stable:
            self._through(own, last_offset)
        else:  # the log knows: it would not answer
            _piece(own).owner.beaten(last_offset, True, now)

    def commit(self, own: Ownership, ranges: Sequence[tuple[int, int]]) -> None:
        self._commits.add(CommitEntry(*own.key, ranges=tuple(ranges)))

    def grant(self, own: Ownership, last_offset: int, now: float) -> None:
        self._through(own, last_offset)

    def let_go(self, own: Ownership, last_offset: int | None, why: str, now: float) -> None:
        piece = _piece(own)
        piece.letting_go = LettingGo(last_offset, why, now)
        piece.prove(piece.valid_until)
        self._outbox.add(Note("released", piece.key))
        if last_offset is not None and self.is_first(piece.key):
            self._commits.add_first(CommitEntry(*piece.key, action=START, through=last_offset))
        self._commits.add(CommitEntry(*piece.key, *piece.span, LET_GO, last_offset))

    def give_back(self, own: Ownership, last_offset: int | None) -> None:
        """What was done of a piece that is over for us: the log says whether it counts."""
        if last_offset is not None:
            self._through(own, last_offset)

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

    def _through(self, own: Ownership, last_offset: int) -> None:
        self._commits.add(CommitEntry(*own.key, *_piece(own).span, through=last_offset))

    def flush(self, now: float) -> None:
        """Append what is to be committed."""
        self._commits.flush(now)

    # What it is told.

    def look_again(self, key: Key | None = None) -> None:
        if key is None:
            self._seen = -1

    def taken_away(self, key: Key, reason: str, now: float) -> bool:
        return reason in (Loss.EVICTED, Loss.HANDLER_TIMEOUT)

    def measured(self, own: Ownership, done: int, log_end: int, now: float) -> None:
        pass

    def is_claim_over(self, own: Ownership, now: float) -> bool:
        return False

    def claim_due(self, own: Ownership, now: float) -> float:
        return inf

    def acked(self, token: int, offset: int | None, now: float) -> None:
        """The broker answered an append."""
        self.member.proof.acked(token, offset)
        self.member.acked(token, offset)
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
        if cp == self.member.home:
            self._moved = now
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
        if outcome.type == ForgetGroup.__name__ and outcome.accepted:
            self._host.unblock(list(self._work.blocked))
        self._verify(outcome, own, now)
        if outcome.type == CommitOffsets.__name__ and outcome.entries is not None:
            fields = message[HEAD_FIELDS:]
            if not fields[0]:
                self._positions_set(fields, outcome)
            elif self.member.joined:
                self._commits_applied(fields, outcome, own, now)
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
            self.fail(forgotten(self._settings))
        elif self._settings.client_id in group.clients:
            self.fail(replaced(self._settings))
        else:
            self._outbox.add(Warn(TAKEN_FOR_DEAD))
        self._expelled(Loss.FENCED, now)

    def _expelled(self, reason: Loss, now: float, again_after_ms: float = 0.0) -> None:
        self.member.expelled(now, again_after_ms)
        self._commits.clear()
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
        """We will be no member."""
        if self.failure is None:
            self.failure = error
            self._errors.append(error)

    def _positions_set(self, fields: Sequence[object], outcome: Outcome) -> None:
        """By an admin, where no member is (G21): maybe to where they stood."""
        answers = zip(_entries(fields), outcome.entries or (), strict=True)
        self._host.unblock([entry[:2] for entry, code in answers if code in codes.ACCEPTED and entry[5] is not None])

    def _commits_applied(self, fields: Sequence[object], outcome: Outcome, own: bool, now: float) -> None:
        answers = zip(_entries(fields), outcome.entries or (), strict=True)
        for (topic, partition, _, _, action, through, _, _), code in answers:
            key = (topic, partition)
            accepted = code in codes.ACCEPTED
            if own and (piece := self.pieces.get(key)) is not None:
                self._own_entry_applied(piece, action, through, code, now)
            elif own and action == COMMIT and through is not None:
                self._host.answered_late(key, None, through, accepted)
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
        meant = meant_for(me.slot, parts, share=self._options.allow_key_share)
        piece = self.pieces.get(key)
        if piece is not None and owned_since(me.slot, parts, *piece.span) != piece.epoch:
            if piece.letting_go is None:
                self._end(piece, Loss.FENCED, now)
            else:
                self._released(piece, now)
            piece = None
        ours = [part for part in parts if part.owner == me.slot]
        if piece is None and meant:
            piece = self._take_up(key, meant, now)
        elif piece is None and ours and covers(ours, 0, MAX_KEY_HASH) and self._owes_start(key):
            if self._take_up(key, ours, now) is not None:
                self._work.let_go(key, REVOKED, now)
            return
        elif piece is not None and piece.letting_go is None and piece.span != span_of(meant):
            self._work.let_go(key, REVOKED, now)  # shares that are cut anew are taken up anew, with all that is ours
        lo, hi = (0, -1) if piece is None else piece.span
        revoked = [part for part in ours if part.revoked >= 0]
        self._let_go_unworked(key, [part for part in revoked if part.hi < lo or hi < part.lo], now)

    def _owes_start(self, key: Key) -> bool:
        """Whether we are the first who may say where a partition begins, and have to before we let it go (P9)."""
        if not self._starts_late or not self.is_first(key) or self.came_later(key):
            return False
        return not self.member.leaving and self._work.takes_on and self._may_take_up(key)

    def _may_take_up(self, key: Key) -> bool:
        if key in self._work.parts or key in self._work.blocked or self._work.owes:
            return False
        return key in self._subscription.partitions  # the cluster shows it to us

    def _take_up(self, key: Key, parts: Sequence[Piece], now: float) -> HeldPiece | None:
        is_open = now >= self.member.open_at and not self.member.leaving and not self._must_go(now)
        if not is_open or not self._may_take_up(key):
            return None
        lo, hi, since = parts[0].lo, parts[-1].hi, max(part.since for part in parts)

        def want(owner: Owner) -> Ownership:
            keys = KeyShare(lo, hi, lambda: self._whole_progress(key))
            epoch = SharedEpoch(since, lo, hi) if keys.is_part else since
            progress = self._whole_progress(key)
            told_apart = keys.is_part or (progress is not None and progress.pieces is not None)
            about = self._options.session_timeout_ms, owner, keys if told_apart else None, self.member.group
            piece = HeldPiece(key, self.member.home, epoch, *about)
            piece.prove(self.member.proof.valid_until)
            self.pieces[key] = piece
            return piece

        self._work.take_on(key, self.is_first(key), want)
        self._outbox.add(Note("claimed", key, words="took up"))
        self.pieces[key].owner.granted(now)
        return self.pieces.get(key)

    def _let_go_unworked(self, key: Key, parts: Sequence[Piece], now: float) -> None:
        """What was revoked before we began with it."""
        if parts and not self.member.leaving:
            self._look_at = min(self._look_at, now + self._again_ms)  # the log may not answer
            self._commits.add(*(CommitEntry(*key, part.lo, part.hi, LET_GO) for part in parts))

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

    def _paused_until(self, now: float) -> float:
        """When (own clock) an admin's pause should end: where all have left, no record shows it; −inf: none is."""
        world = self._worlds[self.member.home]
        pause = world.pause(self._settings.group_id)
        if self._moved is None:
            self._moved = now
        return -inf if pause is None else self._moved + pause.expires - world.log_time

    def _must_go(self, now: float) -> bool:
        return self._goes() or now < self._paused_until(now)

    def _goes(self) -> bool:
        return not self._work.takes_on or bool(self.lets_all_go()) or self.failure is not None

    # Time.

    def step(self, now: float) -> None:
        """Be a member, and take up what is ours. (Not while the consumer closes, or lets all go.)"""
        if self._must_go(now):
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
        if self._work.owes or not self._subscription.looked:
            return
        if self.member.is_replaced:
            self.fail(replaced(self._settings))
        elif any(world.level < GROUPS_LEVEL for world in self._worlds.values()):
            self.fail(below_level(self._settings))
        elif self.member.generation == 0 and self.member.is_claimed():
            self.fail(claimed_group(self._settings.group_id))
        else:
            self.member.join(now)

    def wake(self, now: float) -> None:
        """Beats, and what goes out again; also while the consumer closes."""
        if not self.member.joined:
            return
        if self.member.leaving or (self._must_go(now) and not self._work.parts):
            self._leave(now)
            return
        self.member.wake(now, self._send_commits)
        for piece in self.pieces.values():
            going = piece.letting_go
            if going is not None and now >= going.sent_at + self._again_ms:
                going.sent_at = now
                self._commits.add(CommitEntry(*piece.key, *piece.span, LET_GO, going.last_offset))

    def _leave(self, now: float) -> None:
        self.flush(now)
        self.member.leave(now)

    def _send_commits(self, now: float) -> bool:
        """Beat with what is done; False: nothing is that the log does not know."""
        for piece, last_offset in self.uncommitted():
            self._through(piece, last_offset)
        return bool(self._commits)

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
        return self.failure is not None or not (self.member.joined or self.member.joining is not None)

    @property
    def deadline(self) -> float:
        return inf

    def due(self, now: float) -> float:
        """When ``wake`` or ``step`` has something to do again."""
        if self.failure is not None and not self.member.joined:
            return inf
        going = [piece.letting_go for piece in self.pieces.values() if piece.letting_go is not None]
        times = [letting_go.sent_at + self._again_ms for letting_go in going]
        if self.member.joined or not (self._goes() or self._work.owes or not self._subscription.looked):
            due = self.member.deadline(now, not self._must_go(now))
            times.append(due if self.member.joined else max(due, self._paused_until(now)))
        if self.member.joined and not self._must_go(now):
            times.append(self._look_at)
        return min(times, default=inf)


def _entries(fields: Sequence[object]) -> Sequence[tuple[str, int, int, int, int, int | None, object, object]]:
    """Of a CommitOffsets, as on the wire."""
    return cast("Sequence[tuple[str, int, int, int, int, int | None, object, object]]", fields[-1])


def _piece(own: Ownership) -> HeldPiece:
    return cast("HeldPiece", own)  # it comes from ``_take_up``, above
