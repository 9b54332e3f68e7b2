"""Taking up pieces, and going back: on_restore before anything is delivered (X17, X18). Times: own clock, ms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from kafka_marshal.engine.effects import Outbox, RestoredPiece, RestoreState
from kafka_marshal.engine.groups.checkpoints.forks import of_whom, within
from kafka_marshal.engine.groups.checkpoints.shown import CheckpointFigures, Shown
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import GroupView, HeldPiece
from kafka_marshal.engine.plane import Work
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.types import Key
from rationalizer import CommitOffsets, Group, Outcome, Piece, Rollback, codes
from rationalizer.groups.checkpoints import Barrier
from rationalizer.groups.pieces import NEVER
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import REACHED_AND_LEAVES

WhyCame = Literal["joined", "handed_over", "lost", "rollback", "positions"]
#: In place of each of them: the state is still that of the group from which this one was forked.
_FORKED = "forked"

#: No member.
NOBODY = -1


class _Before(NamedTuple):
    """A topic's pieces before the record: as `TopicPieces` has them."""

    owners: list[int]
    revoked: list[int]
    cut: dict[int, list[Piece]]

    def of(self, partition: int) -> list[tuple[int, int, int, int]]:
        """(lo, hi, owner, revoked) of each piece of a partition."""
        if partition in self.cut:
            return [(part.lo, part.hi, part.owner, part.revoked) for part in self.cut[partition]]
        if partition >= len(self.owners):
            return []
        return [(0, MAX_KEY_HASH, self.owners[partition], self.revoked[partition])]


class Story:
    """Follows one group, record by record."""

    def __init__(self) -> None:
        #: The generation that ``_before`` is of.
        self._generation = -1
        self._before: dict[str, _Before] = {}
        #: Why our pieces came: partition → (lo, hi, since, why).
        self._came: dict[Key, list[tuple[int, int, int, WhyCame]]] = {}
        #: What came over partitions while no member owned them.
        self._since: dict[Key, WhyCame] = {}

    def look(self, group: Group | None) -> None:
        """Take the group's pieces as they are; what came before is not known."""
        if group is None:
            self._before, self._generation = {}, -1
            return
        self._generation = group.generation
        self._before = {
            name: _Before(topic.owners.copy(), topic.revoked.copy(), {n: list(cut) for n, cut in topic.cut.items()})
            for name, topic in group.pieces.items()
        }

    def follow(self, group: Group | None) -> None:
        """Before we join: know who had what."""
        if self.is_behind(group):
            self.look(group)

    def is_behind(self, group: Group | None) -> bool:
        """Whether the group has another generation than was seen last."""
        return (-1 if group is None else group.generation) != self._generation

    def applied(
        self, group: Group | None, slot: int, outcome: Outcome, message: Any, closed: tuple[Barrier, bool] | None
    ) -> None:
        """A record of the group was applied. slot: ours; closed: the barrier that it closed, and whether complete."""
        if outcome.is_a(CommitOffsets) and not message.member_id and outcome.accepted:
            for entry, code in zip(message.entries, outcome.entries or (), strict=True):
                if code in codes.ACCEPTED and (entry[5] is not None or entry[7] is not None):
                    self._since[entry[0], entry[1]] = "positions"
        if group is None or not self.is_behind(group):
            return
        if outcome.is_a(Rollback) and outcome.accepted:
            self._since.update({(topic, partition): "rollback" for topic, partition, _ in group.all_progress()})
        for name, topic in group.pieces.items():
            for partition, piece in topic.owned_by(slot) if slot >= 0 else ():
                if piece.since == group.generation:
                    self._note((name, partition), piece, outcome, closed)
        self._since = {key: why for key, why in self._since.items() if not _is_owned(group, key)}
        self.look(group)

    def _note(self, key: Key, piece: Piece, outcome: Outcome, closed: tuple[Barrier, bool] | None) -> None:
        why = self._why(key, piece, outcome, closed)
        self._came[key] = [*self._without(key, piece.lo, piece.hi), (piece.lo, piece.hi, piece.since, why)]

    def _without(self, key: Key, lo: int, hi: int) -> Iterator[tuple[int, int, int, WhyCame]]:
        for first, last, since, why in self._came.get(key, []):
            if first < lo:
                yield first, min(last, lo - 1), since, why
            if hi < last:
                yield max(first, hi + 1), last, since, why

    def _why(self, key: Key, piece: Piece, outcome: Outcome, closed: tuple[Barrier, bool] | None) -> WhyCame:
        if outcome.is_a(Rollback):
            return "rollback"
        found = [_left_by(key, part, closed) for part in self._owned(key, piece)]
        if not found:
            return self._since.get(key, "joined")
        return "lost" if "lost" in found else "handed_over"

    def _owned(self, key: Key, piece: Piece) -> Iterator[tuple[int, int, int, int]]:
        """(lo, hi, slot, revoked) of each part of these keys that a member owned."""
        before = self._before.get(key[0])
        for lo, hi, owner, revoked in () if before is None else before.of(key[1]):
            if owner != NOBODY and lo <= piece.hi and piece.lo <= hi:
                yield lo, hi, owner, revoked

    def restored(self, piece: HeldPiece) -> None:
        """If one of our pieces is begun again under its token, with other keys, it comes from our cut."""
        lo, hi = piece.span
        self._came[piece.key] = [*self._without(piece.key, lo, hi), (lo, hi, piece.epoch, "handed_over")]

    def why(self, piece: HeldPiece) -> WhyCame:
        """Why one of our pieces came: its newest part."""
        lo, hi = piece.span
        found = [each for each in self._came.get(piece.key, []) if each[0] <= hi and lo <= each[1]]
        return max(found, key=lambda each: each[2])[3] if found else "joined"


def _left_by(key: Key, part: tuple[int, int, int, int], closed: tuple[Barrier, bool] | None) -> WhyCame:
    """How its owner gave up a part: at the barrier that was closed (X6), or by its loss (X7)."""
    lo, hi, owner, revoked = part
    barrier, is_complete = closed or (None, False)
    if barrier is None or not is_complete or owner not in barrier.answers:
        return "lost"
    answer, version = barrier.answers[owner], barrier.versions.get(key)
    if answer.answer == REACHED_AND_LEAVES:
        return "handed_over"
    is_named = version is not None and version.saved.has_all(lo, hi, barrier.id)
    return "handed_over" if is_named and NEVER < revoked <= answer.generation else "lost"


def _is_owned(group: Group, key: Key) -> bool:
    found = group.pieces.get(key[0])
    return found is not None and any(part.owner != NOBODY for part in found[key[1]])


@dataclass(slots=True)
class RestoreCall:
    """A call of on_restore."""

    number: int
    why: str
    pieces: list[HeldPiece]
    began: float
    #: Where the state of each was saved, as the log showed it.
    states: dict[Key, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    #: A state is missing, a token too old: the heartbeat whose proof shows that the replica is up to date; 0: not sent.
    beat: int = 0
    error: Exception | None = None


class Restoring:
    """Has the state of pieces restored, one call at a time."""

    def __init__(
        self,
        member: Membership,
        view: GroupView,
        shown: Shown,
        story: Story,
        pieces: Mapping[Key, HeldPiece],
        work: Work,
        outbox: Outbox,
        figures: CheckpointFigures,
        fail: Callable[[Exception, float], object],
    ) -> None:
        """fail: the program can't take up its state: leave."""
        self._member = member
        self._view = view
        self._shown = shown
        self._story = story
        self._pieces = pieces
        self._work = work
        self._outbox = outbox
        self._figures = figures
        self._fail = fail
        #: The call that has not returned, or whose state is missing; None: there is none.
        self._attempt: RestoreCall | None = None
        self._number = 0
        #: The group goes back: pieces that were ours and still are (for display).
        self.goes_back: bool = False
        #: Where pieces continued after that.
        self._went_on_at: dict[Key, int] = {}

    @property
    def is_resting(self) -> bool:
        """Whether pieces have gone back, and nothing was delivered since."""
        at = self._went_on_at
        return bool(at) and not any(self._work.cutting.has_handed_out(key, stable) for key, stable in at.items())

    def step(self, now: float) -> None:
        """Restore what is ready."""
        if not self.is_resting:
            self._went_on_at.clear()
        attempt = self._attempt
        if attempt is not None and attempt.beat:
            self._look_again(attempt, now)
            return
        if attempt is not None:
            return
        ready: dict[str, list[HeldPiece]] = {}
        for key in sorted(self._pieces):
            piece = self._pieces[key]
            if not piece.is_restored and piece.held and self._work.cutting.awaits_restore(key):
                why: str = self._story.why(piece)
                if self._shown.is_forked(piece):
                    why = _FORKED
                elif why in ("joined", "handed_over") and self._shown.went_back(piece):
                    why = "rollback"
                ready.setdefault(why, []).append(piece)
        for why in sorted(ready):
            self._call(why, ready[why], now)
            return

    def _call(self, why: str, pieces: list[HeldPiece], now: float) -> None:
        found, group = self._shown.checkpoints, self._member.group
        if found is None or group is None:
            return
        self._number += 1
        self._attempt = attempt = RestoreCall(self._number, why, pieces, now)
        attempt.states = {piece.key: self._shown.states(piece) for piece in pieces}
        positions = {(topic, number): kept.progress.stable + 1 for topic, number, kept in group.all_progress()}
        asked = tuple(self._asked(piece, attempt.states[piece.key]) for piece in pieces)
        self._outbox.add(RestoreState(self._work.number, self._number, found.newest, why, asked, positions))

    def _asked(self, piece: HeldPiece, states: tuple[tuple[int, int, int], ...]) -> RestoredPiece:
        group, progress = self._member.group, self._view.progress(piece.key)
        kept = None if group is None else group.kept(*piece.key)
        position = self._work.cutting.begin(piece.key)
        known = () if progress is None else split(progress.ranges).ranges
        ranges = tuple((max(first, position), last) for first, last in known if last >= position)
        through = () if kept is None else within(tuple(kept.progress.done_through), piece.span)
        initial = -1 if kept is None else kept.initial
        states, groups = of_whom(self._view.metadata(piece.key), states)
        return RestoredPiece(piece.key, *piece.span, piece.epoch, position, ranges, states, through, initial, groups)

    def restored(self, number: int, error: Exception | None, is_outdated: bool, now: float) -> None:
        """on_restore has returned, or raised."""
        attempt = self._attempt
        if attempt is None or attempt.number != number or attempt.beat:
            return
        if error is not None and is_outdated:
            # Another member may have cut again and deleted this state, or own the piece: bring the replica up to date.
            attempt.beat, attempt.error = self._member.beat(now), error
            return
        self._attempt = None
        pieces = [piece for piece in attempt.pieces if self._is_ours(piece)]
        if error is not None:
            if pieces:
                self._fail(error, now)
            return
        self._figures.restored(attempt.why, len(attempt.pieces), now - attempt.began)
        for piece in pieces:
            piece.is_restored, piece.cut_at = True, now
            self._story.restored(piece)
            self._work.cutting.restored(piece.key)
            if self.goes_back:
                self._went_on_at[piece.key] = self._work.cutting.done_of(piece.key).stable
        if all(piece.is_restored for piece in self._pieces.values()):
            self.goes_back = False

    def _is_ours(self, piece: HeldPiece) -> bool:
        return piece.held and self._pieces.get(piece.key) is piece

    def _look_again(self, attempt: RestoreCall, now: float) -> None:
        """A state is missing, or a token too old: if a newer view still names them, this member can't continue."""
        if self._member.proof.token < attempt.beat:
            return
        self._attempt = None
        pieces = [piece for piece in attempt.pieces if self._is_ours(piece)]
        is_same = len(pieces) == len(attempt.pieces) and all(
            self._shown.states(piece) == attempt.states[piece.key] for piece in pieces
        )
        if is_same and attempt.error is not None:
            self._fail(attempt.error, now)

    def forget(self) -> None:
        """We are no longer a member; a call that runs is not waited for."""
        self._attempt, self.goes_back = None, False
        self._went_on_at.clear()
