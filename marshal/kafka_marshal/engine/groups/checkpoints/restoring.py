"""Taking up pieces, and going back: on_restore before anything is delivered (X17, X18). Times: own clock, ms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kafka_marshal.engine.effects import Outbox, RestoredPiece, RestoreState
from kafka_marshal.engine.groups.checkpoints.figures import CheckpointFigures
from kafka_marshal.engine.groups.checkpoints.shown import Shown, within
from kafka_marshal.engine.groups.checkpoints.story import Story
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.groups.view import GroupView
from kafka_marshal.engine.plane import Work
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.types import Key


@dataclass(slots=True)
class Attempt:
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
        self._attempt: Attempt | None = None
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
                if why in ("joined", "handed_over") and self._shown.went_back(piece):
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
        self._attempt = attempt = Attempt(self._number, why, pieces, now)
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
        return RestoredPiece(piece.key, *piece.span, piece.epoch, position, ranges, states, through, initial)

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

    def _look_again(self, attempt: Attempt, now: float) -> None:
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
