"""How checkpoints of a group are begun, answered, closed and undone (X4 to X10).

    takes none --BeginCheckpoint--> takes some <--- KeepCheckpoint: retire, pin; positions of a pausing client
        ^                            |      ^
        |  KeepCheckpoint: end       |      | closed: by the last answer, or by a witness (X3); Rollback, positions
        +----------------------------+      v
                                     +--> barrier open <--- AnswerBarrier

Each function changes the group and says what that asks for; whether the record is accepted was judged before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rationalizer import codes
from rationalizer.groups.assignors import NOBODY
from rationalizer.groups.checkpoints import Barrier, Checkpoints, Kept, Key, Version
from rationalizer.groups.commits import Commits, Entry
from rationalizer.groups.group import Group
from rationalizer.groups.pieces import NEVER
from rationalizer.limits import FIRST_MARK, MAX_KEY_HASH, NO_RECORD
from rationalizer.progress import Progress
from rationalizer.wire.wellformed import COMMIT, PASSING, PERIODIC, PINNED, REACHED_AND_LEAVES, REFUSED

_NOBODY: Final[frozenset[int]] = frozenset()


# -- beginning (X4) ----------------------------------------------------------------------------------------


def start(group: Group, offset: int, log_time: int, keep: int, hold: bool) -> None:
    """From now on the group takes checkpoints: what is done is the first one, and `again` is over (R4)."""
    for _, _, kept in group.all_progress():
        kept.progress.again = NO_RECORD
    checkpoints = group.checkpoints = Checkpoints(max(1, keep), hold)
    versions = {
        (topic, partition): Version(offset, None, kept.progress, kept.metadata)
        for topic, partition, kept in group.all_progress()
    }
    checkpoints.complete(Kept(offset, log_time, PINNED, versions))


def begin(checkpoints: Checkpoints, offset: int, log_time: int, timeout_ms: int, keep: int) -> None:
    """A barrier opens."""
    if keep:
        checkpoints.keep = keep
    checkpoints.open(Barrier(offset, log_time, timeout_ms, keep == 0))


# -- answering (X5) ----------------------------------------------------------------------------------------


class Cuts(Commits):
    """The entries of one AnswerBarrier. They count together or not at all: `versions` is what they make."""

    __slots__ = ("_barrier", "versions")

    def __init__(self, group: Group, slot: int, generation: int, barrier: Barrier) -> None:
        super().__init__(group, slot, generation, False)
        self._barrier = barrier
        self.versions: dict[Key, Version] = {}

    def commit(self, entry: Entry) -> str:
        """The entry's code. A rejected one changes nothing."""
        topic, partition, lo, hi, action, through, ranges, metadata = entry
        if action != COMMIT or self._group.kept(topic, partition) is None:
            return codes.NOT_ASSIGNED
        refusal = self._refusal(entry)
        if refusal is not None:
            return refusal
        key, number = (topic, partition), self._barrier.id
        version = self.versions.get(key)
        if version is None:
            version = self._begun(key)
        fits = version.saved.has_room(lo, hi, number)
        code = self._advance(version.progress if fits else version.progress.copy(), lo, hi, through, ranges)
        if code in codes.ACCEPTED and not fits:
            code = codes.MAX_INDIVIDUAL_COMMIT_REACHED
        if code not in codes.ACCEPTED:
            return code
        version.saved.commit_key_range(lo, hi, number)
        if metadata is not None:
            version.metadata = metadata
        self.versions[key] = version
        return code

    def _advance(
        self, progress: Progress, lo: int, hi: int, through: int | None, ranges: tuple[tuple[int, int], ...]
    ) -> str:
        if through is not None:
            return progress.commit_key_range(lo, hi, through)
        return self._commit_ranges(progress, ranges) if ranges else codes.OK

    def _begun(self, key: Key) -> Version:
        """A copy of the barrier's version of a partition, or of what the newest checkpoint sees."""
        checkpoints = self._group.checkpoints
        assert checkpoints is not None
        before = self._barrier.versions.get(key) or checkpoints.seen.get(key)
        if before is not None:
            return before.next(self._barrier.id)
        kept = self._group.kept(*key)
        assert kept is not None
        return Version(self._barrier.id, None, kept.progress, kept.metadata).next(self._barrier.id)


# -- closing (X6) ------------------------------------------------------------------------------------------


class Closing(NamedTuple):
    """The effect of closing a barrier now."""

    #: False: it ends, and nothing else changes.
    complete: bool
    #: Members that leave with it.
    left: frozenset[int]


def is_due(checkpoints: Checkpoints) -> bool:
    """Whether all that the open barrier waits for have answered."""
    barrier = checkpoints.barrier
    assert barrier is not None
    answered = len(checkpoints.owners) - barrier.waiting
    return barrier.waiting == 0 or (checkpoints.hold and barrier.reached < answered)


def closing_of(checkpoints: Checkpoints) -> Closing:
    """The effect of closing the open barrier."""
    barrier = checkpoints.barrier
    assert barrier is not None
    wanted = len(checkpoints.owners) if checkpoints.hold else 1
    if checkpoints.owners and barrier.reached < wanted:
        return Closing(False, _NOBODY)
    left = [slot for slot, each in barrier.answers.items() if each.answer == REACHED_AND_LEAVES]
    return Closing(True, frozenset(left) if left else _NOBODY)


def close(group: Group, closing: Closing, log_time: int) -> bool:
    """Close the open barrier. Whether pieces were released: they have no owner now, and a rebalance is due.

    Who leaves with it is still a member.
    """
    checkpoints = group.checkpoints
    assert checkpoints is not None
    barrier = checkpoints.barrier
    assert barrier is not None
    checkpoints.barrier = None
    if not closing.complete:
        return False
    kind = PASSING if barrier.passing else PERIODIC
    checkpoints.complete(Kept(barrier.id, log_time, kind, dict(barrier.versions)))
    for key in barrier.versions:
        show(group, key)
    handed = [key for key in checkpoints.revoked & barrier.versions.keys() if _let_go(group, barrier, key)]
    return bool(handed)


def _let_go(group: Group, barrier: Barrier, key: Key) -> bool:
    """Whether something revoked of this partition was handed in as a whole, so that no member owns it any more."""
    topic, partition = key
    saved, pieces, handed = barrier.versions[key].saved, [], False
    for piece in group.pieces[topic][partition]:
        answer = barrier.answers.get(piece.owner)
        if (
            piece.revoked != NEVER
            and answer is not None
            and answer.answer != REFUSED
            and answer.generation >= piece.revoked
            and saved.has_all(piece.lo, piece.hi, barrier.id)
        ):
            handed = True
            pieces.append(piece._replace(owner=NOBODY))
        else:
            pieces.append(piece)
    if handed:
        group.pieces[topic].put(partition, pieces)
    return handed


def show(group: Group, key: Key) -> None:
    """The progress of a partition is what the newest checkpoint sees of it (X2)."""
    checkpoints = group.checkpoints
    assert checkpoints is not None
    topic, partition = key
    version = checkpoints.seen.get(key)
    if version is None and key in checkpoints.unset:
        checkpoints.unset.remove(key)
        del group.progress[topic][partition]
        if not group.progress[topic]:
            del group.progress[topic]
        return
    kept = group.keep(topic, partition)
    if version is None:
        kept.progress, kept.metadata = Progress(), None
        kept.progress.stable = kept.initial
    else:
        kept.progress, kept.metadata = version.progress, version.metadata


def owners_of(group: Group) -> set[int]:
    """The slots that own a piece."""
    return set[int]().union(*[topic.owned() for topic in group.pieces.values()])


def note_owners(group: Group) -> None:
    """Pieces have other owners, or other targets, by a rebalance."""
    if group.checkpoints is not None:
        revoked = {(name, number) for name, topic in group.pieces.items() for number in topic.with_revoked()}
        group.checkpoints.rebalanced(owners_of(group), revoked)


# -- going back, and ending (X8, X9) -----------------------------------------------------------------------


def go_back(group: Group, checkpoint: int) -> None:
    """This one, which is kept, is the newest from now on."""
    checkpoints = group.checkpoints
    assert checkpoints is not None
    checkpoints.barrier = None
    for key in checkpoints.go_back(checkpoint):
        show(group, key)


def end(group: Group) -> None:
    """The group takes no checkpoints any more; what the newest saw is its progress."""
    group.checkpoints = None


# -- positions that a pausing client sets (X10) ------------------------------------------------------------


def set_positions(group: Group, offset: int, log_time: int, entries: Sequence[Entry]) -> tuple[str, ...]:
    """The codes of the entries; what they write is a complete checkpoint."""
    checkpoints = group.checkpoints
    assert checkpoints is not None
    checkpoints.barrier = None
    written: dict[Key, Version] = {}
    through: dict[Key, int] = {}
    answers = tuple([_set_position(group, offset, entry, written, through) for entry in entries])
    if written:
        undone = {
            each.id
            for key, position in through.items()
            for each, version in checkpoints.views(key)
            if _is_beyond(group, key, version, position)
        }
        for key in written:
            if group.kept(*key) is None:
                checkpoints.unset.add(key)
        checkpoints.complete(Kept(offset, log_time, PERIODIC, written), undone)
        for key in written:
            show(group, key)
    return answers


def _set_position(group: Group, offset: int, entry: Entry, written: dict[Key, Version], through: dict[Key, int]) -> str:
    topic, partition, lo, hi, action, position, ranges, metadata = entry
    if action != COMMIT or lo != 0 or hi != MAX_KEY_HASH or ranges:
        return codes.NOT_ASSIGNED
    if position is None and metadata is None:
        return codes.OK
    key = (topic, partition)
    version = written.get(key)
    if version is None:
        version = written[key] = _position_of(group, offset, key)
    if metadata is not None:
        version.metadata = metadata
    if position is None:
        return codes.OK
    through[key] = position
    return version.progress.reposition(position)


def _position_of(group: Group, offset: int, key: Key) -> Version:
    assert group.checkpoints is not None
    before, kept = group.checkpoints.seen.get(key), group.kept(*key)
    if before is not None:
        return before.next(offset)
    return Version(offset, None, Progress() if kept is None else kept.progress.copy(), None)


def _is_beyond(group: Group, key: Key, version: Version | None, position: int) -> bool:
    """Whether a checkpoint that sees this sees something done above the position; marks do not count (P12)."""
    if version is None:
        kept = group.kept(*key)
        return kept is not None and min(kept.initial, FIRST_MARK - 1) > position
    progress = version.progress
    furthest = max([done for _, _, done in progress.done_through])
    furthest = max([furthest, *[last for first, last in progress.ranges if first < FIRST_MARK]])
    return min(furthest, FIRST_MARK - 1) > position
