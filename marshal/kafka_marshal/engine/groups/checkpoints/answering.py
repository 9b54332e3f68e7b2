"""The open barrier, as one member answers it: cuts piece by piece, then one answer (X13, X14).

::

    (barrier opens) ─▶ each piece: stop ─▶ nothing in flight ─▶ cut ─▶ on_checkpoint returns ─▶ it continues
                                                                          │
                       all cut, or drain is over; all states safe ◀───────┘
                                  │
                                  ▼
                       AnswerBarrier, again until the log shows it ─▶ (barrier is closed)

A piece that moves, one of a leaver, and one in a hold group does not continue before the barrier is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf

from kafka_marshal.engine.effects import Outbox, SavedPiece, SaveState, Warn
from kafka_marshal.engine.groups.checkpoints.cuts import Cut, Cutter, Saving, is_mark, left_means, places
from kafka_marshal.engine.groups.checkpoints.shown import CheckpointFigures, Shown
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.plane import Work
from kafka_marshal.engine.settings import CheckpointOptions
from kafka_marshal.types import Key
from rationalizer import AnswerBarrier, CommitEntry, codes, encode
from rationalizer.groups.checkpoints import Barrier
from rationalizer.limits import MAX_COMMIT_ENTRIES, MAX_WRITTEN_BYTES
from rationalizer.wire.wellformed import REACHED, REACHED_AND_LEAVES, REFUSED

#: Draining may take this share of a barrier's time, and of what a leaver has left; then the answer goes.
MOST_DRAIN_SHARE = 0.9


class OneBarrier:
    """What this member does about one barrier. Times: own clock, ms."""

    def __init__(self, barrier: Barrier, now: float) -> None:
        self.id: int = barrier.id
        self.seen_at: float = now
        #: Log time (ms) of its begin.
        self.opened: int = barrier.opened
        self.timeout_ms: int = barrier.timeout_ms
        self.cuts: dict[Key, Cut] = {}
        #: That of the answer, and whether it leaves; fixed at the first cut.
        self.generation: int | None = None
        self.leaves: bool = False
        #: When the last piece was cut, or drain had gone by; None: some still drain.
        self.drained_at: float | None = None
        #: Pieces that were not cut in time, and whether an earlier on_checkpoint of some has not returned.
        self.late: set[Key] = set()
        self.is_hanging: bool = False
        #: The answer, and when it was last sent.
        self.record: AnswerBarrier | None = None
        self.sent_at: float = -inf

    @property
    def answer_by(self) -> float:
        """When the answer goes, even if some states are not safe yet."""
        return self.seen_at + MOST_DRAIN_SHARE * self.timeout_ms

    @property
    def is_unsaved(self) -> bool:
        """Whether the state of some piece was not saved."""
        return self.is_hanging or any(cut.saving is Saving.LEFT for cut in self.cuts.values())


class Answering:
    """Cuts pieces for the open barrier, and answers it."""

    def __init__(
        self,
        member: Membership,
        shown: Shown,
        pieces: Mapping[Key, HeldPiece],
        work: Work,
        outbox: Outbox,
        policy: CheckpointOptions,
        cutter: Cutter,
        figures: CheckpointFigures,
        leave_by: Callable[[float], float | None],
    ) -> None:
        """leave_by: until when (own clock, ms) this member may take to leave; None: it does not want to."""
        self._member = member
        self._shown = shown
        self._pieces = pieces
        self._work = work
        self._outbox = outbox
        self._policy = policy
        self._cutter = cutter
        self._figures = figures
        self._leave_by = leave_by
        #: What we do about the open barrier; None: none is open, or it is over.
        self.now: OneBarrier | None = None
        #: How many answers in succession left out a piece, when (own clock, ms) the first of them went, and whether the
        #: last one did as a state was not saved.
        self.lacking: tuple[int, float, bool] = (0, inf, False)
        #: Partitions that did not fit into the last answer.
        self._without_room: set[Key] = set()
        #: Pieces whose on_checkpoint has not returned, also of barriers that are closed, with the barrier's id.
        self._calls: dict[Key, tuple[int, Cut]] = {}

    # Time.

    def step(self, now: float) -> None:
        """Do what is due about the open barrier."""
        barrier = self._shown.barrier
        if barrier is None:
            self.now = None
            return
        if self.now is None or self.now.id != barrier.id:
            self.now = OneBarrier(barrier, now)
        if self._shown.answer is not None:
            return
        one = self.now
        if one.record is None:
            if not barrier.is_over(self._shown.log_time):
                self._cut(one, now)
            if one.drained_at is not None and self._is_due(one, now):
                self._answer(one, now)
        elif now >= one.sent_at + self._member.interval_ms:
            self._send(one, now)

    def deadline(self, now: float) -> float:
        """When something is due again (own clock, ms)."""
        one = self.now
        if one is None or self._shown.answer is not None:
            return inf
        if one.record is not None:
            return one.sent_at + self._member.interval_ms
        if self._shown.barrier is None or self._shown.barrier.is_over(self._shown.log_time):
            return inf
        if one.drained_at is None:
            return self._drains_until(one, now)
        return one.answer_by if self._answers else inf

    @property
    def _answers(self) -> bool:
        """Whether the barrier waits for us, or we leave at it."""
        one = self.now
        return one is not None and (self._shown.owns or one.leaves)

    @property
    def is_idle(self) -> bool:
        """Whether no barrier is open, and no on_checkpoint runs."""
        return self._shown.barrier is None and not self._calls

    # Cutting.

    def _drains_until(self, one: OneBarrier, now: float) -> float:
        by = self._leave_by(now)
        if by is None:
            return one.seen_at + min(self._policy.drain_ms, MOST_DRAIN_SHARE * one.timeout_ms)
        return min(one.answer_by, one.seen_at + MOST_DRAIN_SHARE * (by - one.seen_at) if by < inf else inf)

    def _to_cut(self, one: OneBarrier, piece: HeldPiece) -> bool:
        """Whether it is cut for this barrier, and was not yet."""
        if piece.key in one.cuts or piece.key in one.late or not (piece.held and piece.is_restored):
            return False
        return one.generation is None or piece.epoch <= one.generation

    def _awaited(self, one: OneBarrier, now: float) -> bool:
        """Whether a piece that is to move is about to be restored: it can be handed over right after that."""
        if self._leave_by(now) is not None:
            return False
        generation = self._member.generation if one.generation is None else one.generation
        return any(
            not piece.is_restored and piece.epoch <= generation and self._shown.is_revoked(piece, generation)
            for piece in self._pieces.values()
        )

    def drains(self, one: OneBarrier, piece: HeldPiece, now: float) -> bool:
        """Whether its cut waits until nothing of it is in flight."""
        if self._policy.has_callback or self._is_hold or self._leave_by(now) is not None:
            return True
        return self._is_to_go(one, piece)

    @property
    def _is_hold(self) -> bool:
        found = self._shown.checkpoints
        return found is not None and found.hold

    def _is_to_go(self, one: OneBarrier, piece: HeldPiece) -> bool:
        generation = self._member.generation if one.generation is None else one.generation
        return self._shown.is_revoked(piece, generation) or self._shown.is_outgrown(piece)

    def _cut(self, one: OneBarrier, now: float) -> None:
        """Cut each piece of which nothing is in flight."""
        if one.drained_at is not None:
            return
        called: list[Cut] = []
        waits = False
        for key in sorted(self._pieces):
            piece = self._pieces[key]
            if not self._to_cut(one, piece):
                continue
            if self._policy.has_callback and self._work.cutting.is_in_doubt(key):
                self._leave_out(one, key)
                continue
            done = self._work.cutting.done_of(key)
            if self.drains(one, piece, now):
                if not piece.is_held_up:
                    piece.hold_up(True)
                    self._work.cutting.take_back(key)
                can_be_named = self._cutter.can_be_named(piece, done)
                if not can_be_named:
                    self._work.cutting.close_gaps(key, True)
                if self._work.cutting.is_in_hand(key) or not can_be_named:
                    waits = True
                    continue
            if key in self._calls:
                waits = True
                continue
            cut = self._cut_one(one, piece, now)
            if cut.saving is Saving.CALLED:
                called.append(cut)
        waits = waits or self._awaited(one, now)
        if called:
            pieces = tuple(cut.saved for cut in called)
            needed = {cut.saved.key: self._shown.needed(cut.saved.key) for cut in called}
            self._outbox.add(SaveState(self._work.number, one.id, pieces, one.leaves, needed, self._is_hold))
        if not waits or now >= self._drains_until(one, now) or self._is_nearly_over(one):
            self._drained(one, now)

    def _is_nearly_over(self, one: OneBarrier) -> bool:
        """By the log's time: a clock that is too slow would answer too late, each time."""
        return self._shown.log_time >= one.opened + MOST_DRAIN_SHARE * one.timeout_ms

    def _cut_one(self, one: OneBarrier, piece: HeldPiece, now: float) -> Cut:
        self._fix(one, now)
        done = self._work.cutting.done_of(piece.key)
        is_revoked = self._shown.is_revoked(piece, one.generation or 0)
        cut = Cut(piece, self._cutter.entries(piece, done), is_revoked, self._shown.is_outgrown(piece), now)
        is_asked = is_revoked or cut.is_outgrown or self._policy.save_all
        if not cut.entries and (is_asked or self._shown.is_forked(piece)):
            cut.entries.append(CommitEntry(*piece.key, *piece.span))
        if cut.entries and self._policy.has_callback:
            cut.saving = Saving.CALLED
            self._calls[piece.key] = (one.id, cut)
        one.cuts[piece.key] = cut
        return cut

    def _fix(self, one: OneBarrier, now: float) -> None:
        """The first cut decides what the answer is about."""
        if one.generation is None:
            one.generation, one.leaves = self._member.generation, self._leave_by(now) is not None

    def _drained(self, one: OneBarrier, now: float) -> None:
        self._fix(one, now)
        one.drained_at = now
        late = {key for key, piece in self._pieces.items() if self._to_cut(one, piece)}
        one.late |= late
        if one.cuts or one.late:
            self._figures.drained(now - one.seen_at)
        is_whole = self._policy.drain_ms >= MOST_DRAIN_SHARE * self._policy.timeout_ms
        for key in sorted(late):
            self._work.cutting.close_gaps(key, False)
        called = late & self._calls.keys()
        if in_flight := late - called:
            self._left(
                in_flight,
                "messages in flight were not done within the checkpoint's drain",
                f"Find out what the handler waits for; if it needs longer, raise {'timeout' if is_whole else 'drain'} "
                "in CheckpointPolicy",
                is_error=False,
            )
        if called:
            one.is_hanging = True
            self._left(
                called,
                "on_checkpoint has not returned since an earlier checkpoint, or waits for another callback",
                "They pause until it returns; health() says which callback hangs",
            )

    def _leave_out(self, one: OneBarrier, key: Key) -> None:
        """Its state may have a message that is not done: it is not waited for."""
        one.late.add(key)
        self._outbox.add(
            Warn(
                f"{key[0]} [{key[1]}]: a message was delivered and given up before it was done (its loop was left by "
                "break, or it was dropped), so the state may have it, and it comes again: the partition is left for "
                "the next checkpoint. Nothing is lost; if this member leaves, what it did since its last cut is done "
                "again, on the state of that cut. End loops by stop()"
            )
        )

    # What holds pieces up.

    def holds_up(self, piece: HeldPiece, now: float) -> bool:
        """Whether nothing of it may be delivered now, because of a barrier (X14)."""
        if piece.key in self._calls and self._calls[piece.key][1].piece is piece:
            return True
        one, barrier = self.now, self._shown.barrier
        if one is None or barrier is None or barrier.id != one.id:
            return False
        cut = one.cuts.get(piece.key)
        if cut is not None and cut.piece is piece:
            return one.leaves or self._is_hold or cut.is_revoked or cut.is_outgrown
        if one.leaves and one.record is not None:
            return True
        is_open = one.drained_at is None and not barrier.is_over(self._shown.log_time)
        return is_open and self._to_cut(one, piece) and self.drains(one, piece, now)

    # Saving.

    def returned(self, barrier: int, pieces: Sequence[SavedPiece], error: Exception | None, now: float) -> None:
        """on_checkpoint has returned for these pieces, or raised."""
        for saved in pieces:
            called, cut = self._calls.get(saved.key, (-1, None))
            if cut is None or called != barrier or cut.saved != saved:
                continue
            del self._calls[saved.key]
            cut.saving = Saving.RETURNED if error is None else Saving.LEFT

    def safe(self, barrier: int, pieces: Sequence[SavedPiece], error: Exception | None, now: float) -> None:
        """The states of these pieces are safe, or can't be saved."""
        if self.now is None or self.now.id != barrier:
            return
        for saved in pieces:
            cut = self.now.cuts.get(saved.key)
            if cut is None or cut.saved != saved or cut.saving is not Saving.RETURNED:
                continue
            cut.saving = Saving.SAFE if error is None else Saving.LEFT
            if error is None:
                self._figures.saved(now - cut.began)

    def _left(self, keys: Collection[Key], why: str, remedy: str = "", *, is_error: bool = True) -> None:
        """Say that these are not in the checkpoint, in one line."""
        one = self.now
        means = left_means(leaves=one is not None and one.leaves, is_hold=self._is_hold)
        self._outbox.add(Warn(f"{places(keys)}: {why}: {means}{f'. {remedy}' * bool(remedy)}", is_error=is_error))

    # Answering.

    def _is_due(self, one: OneBarrier, now: float) -> bool:
        if not self._answers or self._shown.barrier is None:
            return False
        return now >= one.answer_by or self._is_nearly_over(one) or not any(cut.waits for cut in one.cuts.values())

    def _answer(self, one: OneBarrier, now: float) -> None:
        cuts = [one.cuts[key] for key in sorted(one.cuts)]
        unsaved = [cut for cut in cuts if cut.waits]
        for cut in unsaved:
            cut.saving = Saving.LEFT
        if unsaved:
            self._left([cut.saved.key for cut in unsaved], "the state was not saved within the checkpoint's time")
        # What is to move comes first, then what did not fit into the last answer: the rest can wait.
        named = [cut for cut in cuts if cut.saving is Saving.SAFE and cut.entries]
        named.sort(key=lambda cut: (not cut.is_revoked, cut.saved.key not in self._without_room))
        is_unsaved = one.is_unsaved
        is_left = bool(one.late) or is_unsaved
        # A member that can save nothing says so: others see it in the log (X13).
        is_refused = is_left if self._is_hold else is_unsaved and not named and not one.leaves
        one.record = self._record(one, named, is_refused=is_refused)
        self._without_room = {cut.saved.key for cut in named if cut.saving is Saving.LEFT}
        if self._without_room:
            is_left = True
            most = f"{MAX_COMMIT_ENTRIES:,} entries, {MAX_WRITTEN_BYTES:,} bytes"
            why, remedy = f"one answer has no room for these, too ({most})", "They come first in the next one"
            self._left(self._without_room, why, "Use more members" if self._is_hold else remedy)
        self.lacking = (self.lacking[0] + 1, min(self.lacking[1], now), is_unsaved) if is_left else (0, inf, False)
        self._send(one, now)

    def _record(self, one: OneBarrier, named: list[Cut], *, is_refused: bool) -> AnswerBarrier:
        """The answer with these cuts, in this order; those that do not fit are left for the next checkpoint."""
        ids = (*self._member.settings.ids, self._member.member_id, one.generation or 0, one.id)
        while not is_refused:
            entries = tuple(entry for cut in named for entry in cut.entries)
            if len(entries) <= MAX_COMMIT_ENTRIES:
                record = AnswerBarrier(*ids, REACHED_AND_LEAVES if one.leaves else REACHED, entries)
                if len(encode(record)) <= MAX_WRITTEN_BYTES:
                    return record
            is_refused = self._is_hold
            kept = len(named) * 9 // 10
            for cut in named[kept:]:
                cut.saving = Saving.LEFT
            named = named[:kept]
        return AnswerBarrier(*ids, REFUSED, ())

    def _send(self, one: OneBarrier, now: float) -> None:
        assert one.record is not None
        one.sent_at = now
        self._member.send(one.record, now)

    def answered(self, barrier: int, entries: Sequence[Sequence[object]], codes_: Sequence[str], now: float) -> None:
        """Our answer was applied, and some entries were refused: send it again without those (X13)."""
        one = self.now
        if one is None or one.record is None or one.id != barrier or self._shown.answer is not None:
            return
        if tuple(map(tuple, entries)) != tuple(map(tuple, one.record.entries)):
            return  # an earlier copy
        refused: dict[str, list[Key]] = {}
        for entry, code in zip(one.record.entries, codes_, strict=True):
            cut = one.cuts[entry.topic, entry.partition]
            if code in codes.ACCEPTED:
                continue
            if is_mark(entry):
                self._cutter.unmarkable.add(cut.saved.key)
                if cut.without_mark() or not cut.is_revoked:
                    continue
                cut.entries.append(CommitEntry(*cut.piece.key, *cut.piece.span))
            elif cut.saving is Saving.SAFE:
                cut.saving = Saving.LEFT
                refused.setdefault(code, []).append(cut.saved.key)
        for code, keys in refused.items():
            self._left(keys, f"the log refused the cut ({code})")
        named = [one.cuts[key] for key in sorted(one.cuts) if one.cuts[key].entries]
        named = [cut for cut in named if cut.saving is Saving.SAFE]
        is_left = any(cut.saving is Saving.LEFT for cut in one.cuts.values())
        one.record = self._record(one, named, is_refused=is_left and self._is_hold)
        self._send(one, now)

    # The end.

    def has_handed_in(self, one: OneBarrier | None, piece: HeldPiece) -> bool:
        """Whether the answer has all that is done of this piece: its next owner repeats nothing."""
        cut = None if one is None else one.cuts.get(piece.key)
        if cut is not None and cut.piece is piece and cut.saving is Saving.SAFE:
            return True
        return not (piece.is_restored and self._cutter.differs(piece, self._work.cutting.done_of(piece.key)))

    def closed(self, barrier: int) -> OneBarrier | None:
        """The barrier is closed. Returns what we did about it."""
        one, self.now = self.now, None
        return one if one is not None and one.id == barrier else None

    def forget(self) -> None:
        """We are no longer a member."""
        self.now = None
        self._calls.clear()
