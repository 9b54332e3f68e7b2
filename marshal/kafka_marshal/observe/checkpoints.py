"""The checkpoints of a group as its state has them (X1, X2), as rows by the broker's clock, and in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.observe.text import listed, span
from kafka_marshal.types import Placed
from rationalizer.limits import MAX_KEY_HASH

if TYPE_CHECKING:
    from kafka_marshal.ports import TopicPartition
    from rationalizer import Group, Piece
    from rationalizer.done_through import KeyPiece
    from rationalizer.groups.checkpoints import Checkpoints

#: The kind of a checkpoint (X1) in words.
KIND_WORDS: Final = ("passing", "periodic", "pinned")

#: In `states`: no state was saved.
_NONE_SAVED: Final = 0


@dataclass(frozen=True, slots=True)
class KeyCut(Placed):
    """What a checkpoint has of a range of keys: the state that was handed in for the checkpoint ``cut``."""

    topic: str
    partition: int
    lo: int
    hi: int
    #: None: nothing was handed in since the group takes checkpoints.
    cut: int | None
    #: Its owner; None: it has none, or that is not known.
    client: str | None = None
    #: Why it is older than the checkpoint, in words; "": it is not, or that is not known.
    why: str = ""


@dataclass(frozen=True, slots=True)
class SeenProgress:
    """The progress of a partition as a checkpoint sees it (X2)."""

    done_through: tuple[KeyPiece, ...]
    ranges: tuple[tuple[int, int], ...]
    #: (lo, hi, id of the checkpoint under which the state was saved; 0: none was).
    states: tuple[KeyPiece, ...]
    metadata: str | None = None

    @property
    def position(self) -> int:
        """The first offset that is not done."""
        return min(done for _, _, done in self.done_through) + 1


def seen_by(group: Group, key: TopicPartition, checkpoint: int) -> SeenProgress:
    """What this checkpoint sees of a partition: its last version that is not above, else where the group began."""
    found = [version for version in group.versions(key) if version.checkpoint <= checkpoint]
    if found:
        version = found[-1]
        ranges = tuple((first, last) for first, last in split(version.ranges).ranges)
        return SeenProgress(tuple(version.done_through), ranges, tuple(version.states), version.metadata)
    kept = group.kept(*key)
    initial = -1 if kept is None else kept.initial
    return SeenProgress(((0, MAX_KEY_HASH, initial),), (), ((0, MAX_KEY_HASH, _NONE_SAVED),))


def owners_of(group: Group) -> Iterator[tuple[TopicPartition, Piece]]:
    """Every piece of the group that has an owner."""
    for topic, pieces in sorted(group.pieces.items()):
        for partition in pieces.partitions():
            for piece in pieces[partition]:
                if piece.owner in group.members:
                    yield (topic, partition), piece


def cut_in(states: Sequence[KeyPiece], lo: int, hi: int) -> int:
    """The oldest cut of these keys; 0: of some of them nothing was handed in."""
    return min((id_ for low, high, id_ in states if low <= hi and lo <= high), default=_NONE_SAVED)


def cuts_now(group: Group) -> Iterator[KeyCut]:
    """The last cut of each piece that has an owner, as the newest checkpoint has it."""
    states: dict[TopicPartition, Sequence[KeyPiece]] = {}
    for key, piece in owners_of(group):
        if key not in states:
            states[key] = group.states(key)
        cut = cut_in(states[key], piece.lo, piece.hi)
        yield KeyCut(*key, piece.lo, piece.hi, cut or None, group.members[piece.owner].client_id)


def oldest_cut(group: Group, checkpoint: int) -> KeyCut | None:
    """The oldest cut of this checkpoint; of the newest with its owner. None: nothing was handed in for it so far.

    A piece that was never handed in is older than any other; its ``cut`` is None.
    """
    checkpoints = group.checkpoints
    is_newest = checkpoints is not None and checkpoint == checkpoints.newest
    found = list(cuts_now(group)) if is_newest else []
    found = found or [
        KeyCut(*key, lo, hi, id_ or None)
        for key in group.partitions()
        for lo, hi, id_ in seen_by(group, key, checkpoint).states
    ]
    if all(each.cut is None for each in found):
        return None
    return min(found, key=lambda each: each.cut or 0)


def is_initial(group: Group, checkpoint: int) -> bool:
    """Whether no state was saved for anything that this checkpoint sees: there was nothing to restore yet."""
    return all(id_ == _NONE_SAVED for key in group.partitions() for _, _, id_ in seen_by(group, key, checkpoint).states)


def waits_for(group: Group) -> list[str]:
    """The members that own a piece and have not answered the open barrier, sorted."""
    barrier = None if group.checkpoints is None else group.checkpoints.barrier
    if barrier is None:
        return []
    slots = {piece.owner for _, piece in owners_of(group)}
    return sorted(group.members[slot].client_id for slot in slots if slot not in barrier.answers)


#: A cut is old if this many checkpoints were taken since.
OLD_AFTER: Final = 3


@dataclass(frozen=True, slots=True)
class BarrierRow:
    """The checkpoint that is being taken. Times are the broker's (ms)."""

    id: int
    opened: int
    timeout_ms: int
    passing: bool
    open_ms: int
    #: Members that own pieces and have not answered.
    waits_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnsavedRow:
    """A member whose states are not saved."""

    client: str
    instance: str
    #: Since its first answer that says so, in the log that was read (ms), and the last checkpoint that lacks them.
    since_ms: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A member whose last answers were that it could not take part: its states were not saved (X13)."""

    client: str
    instance: str
    #: Log time (ms) of the first of these answers in the log that was read, and how many there were.
    since: int
    count: int
    #: The last checkpoint that it was asked for.
    checkpoint: int


@dataclass(frozen=True, slots=True)
class CheckpointsRow:
    """The checkpoints of a group that takes some."""

    keep: int
    hold: bool
    newest: int
    #: Since it was complete (ms).
    age_ms: int
    #: (id, log time of its completion) of all that are kept, ascending.
    kept: tuple[tuple[int, int], ...]
    barrier: BarrierRow | None = None
    unsaved: tuple[UnsavedRow, ...] = ()

    @property
    def is_slow(self) -> bool:
        """Whether the one that is being taken waits for members for more than half of its time."""
        found = self.barrier
        return found is not None and bool(found.waits_for) and 2 * found.open_ms > found.timeout_ms

    def is_unsaved(self, client: str | None, instance: str | None) -> bool:
        """Whether this member's states are not saved."""
        return any((each.client, each.instance) == (client, instance) for each in self.unsaved)

    @property
    def as_of_ms(self) -> int:
        """How old what the log says of the group is: the age of the newest, but not above what is usual (ms).

        If nothing is done no checkpoint is begun, and its age says nothing.
        """
        gaps = [later[1] - earlier[1] for earlier, later in pairwise(self.kept)]
        return min(self.age_ms, OLD_AFTER * max(gaps)) if gaps else self.age_ms

    @property
    def old_below(self) -> int | None:
        """The third newest: cuts for older ones are old. None: fewer are kept."""
        return self.kept[-OLD_AFTER][0] if len(self.kept) >= OLD_AFTER else None

    def since_ms(self, checkpoint: int) -> int:
        """Since this checkpoint, or the next that is kept, was complete (ms): the least age of a cut for it."""
        newest_at = self.kept[-1][1]
        return self.age_ms + newest_at - next((at for id_, at in self.kept if id_ >= checkpoint), newest_at)


def checkpoints_row(group: Group, now_ms: int, unsaved: Iterable[Unsaved] = ()) -> CheckpointsRow | None:
    """The row of a group; None: it takes no checkpoints. unsaved: members whose states are not, as the log says."""
    found = group.checkpoints
    if found is None:
        return None
    open_one = found.barrier
    barrier = None
    if open_one is not None:
        barrier = BarrierRow(
            open_one.id,
            open_one.opened,
            open_one.timeout_ms,
            open_one.passing,
            max(0, now_ms - open_one.opened),
            tuple(waits_for(group)),
        )
    kept = tuple((each.id, each.log_time) for each in found.kept)
    lacking = tuple(
        UnsavedRow(each.client, each.instance, max(0, now_ms - each.since), each.checkpoint) for each in unsaved
    )
    return CheckpointsRow(found.keep, found.hold, found.newest, max(0, now_ms - kept[-1][1]), kept, barrier, lacking)


def barrier_json(barrier: BarrierRow | None) -> dict[str, object] | None:
    """The open barrier as JSON."""
    if barrier is None:
        return None
    return {
        "id": barrier.id,
        "opened": barrier.opened,
        "timeout_ms": barrier.timeout_ms,
        "passing": barrier.passing,
        "waits_for": list(barrier.waits_for),
    }


def checkpoints_json(row: CheckpointsRow | None) -> dict[str, object]:
    """The fields that `group` and `status` have of a group's checkpoints; null where it takes none."""
    return {
        "newest": None if row is None else row.newest,
        "age_ms": None if row is None else row.age_ms,
        "barrier": None if row is None else barrier_json(row.barrier),
    }


# -- in words ------------------------------------------------------------------------------------------------


def as_of_text(newest: int, age_ms: float) -> str:
    """Which checkpoint the figures of a group are of."""
    return f"as of checkpoint {newest}, {span(age_ms)} old"


def barrier_text(barrier: BarrierRow) -> str:
    """The open barrier in words."""
    waits = f", waits for {listed(barrier.waits_for)}" if barrier.waits_for else ""
    return f"{barrier.id} is being taken for {span(barrier.open_ms)}{waits}"


def repeated_text(checkpoints: Checkpoints | CheckpointsRow | None) -> str:
    """What is repeated if a member is taken out of a group that has these checkpoints; None: it takes none."""
    if checkpoints is None:
        return "its messages in flight are repeated"
    if checkpoints.hold:
        return (
            f"all members go back to checkpoint {checkpoints.newest} (hold), and what they did since is done again, on "
            "the states of then"
        )
    return "its pieces go back to their last cuts, and what it did since is done again, on the states of then"
