"""The checkpoints of a group (X1), with the versions of its partitions (X2) and the open barrier (X3).

Versions are kept by checkpoint: each has those that the checkpoint before it does not see. A checkpoint sees of a
partition the last version up to it. So one that is dropped leaves the next one what that lacks, and costs what changed
between the two. A version never changes once its checkpoint is complete.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from rationalizer.done_through import KeyPiece
from rationalizer.limits import MAX_OLD_WEIGHT, MAX_PINNED
from rationalizer.progress import Progress
from rationalizer.wire.wellformed import PASSING, PERIODIC, PINNED, REFUSED

#: (topic, partition)
Key = tuple[str, int]

#: In place of the id of a checkpoint: no state was saved.
NOT_SAVED: Final = 0

#: What one version counts besides its pieces and ranges (X6).
_BASE_WEIGHT: Final = 2


def saved_nowhere() -> Progress:
    """States of a partition of which none was saved.

    A map from key hashes to ids of checkpoints has the form of done_through, and an id that is set is the largest.
    """
    states = Progress()
    states.stable = NOT_SAVED
    return states


_SAVED_NOWHERE: Final = saved_nowhere()


class Version:
    """What is done of a partition from one checkpoint on (X2), and where its state was saved."""

    __slots__ = ("checkpoint", "metadata", "progress", "saved")

    def __init__(self, checkpoint: int, saved: Progress | None, progress: Progress, metadata: str | None) -> None:
        """saved: of `saved_nowhere`; None: no state was saved. It and `progress` belong to the version from now on."""
        self.checkpoint = checkpoint
        self.saved = _SAVED_NOWHERE if saved is None else saved
        self.progress = progress
        self.metadata = metadata

    @property
    def states(self) -> list[KeyPiece]:
        """(lo, hi, id) for all key hashes, ascending: the checkpoint under which the state was saved; 0: none was."""
        return self.saved.done_through

    @property
    def done_through(self) -> list[KeyPiece]:
        """(lo, hi, offset) for all key hashes, ascending; offset −1: nothing is done."""
        return self.progress.done_through

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The intervals (first, last) above stable that are done for every key, ascending."""
        return self.progress.ranges

    @property
    def weight(self) -> int:
        """What it counts against MAX_OLD_WEIGHT (X6)."""
        pieces = self.saved.piece_count + self.progress.piece_count
        return _BASE_WEIGHT + pieces + len(self.progress.intervals)

    def next(self, checkpoint: int) -> Version:
        """A copy, for a later checkpoint, to be changed."""
        return Version(checkpoint, self.saved.copy(), self.progress.copy(), self.metadata)

    def __repr__(self) -> str:
        return f"Version({self.checkpoint}, {self.states}, {self.progress}, {self.metadata!r})"


class Kept:
    """A complete checkpoint (X1): `id` is the offset of the record that began it, `log_time` that of its completion.

    `versions`: those that the checkpoint before it does not see.
    """

    __slots__ = ("id", "kind", "log_time", "versions")

    def __init__(self, checkpoint: int, log_time: int, kind: int, versions: dict[Key, Version]) -> None:
        self.id = checkpoint
        self.log_time = log_time
        self.kind = kind
        self.versions = versions

    @property
    def row(self) -> tuple[int, int, int]:
        """(id, log time, kind), as S1 and D3 list it."""
        return self.id, self.log_time, self.kind

    def __repr__(self) -> str:
        return f"Kept({self.id}, {self.log_time}, {self.kind})"


class Answer(NamedTuple):
    """What a member said to a barrier: at which generation, and REFUSED, REACHED or REACHED_AND_LEAVES."""

    generation: int
    answer: int


class Barrier:
    """The checkpoint that is being taken (X3).

    `id`: the offset of its BeginCheckpoint; `opened`: the log time there; `passing`: it is for a hand-over; `answers`:
    by slot; `versions`: what these hand in. `waiting`, `reached`: how many owners have not answered, and answered
    REACHED or REACHED_AND_LEAVES.
    """

    __slots__ = ("answers", "id", "opened", "passing", "reached", "timeout_ms", "versions", "waiting")

    def __init__(self, barrier: int, opened: int, timeout_ms: int, passing: bool) -> None:
        self.id = barrier
        self.opened = opened
        self.timeout_ms = timeout_ms
        self.passing = passing
        self.answers: dict[int, Answer] = {}
        self.versions: dict[Key, Version] = {}
        self.waiting = 0
        self.reached = 0

    def is_over(self, log_time: int) -> bool:
        """Whether it has been open for longer than its time."""
        return log_time - self.opened > self.timeout_ms

    def count(self, owners: AbstractSet[int]) -> None:
        """These own something from now on."""
        answers = [self.answers[slot].answer for slot in owners if slot in self.answers]
        self.waiting = len(owners) - len(answers)
        self.reached = sum(answer != REFUSED for answer in answers)

    @property
    def answer_rows(self) -> list[tuple[int, int, int]]:
        """(slot, generation, answer), sorted, as S1 lists them."""
        return [(slot, *answer) for slot, answer in sorted(self.answers.items())]


class Checkpoints:
    """What a group that takes checkpoints has besides (X1). Live state: read it, don't write it.

    `keep`: how many periodic checkpoints are kept; `hold`: a checkpoint is one moment for all; `kept`: all that are
    complete, ascending, at least one; `seen`: what the newest sees of each partition that has a version. `owners`: the
    slots that own a piece, `revoked`: the partitions with a revoked piece, both as of the last rebalance. `unset`:
    partitions without a start.
    """

    __slots__ = (
        *("barrier", "hold", "keep", "kept", "old_weight", "owners", "revoked", "seen", "unset"),
        "went_back_to",
    )

    def __init__(self, keep: int, hold: bool) -> None:
        self.keep = keep
        self.hold = hold
        self.barrier: Barrier | None = None
        self.kept: list[Kept] = []
        self.seen: dict[Key, Version] = {}
        self.unset: set[Key] = set()
        self.owners: AbstractSet[int] = frozenset()
        self.revoked: AbstractSet[Key] = frozenset()
        #: The weight of all versions that the newest does not see.
        self.old_weight = 0
        #: The checkpoint of the last Rollback, if no member was there; 0: not known. In no snapshot: only X17 asks.
        self.went_back_to = 0

    # -- reading ---------------------------------------------------------------------------------------

    @property
    def newest(self) -> int:
        """The id of the newest checkpoint."""
        return self.kept[-1].id

    @property
    def rows(self) -> list[tuple[int, int, int]]:
        """(id, log time, kind) of each checkpoint, ascending."""
        return [each.row for each in self.kept]

    def find(self, checkpoint: int) -> Kept | None:
        """The checkpoint with this id, if it is kept."""
        place = self._place(checkpoint)
        return None if place is None else self.kept[place]

    def can_pin(self) -> bool:
        """Whether one more may be pinned (X9)."""
        return sum(each.kind == PINNED for each in self.kept) < MAX_PINNED

    def views(self, key: Key) -> Iterator[tuple[Kept, Version | None]]:
        """What each checkpoint sees of a partition, ascending; None: `initial`."""
        version = None
        for each in self.kept:
            version = each.versions.get(key, version)
            yield each, version

    def versions(self, key: Key) -> list[Version]:
        """All versions of a partition, ascending; that of the open barrier is the last."""
        found = [each.versions[key] for each in self.kept if key in each.versions]
        if self.barrier is not None and key in self.barrier.versions:
            found.append(self.barrier.versions[key])
        return found

    def all_versions(self) -> dict[Key, list[Version]]:
        """`versions` of all partitions that have any."""
        found: dict[Key, list[Version]] = {}
        layers = [each.versions for each in self.kept]
        if self.barrier is not None:
            layers.append(self.barrier.versions)
        for layer in layers:
            for key, version in layer.items():
                found.setdefault(key, []).append(version)
        return found

    def size(self) -> int:
        """How many checkpoints and versions there are (S2)."""
        being_made = 0 if self.barrier is None else len(self.barrier.versions)
        return len(self.kept) + sum([len(each.versions) for each in self.kept]) + being_made

    def _place(self, checkpoint: int) -> int | None:
        place = bisect_left(self.kept, checkpoint, key=_id)
        return place if place < len(self.kept) and self.kept[place].id == checkpoint else None

    # -- changing --------------------------------------------------------------------------------------

    def open(self, barrier: Barrier) -> None:
        """From now on this barrier waits for the owners."""
        self.barrier = barrier
        barrier.count(self.owners)

    def note(self, slot: int, answer: Answer, versions: Mapping[Key, Version]) -> None:
        """A member has answered the open barrier."""
        barrier = self.barrier
        assert barrier is not None
        barrier.versions.update(versions)
        barrier.answers[slot] = answer
        if slot in self.owners:
            barrier.waiting -= 1
            barrier.reached += answer.answer != REFUSED

    def forget_answer(self, slot: int) -> None:
        """Its member is removed or replaced; the rebalance that follows counts again."""
        if self.barrier is not None:
            self.barrier.answers.pop(slot, None)

    def rebalanced(self, owners: AbstractSet[int], revoked: AbstractSet[Key]) -> None:
        """These slots own something now, and something of these partitions is revoked."""
        self.owners, self.revoked = owners, revoked
        if self.barrier is not None:
            self.barrier.count(owners)

    def complete(self, made: Kept, undone: AbstractSet[int] = frozenset()) -> None:
        """This one is the newest from now on: a passing one and these go, then what exceeds the limits (X6, X10)."""
        passing = self.kept[-1] if self.kept and self.kept[-1].kind == PASSING else None
        for key, version in made.versions.items():
            before = self.seen.get(key)
            if before is not None:
                self.old_weight += before.weight
            self.seen[key] = version
        self.kept.append(made)
        for each in [each for each in self.kept[:-1] if each is passing or each.id in undone]:
            self.drop(each.id)
        periodic = [each.id for each in self.kept if each.kind == PERIODIC]
        for checkpoint in periodic[: max(0, len(periodic) - self.keep)]:
            self.drop(checkpoint)
        while self.old_weight > MAX_OLD_WEIGHT and len(self.kept) > 1:
            older = self.kept[:-1]
            self.drop(next((each.id for each in older if each.kind == PERIODIC), older[0].id))

    def pin(self, checkpoint: int) -> None:
        """This one is kept until it is retired."""
        found = self.find(checkpoint)
        assert found is not None
        found.kind = PINNED

    def drop(self, checkpoint: int) -> None:
        """One that is not the newest is kept no longer; versions that no checkpoint sees now vanish."""
        place = self._place(checkpoint)
        assert place is not None
        older, heir = self.kept.pop(place).versions, self.kept[place]
        newer = heir.versions
        for key in older.keys() & newer.keys():
            self.old_weight -= older.pop(key).weight
        if len(older) > len(newer):
            older.update(newer)
            heir.versions = older
        else:
            newer.update(older)

    def go_back(self, checkpoint: int) -> set[Key]:
        """Drop all above this one, which is kept, and the versions above it; the partitions that this changed."""
        changed: set[Key] = set()
        while self.newest != checkpoint:
            for key, version in self.kept.pop().versions.items():
                changed.add(key)
                if self.seen[key] is not version:
                    self.old_weight -= version.weight
        for key in changed:
            found = next((each.versions[key] for each in reversed(self.kept) if key in each.versions), None)
            if found is None:
                del self.seen[key]
            else:
                self.seen[key] = found
                self.old_weight -= found.weight
        return changed


def restored(keep: int, hold: bool, kept: Sequence[Kept]) -> Checkpoints:
    """Those of a snapshot."""
    found = Checkpoints(keep, hold)
    found.kept = list(kept)
    weight = 0
    for each in kept:
        found.seen.update(each.versions)
        weight += sum([version.weight for version in each.versions.values()])
    found.old_weight = weight - sum([version.weight for version in found.seen.values()])
    return found


def _id(kept: Kept) -> int:
    return kept.id
