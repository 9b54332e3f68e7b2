"""What happened to a group's checkpoints, by its home's log: who began them and answered, what moved, what went back.

The state (:mod:`kafka_marshal.observe.checkpoints`) has what is so now. This has the way there, as far as the log is
read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kafka_marshal.observe.checkpoints import KeyCut, Unsaved, cuts_now, owners_of
from kafka_marshal.observe.text import count, listed, span
from rationalizer import AnswerBarrier, Rollback, codes
from rationalizer.wire.wellformed import REACHED_AND_LEAVES, REFUSED

if TYPE_CHECKING:
    from kafka_marshal.ports import TopicPartition
    from rationalizer import Group, Outcome, Piece, World

#: Events that are kept of a group, each kind.
_KEPT = 100


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
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
    missing: tuple[KeyCut, ...] = ()
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


Happened = CompleteCheckpoint | Ended | WentBack


@dataclass(slots=True)
class MemberAnswer:
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
    answers: dict[int, MemberAnswer] = field(default_factory=dict)


@dataclass(slots=True)
class CheckpointHistory:
    """Folds the log of a group's home; give it every record after its world has applied it."""

    group_id: str
    taken: dict[int, CompleteCheckpoint] = field(default_factory=dict)
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
                self._open.answers[slot] = MemberAnswer(self._name(slot), barrier.opened, each.answer, set())
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
            leavers = self._leavers(was) if was is not None and isinstance(closed, CompleteCheckpoint) else set()
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
            if isinstance(each, CompleteCheckpoint):
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
        barrier = checkpoints.barrier
        if barrier is not None and barrier.id == offset:
            self._open = OpenBarrier(offset, log_time, barrier.timeout_ms, outcome.message.client_id)
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
                self._open.answers[slot] = MemberAnswer(client, log_time, message.answer, keys)
                self._note_refusal(slot, message.answer, log_time)

    def _note_refusal(self, slot: int, answer: int, log_time: int) -> None:
        assert self._open is not None
        known = self.unsaved.pop(slot, None)
        if answer == REFUSED:
            since, count = (log_time, 0) if known is None else (known.since, known.count)
            self.unsaved[slot] = Unsaved(*self._members[slot], since, count + 1, self._open.id)

    def _closed(self, group: Group, outcome: Outcome, offset: int, log_time: int) -> CompleteCheckpoint | Ended | None:
        """How the barrier that was open was closed by this record; None: it was not."""
        checkpoints, was = group.checkpoints, self._open
        assert checkpoints is not None
        if was is None or (checkpoints.barrier is not None and checkpoints.barrier.id == was.id):
            return None
        self._open = None
        if any(kept.id == was.id for kept in checkpoints.kept):
            return self._complete(group, was, offset, log_time)
        return self._why_ended(group, was, outcome, log_time)

    def _complete(self, group: Group, was: OpenBarrier, offset: int, log_time: int) -> CompleteCheckpoint:
        handed_in = {slot: each for slot, each in was.answers.items() if each.answer != REFUSED}
        owners = {piece.owner for _, piece in self._pieces}
        for slot, each in handed_in.items():
            self._safe[slot] = each.log_time
        cuts = {(cut.key, cut.lo): cut.cut for cut in cuts_now(group)}
        missing = [
            KeyCut(*key, piece.lo, piece.hi, cuts.get((key, piece.lo)), self._name(piece.owner), why)
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
        return CompleteCheckpoint(
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
        if outcome.by_operator:
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
            is_set = outcome.by_operator
            partitions = len({(entry[0], entry[1]) for entry in message.entries}) if is_set else 0
            yield CompleteCheckpoint(offset, log_time, client, 0, 0, 0, partitions, "")
            if is_set:
                yield WentBack(offset, log_time, "positions", client, offset, partitions, None)


# -- in words ------------------------------------------------------------------------------------------------

_WHY_ENDED: Final = {
    "refused": "{} could not take it",
    "over": "its time was over without {}",
    "lost": "{} was lost",
    "rollback": "{} put the group back",
    "positions": "{} set positions",
}


def why_ended(each: Ended) -> str:
    """Why a barrier ended."""
    return _WHY_ENDED[each.why].format(each.client or "its members")


def why_went_back(why: str, client: str) -> str:
    """Why pieces went back."""
    if why == "lost":
        return f"{client} was lost"
    return f"{client} put the group back" if why == "rollback" else f"{client} set positions"


def happened_text(each: Happened) -> str:
    """One event in words."""
    if isinstance(each, CompleteCheckpoint):
        return _taken_text(each)
    if isinstance(each, Ended):
        return f"barrier {each.barrier} ended without a checkpoint: {why_ended(each)}"
    undone = "" if each.undone_ms is None else f", at most {span(each.undone_ms)} undone"
    return (
        f"{why_went_back(each.why, each.client)}: {count(each.pieces, 'piece')} at checkpoint {each.checkpoint}{undone}"
    )


def _taken_text(each: CompleteCheckpoint) -> str:
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
