"""The checkpoints of a group: what happened to them, as far as the log is read; what is so now; as rows; in words.

The history says who began and answered each, what moved, and what went back. The state says which are kept, and what
each has of each partition (X1, X2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.observe.text import count, listed, span
from rationalizer import AnswerBarrier, BeginCheckpoint, CommitOffsets, Rollback, codes
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import REACHED_AND_LEAVES, REFUSED

if TYPE_CHECKING:
    from kafka_marshal.ports import TopicPartition
    from rationalizer import Group, Outcome, Piece, World
    from rationalizer.done_through import KeyPiece
    from rationalizer.groups.checkpoints import Checkpoints

#: Events that are kept of a group, each kind.
_KEPT = 100


@dataclass(frozen=True, slots=True)
class Taken:
    """A checkpoint that is complete. Times are log time (ms)."""

    checkpoint: int
    log_time: int
    #: The client that began it.
    began_by: str
    took_ms: int
    #: The members that own pieces, and those of them that handed in.
    owners: int
    members: int
    #: The partitions that were handed in.
    partitions: int
    #: The member that answered last; "": there was none.
    slowest: str
    #: Pieces that kept an older cut, as their owners did not answer, or refused.
    missing: tuple[Cut, ...] = ()
    #: Pieces that it handed to another member, and the members that left with it.
    handed_over: int = 0
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """A barrier that ended without a checkpoint; nothing was undone by it."""

    barrier: int
    log_time: int
    #: "refused", "over", "lost", "rollback" or "positions".
    why: str
    #: The members that refused, that had not answered, or that were lost; the client that set back.
    client: str


@dataclass(frozen=True, slots=True)
class WentBack:
    """Pieces that continue from a checkpoint, since their owner was lost, or since a client set them back."""

    offset: int
    log_time: int
    #: "lost", "rollback" or "positions".
    why: str
    client: str
    checkpoint: int
    pieces: int
    #: Since the owner's last answer that a checkpoint has, or since the checkpoint (ms); None: the log that was read
    #: does not say.
    undone_ms: int | None


Happened = Taken | Ended | WentBack


@dataclass(slots=True)
class Answer:
    """What a member answered to the open barrier, and the partitions that it handed in."""

    client: str
    log_time: int
    answer: int
    keys: set[TopicPartition]


@dataclass(slots=True)
class OpenBarrier:
    """The barrier that is open."""

    id: int
    opened: int
    timeout_ms: int
    began_by: str
    #: By slot.
    answers: dict[int, Answer] = field(default_factory=dict)


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


@dataclass(slots=True)
class CheckpointHistory:
    """Folds the log of a group's home; give it every record after its world has applied it."""

    group_id: str
    taken: dict[int, Taken] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    went_back: list[WentBack] = field(default_factory=list)
    #: What the last record did.
    last: tuple[Happened, ...] = ()
    #: By slot.
    unsaved: dict[int, Unsaved] = field(default_factory=dict)
    _open: OpenBarrier | None = None
    _newest: int = 0
    _times: dict[int, int] = field(default_factory=dict)
    _generation: int = -1
    #: slot → (client_id, instance_id)
    _members: dict[int, tuple[str, str]] = field(default_factory=dict)
    _pieces: list[tuple[TopicPartition, Piece]] = field(default_factory=list)
    #: slot → log time of its last answer that a checkpoint has, or since when it has pieces.
    _safe: dict[int, int] = field(default_factory=dict)

    def begin(self, world: World) -> None:
        """The log that is read begins with this state."""
        group = world.group(self.group_id)
        if group is None or group.checkpoints is None:
            return
        self._remember(group)
        barrier = group.checkpoints.barrier
        if barrier is not None:
            self._open = OpenBarrier(barrier.id, barrier.opened, barrier.timeout_ms, "")
            for slot, each in barrier.answers.items():
                self._open.answers[slot] = Answer(self._name(slot), barrier.opened, each.answer, set())
                self._note_refusal(slot, each.answer, barrier.opened)

    def see(self, world: World, outcome: Outcome) -> tuple[Happened, ...]:
        """Take in a record that this world has just applied; what it did."""
        self.last = ()
        group = world.group(self.group_id)
        checkpoints = None if group is None else group.checkpoints
        if not outcome.accepted or (checkpoints is None and self._generation < 0):
            return ()
        if group is None or checkpoints is None:  # it takes none any more
            self._reset()
            return ()
        at = world.next_offset - 1, world.log_time
        self._note_answer(outcome, *at)
        found: list[Happened] = []
        if self._generation >= 0:
            was = self._open
            closed = self._closed(group, outcome, *at)
            leavers = self._leavers(was) if was is not None and isinstance(closed, Taken) else set()
            found += [] if closed is None else [closed]
            found += self._lost(group, leavers, *at)
        found += self._at_once(group, outcome, *at)
        self._note(found)
        self._follow(group, outcome, *at)
        self.last = tuple(found)
        return self.last

    def seen_at(self, checkpoint: int) -> int | None:
        """When this checkpoint was complete; None: it is not in the log that was read."""
        return self._times.get(checkpoint)

    # -- inside ------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._open, self._generation, self._newest = None, -1, 0
        self._members, self._pieces, self._safe, self._times, self.unsaved = {}, [], {}, {}, {}

    def _name(self, slot: int) -> str:
        return self._members.get(slot, ("", ""))[0]

    def _remember(self, group: Group) -> None:
        checkpoints = group.checkpoints
        assert checkpoints is not None
        self._generation = group.generation
        self._members = {slot: (each.client_id, each.instance_id) for slot, each in group.members.items()}
        self._pieces = list(owners_of(group))
        ids = {slot: (each.client, each.instance) for slot, each in self.unsaved.items()}
        self.unsaved = {slot: self.unsaved[slot] for slot in ids if ids[slot] == self._members.get(slot)}
        self._newest = checkpoints.newest
        self._times.update({kept.id: kept.log_time for kept in checkpoints.kept})

    def _note(self, found: list[Happened]) -> None:
        for each in found:
            if isinstance(each, Taken):
                self.taken[each.checkpoint] = each
            elif isinstance(each, Ended):
                self.ended.append(each)
            else:
                self.went_back.append(each)
        for checkpoint in list(self.taken)[:-_KEPT]:
            del self.taken[checkpoint]
        del self.ended[:-_KEPT], self.went_back[:-_KEPT]

    def _follow(self, group: Group, outcome: Outcome, offset: int, log_time: int) -> None:
        checkpoints = group.checkpoints
        assert checkpoints is not None
        if outcome.is_a(BeginCheckpoint) and checkpoints.barrier is not None and checkpoints.barrier.id == offset:
            message = outcome.message
            self._open = OpenBarrier(offset, log_time, message.timeout_ms, message.client_id)
        if group.generation != self._generation:
            self._remember(group)
            owners = {piece.owner for _, piece in self._pieces}
            self._safe = {slot: self._safe.get(slot, log_time) for slot in owners}
        self._newest = checkpoints.newest
        for kept in checkpoints.kept[-1:]:
            self._times[kept.id] = kept.log_time

    def _note_answer(self, outcome: Outcome, offset: int, log_time: int) -> None:
        message = outcome.message
        if self._open is None or message is None or not outcome.is_a(AnswerBarrier) or outcome.code != codes.OK:
            return
        if message.barrier != self._open.id:
            return
        for slot, (client, instance) in self._members.items():
            if (client, instance) == (message.client_id, message.instance_id):
                keys = {(entry[0], entry[1]) for entry in message.entries}
                self._open.answers[slot] = Answer(client, log_time, message.answer, keys)
                self._note_refusal(slot, message.answer, log_time)

    def _note_refusal(self, slot: int, answer: int, log_time: int) -> None:
        assert self._open is not None
        known = self.unsaved.pop(slot, None)
        if answer == REFUSED:
            since, count = (log_time, 0) if known is None else (known.since, known.count)
            self.unsaved[slot] = Unsaved(*self._members[slot], since, count + 1, self._open.id)

    def _closed(self, group: Group, outcome: Outcome, offset: int, log_time: int) -> Taken | Ended | None:
        """How the barrier that was open was closed by this record; None: it was not."""
        checkpoints, was = group.checkpoints, self._open
        assert checkpoints is not None
        if was is None or (checkpoints.barrier is not None and checkpoints.barrier.id == was.id):
            return None
        self._open = None
        if any(kept.id == was.id for kept in checkpoints.kept):
            return self._complete(group, was, offset, log_time)
        return self._why_ended(group, was, outcome, log_time)

    def _complete(self, group: Group, was: OpenBarrier, offset: int, log_time: int) -> Taken:
        handed_in = {slot: each for slot, each in was.answers.items() if each.answer != REFUSED}
        owners = {piece.owner for _, piece in self._pieces}
        for slot, each in handed_in.items():
            self._safe[slot] = each.log_time
        cuts = {(cut.key, cut.lo): cut.cut for cut in cuts_now(group)}
        missing = [
            Cut(*key, piece.lo, piece.hi, cuts.get((key, piece.lo)), self._name(piece.owner), why)
            for key, piece in self._pieces
            if piece.owner not in handed_in
            for why in ("refused" if piece.owner in was.answers else "not answered",)
        ]
        after = {(key, piece.lo): piece for key, piece in owners_of(group)} if group.generation == offset else {}
        moved = [
            key
            for key, piece in self._pieces
            if piece.owner in handed_in and (key, piece.lo) in after and after[key, piece.lo].owner != piece.owner
        ]
        slowest = next(reversed(handed_in.values()), None)
        return Taken(
            was.id,
            log_time,
            was.began_by,
            log_time - was.opened,
            len(owners),
            len(handed_in),
            len({key for each in handed_in.values() for key in each.keys}),
            "" if slowest is None else slowest.client,
            tuple(missing),
            len(moved),
            tuple(sorted(self._name(slot) for slot in self._leavers(was) if slot not in group.members)),
        )

    @staticmethod
    def _leavers(was: OpenBarrier) -> set[int]:
        return {slot for slot, each in was.answers.items() if each.answer == REACHED_AND_LEAVES}

    def _why_ended(self, group: Group, was: OpenBarrier, outcome: Outcome, log_time: int) -> Ended:
        client = "" if outcome.message is None else outcome.message.client_id
        if outcome.is_a(Rollback):
            return Ended(was.id, log_time, "rollback", client)
        if _sets_positions(outcome):
            return Ended(was.id, log_time, "positions", client)
        refused = [each.client for each in was.answers.values() if each.answer == REFUSED]
        if refused:
            return Ended(was.id, log_time, "refused", ", ".join(sorted(refused)))
        owners = {piece.owner for _, piece in self._pieces}
        if log_time - was.opened > was.timeout_ms:
            late = sorted({self._name(slot) for slot in owners if slot not in was.answers})
            return Ended(was.id, log_time, "over", ", ".join(late))
        gone = sorted({self._name(slot) for slot in self._gone(group)})
        return Ended(was.id, log_time, "lost", ", ".join(gone))

    def _gone(self, group: Group) -> set[int]:
        """Slots of owners that are no members any more, or were replaced by another run."""
        owners = {piece.owner for _, piece in self._pieces}
        return {
            slot
            for slot in owners
            if slot not in group.members or group.members[slot].instance_id != self._members[slot][1]
        }

    def _lost(self, group: Group, leavers: set[int], offset: int, log_time: int) -> Iterator[WentBack]:
        """Members that are lost (X7): their pieces go back, in a hold group all."""
        checkpoints = group.checkpoints
        assert checkpoints is not None
        if group.generation == self._generation:
            return
        for slot in sorted(self._gone(group) - leavers):
            mine = sum(piece.owner == slot for _, piece in self._pieces)
            pieces = len(self._pieces) if checkpoints.hold else mine
            safe = self._safe.get(slot)
            undone_ms = None if safe is None else log_time - safe
            yield WentBack(offset, log_time, "lost", self._name(slot), checkpoints.newest, pieces, undone_ms)

    def _at_once(self, group: Group, outcome: Outcome, offset: int, log_time: int) -> Iterator[Happened]:
        """A checkpoint that is complete at once (the first; without owners; positions), and what a client set back."""
        message, checkpoints = outcome.message, group.checkpoints
        assert message is not None
        assert checkpoints is not None
        newest, client = checkpoints.newest, message.client_id
        if outcome.is_a(Rollback):
            reached = next((kept.log_time for kept in checkpoints.kept if kept.id == newest), log_time)
            pieces = len(self._pieces) or len(group.partitions())
            yield WentBack(offset, log_time, "rollback", client, newest, pieces, log_time - reached)
        elif newest == offset:
            is_set = _sets_positions(outcome)
            partitions = len({(entry[0], entry[1]) for entry in message.entries}) if is_set else 0
            yield Taken(offset, log_time, client, 0, 0, 0, partitions, "")
            if is_set:
                yield WentBack(offset, log_time, "positions", client, offset, partitions, None)


def _sets_positions(outcome: Outcome) -> bool:
    return outcome.is_a(CommitOffsets) and not outcome.message.member_id


#: The kind of a checkpoint (X1) in words.
KIND_WORDS: Final = ("passing", "periodic", "pinned")

#: In `states`: no state was saved.
_NONE_SAVED: Final = 0


@dataclass(frozen=True, slots=True)
class Cut:
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

    @property
    def key(self) -> TopicPartition:
        """(topic, partition)"""
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class Seen:
    """The progress of a partition as a checkpoint sees it (X2)."""

    done_through: tuple[KeyPiece, ...]
    ranges: tuple[tuple[int, int], ...]
    #: (lo, hi, id of the checkpoint under which the state was saved; 0: none was).
    states: tuple[KeyPiece, ...]

    @property
    def position(self) -> int:
        """The first offset that is not done."""
        return min(done for _, _, done in self.done_through) + 1


def seen_by(group: Group, key: TopicPartition, checkpoint: int) -> Seen:
    """What this checkpoint sees of a partition: its last version that is not above, else where the group began."""
    found = [version for version in group.versions(key) if version.checkpoint <= checkpoint]
    if found:
        version = found[-1]
        ranges = tuple((first, last) for first, last in split(version.ranges).ranges)
        return Seen(tuple(version.done_through), ranges, tuple(version.states))
    kept = group.kept(*key)
    initial = -1 if kept is None else kept.initial
    return Seen(((0, MAX_KEY_HASH, initial),), (), ((0, MAX_KEY_HASH, _NONE_SAVED),))


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


def cuts_now(group: Group) -> Iterator[Cut]:
    """The last cut of each piece that has an owner, as the newest checkpoint has it."""
    states: dict[TopicPartition, Sequence[KeyPiece]] = {}
    for key, piece in owners_of(group):
        if key not in states:
            states[key] = group.states(key)
        cut = cut_in(states[key], piece.lo, piece.hi)
        yield Cut(*key, piece.lo, piece.hi, cut or None, group.members[piece.owner].client_id)


def oldest_cut(group: Group, checkpoint: int) -> Cut | None:
    """The oldest cut of this checkpoint; of the newest with its owner. None: nothing was handed in for it so far.

    A piece that was never handed in is older than any other; its ``cut`` is None.
    """
    checkpoints = group.checkpoints
    is_newest = checkpoints is not None and checkpoint == checkpoints.newest
    found = list(cuts_now(group)) if is_newest else []
    found = found or [
        Cut(*key, lo, hi, id_ or None)
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


def checkpoints_row(
    group: Group, now_ms: int, histories: Mapping[str, CheckpointHistory] | None = None
) -> CheckpointsRow | None:
    """The row of a group; None: it takes no checkpoints. histories: by group, as far as the log was read."""
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
    history = (histories or {}).get(group.group_id)
    unsaved = tuple(
        UnsavedRow(each.client, each.instance, max(0, now_ms - each.since), each.checkpoint)
        for each in (history.unsaved.values() if history is not None else ())
    )
    return CheckpointsRow(found.keep, found.hold, found.newest, max(0, now_ms - kept[-1][1]), kept, barrier, unsaved)


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

_WHY_ENDED: Final = {
    "refused": "{} could not take it",
    "over": "its time was over without {}",
    "lost": "{} was lost",
    "rollback": "{} put the group back",
    "positions": "{} set positions",
}


def as_of_text(newest: int, age_ms: float) -> str:
    """Which checkpoint the figures of a group are of."""
    return f"as of checkpoint {newest}, {span(age_ms)} old"


def barrier_text(barrier: BarrierRow) -> str:
    """The open barrier in words."""
    waits = f", waits for {listed(barrier.waits_for)}" if barrier.waits_for else ""
    return f"{barrier.id} is being taken for {span(barrier.open_ms)}{waits}"


def why_ended(each: Ended) -> str:
    """Why a barrier ended."""
    return _WHY_ENDED[each.why].format(each.client or "its members")


def why_went_back(why: str, client: str) -> str:
    """Why pieces went back."""
    if why == "lost":
        return f"{client} was lost"
    return f"{client} put the group back" if why == "rollback" else f"{client} set positions"


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


def happened_text(each: Happened) -> str:
    """One event in words."""
    if isinstance(each, Taken):
        return _taken_text(each)
    if isinstance(each, Ended):
        return f"barrier {each.barrier} ended without a checkpoint: {why_ended(each)}"
    undone = "" if each.undone_ms is None else f", at most {span(each.undone_ms)} undone"
    return (
        f"{why_went_back(each.why, each.client)}: {count(each.pieces, 'piece')} at checkpoint {each.checkpoint}{undone}"
    )


def _taken_text(each: Taken) -> str:
    text = f"checkpoint {each.checkpoint} is complete"
    if each.owners:
        text += f" after {span(each.took_ms)}, {each.members} of {count(each.owners, 'member')}"
    absent = sorted({cut.client or "" for cut in each.missing})
    if absent:
        text += f"; without {listed(absent)}, whose pieces keep an older cut"
    if each.handed_over:
        text += f"; hands over {count(each.handed_over, 'piece')}"
    if each.left:
        text += f"; {listed(each.left)} left"
    return text
