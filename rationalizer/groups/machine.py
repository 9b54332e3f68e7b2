"""The group plane: coordinated groups (section 5), their checkpoints (section 7) and open messages (section 7b).

The life of a group, as the log moves it. Every arrow is one record; none waits for another:

                JoinGroup, CommitOffsets of a pausing client, ConfigureGroup
    unknown --------------------------------------------------------------> READY
                                                                             |  ^
                                                              JoinGroup (G11)|  | the last member leaves, or is
                                                                             v  | found overdue (G8, G13, G21)
                         rebalance that revokes (G16), or a session runs out
         STEADY  <------------------------------------------------->  PREPARE_FOR_REBALANCE
                   what is revoked is released (G14), its owner dies (G8)

`tests/tables/groups.py` has every record in every state. A record is judged by checks that need no rebalance; one
that is rejected changes nothing (G9). Being overdue is no state but a matter of log time; who is, goes when another's
record is accepted (G8).

A `Witness` is what an accepted record brings besides its own effect: who is found dead (G8), and a barrier that is
closed (X3).
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from hashlib import sha1
from typing import Any, Final, NamedTuple

from rationalizer import codes
from rationalizer.groups import barriers
from rationalizer.groups.assignors import NOBODY, STRATEGIES
from rationalizer.groups.barriers import Closing, closing_of
from rationalizer.groups.canonical import load_groups
from rationalizer.groups.checkpoints import Answer, Checkpoints
from rationalizer.groups.commits import Commits, Entry, Starts, reposition_entry
from rationalizer.groups.group import Group, Member
from rationalizer.groups.pieces import key_spans
from rationalizer.holes import NO_KEY
from rationalizer.levels import REDO_LEVEL
from rationalizer.limits import HEAD_FIELDS, MAX_GROUP_PARTITIONS, MAX_MEMBERS
from rationalizer.plane import ApplyContext, Bounds, Verdict
from rationalizer.progress import Progress
from rationalizer.routing import route_group
from rationalizer.settling import Reach, Settling
from rationalizer.snapshot import GROUPS
from rationalizer.state import GROUP
from rationalizer.wire.records import Belongs, Kind, Topics
from rationalizer.wire.unpacking import Message
from rationalizer.wire.wellformed import END, PIN, PINNED, RETIRE

NOBODY_GOES: Final[frozenset[int]] = frozenset()


class Witness(NamedTuple):
    """What a record brings besides its own effect, if it is accepted."""

    #: The barrier is closed before the record is judged; None: it stays as it is.
    closing: Closing | None
    #: The overdue that go, as the group is then.
    gone: frozenset[int]
    #: All are overdue, the sender is one of them: the log itself was silent.
    silent: bool

    @property
    def absent(self) -> frozenset[int]:
        """All that are members no longer when the record is judged."""
        return self.gone if self.closing is None else self.gone | self.closing.left

    def removes(self, member: Member) -> bool:
        """Whether the closing does: then it is a member no longer when the record is judged."""
        return self.closing is not None and member.slot in self.closing.left


NOTHING: Final = Witness(None, NOBODY_GOES, False)


def witness_of(group: Group, sender: Member | None, log_time: int, leaving: frozenset[int] = NOBODY_GOES) -> Witness:
    """`leaving`: slots that the record itself removes or replaces. Changes nothing."""
    late = group.overdue(log_time)
    checkpoints = group.checkpoints
    if checkpoints is None or checkpoints.barrier is None:
        return Witness(None, *_who_goes(group, sender, late, NOBODY_GOES)) if late else NOTHING
    gone, silent = _who_goes(group, sender, late, NOBODY_GOES)
    if not checkpoints.barrier.is_over(log_time) and checkpoints.owners.isdisjoint(gone | leaving):
        return Witness(None, gone, silent)
    closing = closing_of(checkpoints)
    if sender is not None and sender.slot in closing.left:
        sender = None
    return Witness(closing, *_who_goes(group, sender, late, closing.left))


def witness_of_positions(group: Group, log_time: int) -> Witness | None:
    """Of a pausing client's CommitOffsets (G21); None: members are at work."""
    checkpoints, late = group.checkpoints, frozenset(group.overdue(log_time))
    left, closing = NOBODY_GOES, None
    if checkpoints is not None and checkpoints.barrier is not None:
        buries = len(late) == len(group.members) and not checkpoints.owners.isdisjoint(late)
        if buries or checkpoints.barrier.is_over(log_time):
            closing = closing_of(checkpoints)
            left = closing.left
    gone = late - left
    return None if len(gone) < len(group.members) - len(left) else Witness(closing, gone, False)


def _who_goes(
    group: Group, sender: Member | None, late: AbstractSet[int], left: AbstractSet[int]
) -> tuple[frozenset[int], bool]:
    """The slots that an accepted record of this sender buries, and whether the log itself was silent (G8).

    `left`: members that have left by then.
    """
    late = frozenset(late - left)
    if sender is None or sender.slot not in late:
        return late, False
    if len(late) == len(group.members) - len(left):
        return NOBODY_GOES, True
    return late - {sender.slot}, False


def bury(group: Group, gone: AbstractSet[int], silent: bool, context: ApplyContext) -> None:
    """The overdue are members no longer; or, after a silence of the whole log, all sessions begin again (G8)."""
    log_time = context.log_time
    if gone:
        late = [member for slot, member in group.members.items() if slot in gone]
        context.silent = tuple([(member.client_id, log_time - member.last_beat) for member in late])
        group.remove(gone)
    if silent:
        for member in group.members.values():
            group.beat(member, log_time)


#: Pieces that were released.
_OWNERLESS: Final = frozenset([NOBODY])

_OPERATOR: Final = Reach(None)
_OWNER_OF_ALL: Final = Reach(None, makes=True)

#: RFC 4122's name space for DNS names, which uuid5 hashes first (G6).
_NAMESPACE: Final = bytes.fromhex("6ba7b8129dad11d180b400c04fd430c8")


class KnownGroups:
    """The coordinated groups of one CP, by group_id: those it is the home of, and marks of others (G2)."""

    __slots__ = ("_partition", "_partitions", "_weight", "groups", "part")

    def __init__(self, partition: int, partitions: int) -> None:
        self.part = GROUPS
        self.groups: dict[str, Group] = {}
        self._partition = partition
        self._partitions = partitions
        #: Partitions of all topics that all groups subscribe to (G11).
        self._weight = 0

    def belongs(self, kind: Kind, message: Message) -> bool:
        """L3, by group; ConfigureGroup belongs to every CP."""
        return kind.belongs is Belongs.EVERYWHERE or self._is_home(message[4])

    def generation(self, group_id: str) -> int | None:
        """The group's generation; None: this CP knows no such group (D2)."""
        group = self.groups.get(group_id)
        return None if group is None else group.generation

    def checkpoint(self, group_id: str) -> tuple[int | None, int | None]:
        """The group's newest checkpoint, and its open barrier (D2)."""
        group = self.groups.get(group_id)
        if group is None or group.checkpoints is None:
            return None, None
        barrier = group.checkpoints.barrier
        return group.checkpoints.newest, None if barrier is None else barrier.id

    def knows(self, group_id: str) -> bool:
        """Whether there is state of the group (G1)."""
        return group_id in self.groups

    def is_active(self, group_id: str, context: ApplyContext) -> bool:
        """Whether there is a member that is not overdue, or the sender has not paused it here (C16)."""
        group = self.groups.get(group_id)
        if group is None:
            return False
        return not context.pausing or len(group.overdue(context.log_time)) < len(group.members)

    def forget(self, group_id: str) -> None:
        """Drop the group (C16)."""
        group = self.groups.pop(group_id, None)
        if group is not None:
            self._weight -= group.weight

    def size(self) -> int:
        """How many members, partitions, checkpoints and versions the groups have (S2)."""
        return sum(group.size() for group in self.groups.values())

    def hole_count(self) -> int:
        """How many holes all groups have (H1). Any thread."""
        return sum([group.hole_count() for group in list(self.groups.values())])

    def rows(self, level: int) -> list[Sequence[Any]]:
        """All groups, sorted (S1)."""
        return GROUP.rows([self.groups[group_id] for group_id in sorted(self.groups)], level)

    def load(self, rows: Sequence[Any], bounds: Bounds) -> None:
        """Take over the groups of a snapshot."""
        for group in load_groups(rows, bounds):
            self.groups[group.group_id] = group
            self._weight += group.weight

    def _is_home(self, group_id: str) -> bool:
        return route_group(group_id, self._partitions) == self._partition

    def _too_many(self, group: Group, topics: Topics, leaving: AbstractSet[int], reported: Topics) -> bool:
        """Whether the groups of this CP would subscribe to too many partitions (G11).

        If `topics` had their counts, and `reported` took the place of what the members `leaving` report.
        """
        most = self._weight + sum([max(1, count) for _, count in topics])
        if most <= MAX_GROUP_PARTITIONS:
            return False  # the common case, without reading what all members subscribe to
        after = group.weight_after(leaving, reported, topics)
        return self._weight - group.weight + after > MAX_GROUP_PARTITIONS


class GroupPlane(KnownGroups):
    """Judges all records of coordinated groups."""

    __slots__ = ()

    def _join_group(self, message: Message, context: ApplyContext) -> str | Verdict:
        """G11: a newcomer, the same instance again, or another instance in its place."""
        _, _, instance_id, client_id, group_id, *own = message
        member_id, seen, session_timeout_ms, strategy, share, pattern, topics = own
        known = self.groups.get(group_id)
        group = Group(group_id) if known is None else known
        if member_id:
            sender = group.sender(member_id, client_id, instance_id)
            if sender is None:
                return codes.UNKNOWN_CONSUMER
        else:
            sender = group.clients.get(client_id)
        witness = witness_of(group, sender, context.log_time, _replaced(sender, instance_id, seen))
        if sender is not None and witness.removes(sender):
            sender = None
            if member_id:
                return codes.UNKNOWN_CONSUMER
        if sender is not None and sender.instance_id != instance_id and sender.joined >= seen:
            return codes.REPLACED
        refusal = self._join_refusal(group, sender, witness, session_timeout_ms, strategy, topics)
        if refusal is not None:
            return refusal

        self.groups[group_id] = group
        others = settle(group, witness, context)
        names = frozenset([topic for topic, _ in topics])
        strategy = group.settings.strategy or strategy
        values = (strategy, session_timeout_ms, share, pattern, names)
        replaced = _replaced(sender, instance_id, seen)
        same = False
        if sender is None:
            member = Member(context.offset, client_id)
            group.add(member)
        else:
            member = sender
            before = (group.strategy, member.session_timeout_ms, member.allow_key_share, member.pattern, member.topics)
            same = not replaced and before == values
        if sender is None or replaced:
            member.instance_id = instance_id
            member.member_id = member_id_of(group_id, self._partition, context.offset)
        if replaced and group.checkpoints is not None:
            group.checkpoints.forget_answer(member.slot)
        group.strategy = strategy
        member.allow_key_share = share
        member.pattern = pattern
        member.joined = context.offset
        group.report(member, names)
        grown = group.raise_counts(topics)
        group.renew(member, session_timeout_ms, context.log_time)
        if same and not grown:
            if witness.gone or others:
                self._rebalance(group, context, witness.gone, others)
            return Verdict(codes.ALREADY_MEMBER, True, None, member.member_id)
        self._rebalance(group, context, witness.gone | replaced, others)
        return Verdict(codes.OK, True, None, member.member_id)

    def _join_refusal(
        self,
        group: Group,
        sender: Member | None,
        witness: Witness,
        session_timeout_ms: int,
        strategy: str,
        topics: Topics,
    ) -> str | None:
        """G11's checks from the strategy on."""
        gone = witness.absent
        others = len(group.members) - len(gone) - (sender is not None)
        if strategy not in STRATEGIES:
            return codes.UNKNOWN_PARTITIONING_STRATEGY
        if others and group.settings.strategy is None and group.strategy != strategy:
            return codes.INCONSISTENT_PARTITIONING_STRATEGY
        if session_timeout_ms > group.settings.max_session_timeout_ms:
            return codes.SESSION_TIMEOUT_TOO_HIGH
        if others >= MAX_MEMBERS:
            return codes.GROUP_FULL
        if self._too_many(group, topics, gone | slots_of(sender), topics):
            return codes.TOO_MANY_PARTITIONS
        return None

    def _group_heartbeat(self, message: Message, context: ApplyContext) -> str | Verdict:
        """G13: it lives, whatever generation it knows."""
        *_, member_id, generation = message
        found = self._sender(message, context, member_id, generation)
        if isinstance(found, str):
            return found
        group, sender, witness = found
        self._lives(group, sender, witness, context)
        return Verdict(codes.OK if generation == group.generation else codes.ILLEGAL_GENERATION, True)

    def _leave_group(self, message: Message, context: ApplyContext) -> str:
        """G13: the sender goes."""
        *_, member_id, generation = message
        found = self._sender(message, context, member_id, generation, leaves=True)
        if isinstance(found, str):
            return found
        group, sender, witness = found
        others = settle(group, witness, context)
        leaver = frozenset([sender.slot])
        group.remove(leaver)
        self._rebalance(group, context, witness.gone | leaver, others)
        return codes.OK

    def _commit_offsets(self, message: Message, context: ApplyContext) -> str | Verdict:
        """G14, or G21 without a member_id."""
        *_, member_id, generation, in_order, entries = message
        if not member_id:
            return self._reposition(message, context)
        found = self._sender(message, context, member_id, generation)
        if isinstance(found, str):
            return found
        group, sender, witness = found
        self._lives(group, sender, witness, context)
        judge = Commits if group.checkpoints is None else Starts
        commits = judge(group, sender.slot, generation, in_order)
        return of_entries(tuple(map(commits.commit, entries)))

    def _reposition(self, message: Message, context: ApplyContext) -> str | Verdict:
        """G21: the pausing client sets positions, of a group without members at work."""
        group_id, entries = message[4], message[-1]
        if not context.pausing:
            return codes.UNKNOWN_CONSUMER
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group(group_id)
        witness = witness_of_positions(group, context.log_time)
        if witness is None:
            return codes.GROUP_ACTIVE
        self._lives(group, None, witness, context)
        if group.checkpoints is not None:
            return of_entries(barriers.set_positions(group, context.offset, context.log_time, entries))
        return of_entries(tuple([reposition_entry(group, entry, context.again) for entry in entries]))

    def _topics_changed(self, message: Message, context: ApplyContext) -> str:
        """G13: what the sender's pattern matches now."""
        *_, member_id, topics = message
        found = self._sender(message, context, member_id)
        if isinstance(found, str):
            return found
        group, sender, witness = found
        absent = witness.absent
        reported, leaving = (topics, absent | {sender.slot}) if sender.pattern else ((), absent)
        if self._too_many(group, topics, leaving, reported):
            return codes.TOO_MANY_PARTITIONS
        others = settle(group, witness, context)
        before = sender.topics
        if sender.pattern:
            group.report(sender, frozenset([topic for topic, _ in topics]))
        changed = group.raise_counts(topics) or sender.topics != before
        group.beat(sender, context.log_time)
        if changed or witness.gone or others:
            self._rebalance(group, context, witness.gone, others)
        return codes.OK

    def _configure_group(self, message: Message, context: ApplyContext) -> str:
        """G19, R7; elsewhere than at home it only says what kind of group it is (G2)."""
        group_id, pairs = message[4], message[HEAD_FIELDS]
        found: dict[str, Any] = dict(pairs)
        if found.get("strategy") is not None and found["strategy"] not in STRATEGIES:
            return codes.UNKNOWN_PARTITIONING_STRATEGY
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group(group_id)
        if not self._is_home(group_id):
            return codes.OK
        if "accept_range_fetch" in found:
            found["accept_range_fetch"] = tuple(sorted(set(found["accept_range_fetch"])))
        before, group.settings = group.settings, replace(group.settings, **found)
        changed = (
            before.accept_individual_commit != group.settings.accept_individual_commit
            or before.accept_range_fetch != group.settings.accept_range_fetch
        )
        wanted = group.settings.strategy
        if group.members and (changed or wanted not in {None, group.strategy}):
            group.strategy = wanted or group.strategy
            self._rebalance(group, context, NOBODY_GOES)
        return codes.OK

    # -- checkpoints -----------------------------------------------------------------------------------

    def _begin_checkpoint(self, message: Message, context: ApplyContext) -> str:
        """X4: the first checkpoint, or a barrier."""
        *_, after, timeout_ms, keep, hold = message
        group = self.groups.get(message[4])
        checkpoints = None if group is None else group.checkpoints
        if group is None or after != (0 if checkpoints is None else checkpoints.newest):
            return codes.UNKNOWN_CHECKPOINT
        if checkpoints is None:
            if group.members:
                return codes.GROUP_ACTIVE
            if group.hole_count():
                return codes.WRONG_MODE
            barriers.start(group, context.offset, context.log_time, keep, hold)
            return codes.OK
        if checkpoints.barrier is not None:
            return codes.BARRIER_OPEN
        barriers.begin(checkpoints, context.offset, context.log_time, timeout_ms, keep)
        if barriers.is_due(checkpoints):
            close(group, barriers.closing_of(checkpoints), context)
        return codes.OK

    def _answer_barrier(self, message: Message, context: ApplyContext) -> str | Verdict:
        """X5: what it says comes before the overdue go."""
        *_, member_id, generation, barrier, answer, entries = message
        found = self._sender(message, context, member_id, generation)
        if isinstance(found, str):
            return found
        group, sender, witness = found
        others = NOBODY_GOES if witness.closing is None else close(group, witness.closing, context)
        verdict = _answered(group, sender, barrier, Answer(generation, answer), entries)
        checkpoints = group.checkpoints
        if verdict.code == codes.OK and checkpoints is not None and barriers.is_due(checkpoints):
            others |= close(group, barriers.closing_of(checkpoints), context)
        gone = witness.gone - others
        bury(group, gone, witness.silent, context)
        if sender.slot not in others:
            group.beat(sender, context.log_time)
        if gone or others:
            self._rebalance(group, context, gone, others)
        return verdict

    def _rollback(self, message: Message, context: ApplyContext) -> str:
        """X8: all go back."""
        *_, generation, checkpoint = message
        group = self.groups.get(message[4])
        if group is None or group.checkpoints is None:
            return codes.UNKNOWN_CHECKPOINT
        if generation != group.generation:
            return codes.ILLEGAL_GENERATION
        target = checkpoint or group.checkpoints.newest
        if group.checkpoints.find(target) is None:
            return codes.UNKNOWN_CHECKPOINT
        barriers.go_back(group, target)
        group.checkpoints.went_back_to = 0 if group.members else target
        self._rebalance(group, context, frozenset(group.members))
        return codes.OK

    def _keep_checkpoint(self, message: Message, context: ApplyContext) -> str:
        """X9: retire or pin one, or take none any more."""
        *_, checkpoint, action = message
        group = self.groups.get(message[4])
        checkpoints = None if group is None else group.checkpoints
        if group is None or checkpoints is None:
            return codes.UNKNOWN_CHECKPOINT
        refusal = _keep_refusal(group, checkpoints, checkpoint, action)
        if refusal is not None:
            return refusal
        if action == RETIRE:
            checkpoints.drop(checkpoint)
        elif action == PIN:
            checkpoints.pin(checkpoint)
        else:
            barriers.end(group)
        return codes.OK

    # -- open messages ---------------------------------------------------------------------------------

    def _settle_offsets(self, message: Message, context: ApplyContext) -> str | Verdict:
        """H4: of a member, or of an operator."""
        *_, member_id, generation, seen, topic, partition, done, opened, parked = message
        group = self.groups.get(message[4])
        if group is None:
            return codes.UNKNOWN_CONSUMER
        if group.checkpoints is not None:
            return codes.WRONG_MODE
        if member_id:
            found = self._sender(message, context, member_id, generation)
            if isinstance(found, str):
                return found
            _, sender, witness = found
            self._lives(group, sender, witness, context)
        kept = group.kept(topic, partition)
        progress = Progress() if kept is None else kept.progress
        if member_id:
            settling: Settling = _OfMember(
                group, progress, sender, generation, (topic, partition), context.offset, seen
            )
        else:
            reach = _OWNER_OF_ALL if context.pausing and not group.members else _OPERATOR
            if message[0] >= REDO_LEVEL:
                reach = reach._replace(redoes=True)
            settling = Settling(progress, reach, context.offset, seen)
        answers = settling.settle(done, opened, parked)
        if kept is None and progress.holes is not None:
            group.keep(topic, partition).progress = progress
        if not member_id and codes.ACCEPTED.isdisjoint(answers):
            return Verdict(codes.FENCED, False, answers)
        return of_entries(answers)

    # -- what they share -------------------------------------------------------------------------------

    def _sender(
        self, message: Message, context: ApplyContext, member_id: str, generation: int = 0, leaves: bool = False
    ) -> tuple[Group, Member, Witness] | str:
        """A record's sender, and what it brings besides if it is accepted; or the code with which it is rejected (G10).

        generation: as the record says. leaves: the sender goes with it.
        """
        _, _, instance_id, client_id, group_id, *_ = message
        group = self.groups.get(group_id)
        sender = None if group is None else group.sender(member_id, client_id, instance_id)
        if group is None or sender is None:
            return codes.UNKNOWN_CONSUMER
        witness = witness_of(group, sender, context.log_time, slots_of(sender) if leaves else NOBODY_GOES)
        if witness is not NOTHING and witness.removes(sender):
            return codes.UNKNOWN_CONSUMER
        return codes.ILLEGAL_GENERATION if generation > group.generation else (group, sender, witness)

    def _rebalance(
        self, group: Group, context: ApplyContext, lost: AbstractSet[int], others: AbstractSet[int] = NOBODY_GOES
    ) -> None:
        """`lost`: slots that were removed or replaced; `others`: those that left at a checkpoint, and NOBODY.

        What was released NOBODY owns.
        """
        gone = lost | others
        checkpoints = group.checkpoints
        if checkpoints is not None and checkpoints.hold and lost:
            owners = barriers.owners_of(group) if NOBODY in others else checkpoints.owners
            if not owners.isdisjoint(lost):
                gone = gone | group.members.keys()
        self._weight -= group.weight
        group.rebalance(context.offset, gone)
        barriers.note_owners(group)
        self._weight += group.weight

    def _lives(self, group: Group, sender: Member | None, witness: Witness, context: ApplyContext) -> None:
        """A record that moves no pieces itself is accepted: the overdue go, with a rebalance, its sender beats (G9)."""
        others = settle(group, witness, context)
        if sender is not None:
            group.beat(sender, context.log_time)
        if witness.gone or others:
            self._rebalance(group, context, witness.gone, others)


def slots_of(sender: Member | None) -> frozenset[int]:
    """The sender's slot, if there is a sender."""
    return NOBODY_GOES if sender is None else frozenset([sender.slot])


def settle(group: Group, witness: Witness, context: ApplyContext) -> frozenset[int]:
    """A record is accepted: a barrier is closed, the overdue go. Whose pieces go at once besides theirs."""
    if witness is NOTHING:
        return NOBODY_GOES
    others = NOBODY_GOES if witness.closing is None else close(group, witness.closing, context)
    bury(group, witness.gone, witness.silent, context)
    return others


def close(group: Group, closing: barriers.Closing, context: ApplyContext) -> frozenset[int]:
    """The barrier is closed: the slots that leave with it, and NOBODY, if something was released."""
    handed = barriers.close(group, closing, context.log_time)
    group.remove(closing.left)
    return closing.left | _OWNERLESS if handed else closing.left


def of_entries(answers: tuple[str, ...]) -> Verdict:
    """What a record of entries with these codes is answered, once it is accepted."""
    return Verdict(codes.of_entries(answers), True, answers)


def member_id_of(group_id: str, cp: int, offset: int) -> str:
    """The id of the member that the JoinGroup at this offset makes (G6): the group's, and a UUID of version 5."""
    digest = bytearray(sha1(_NAMESPACE + f"{cp}:{offset}".encode(), usedforsecurity=False).digest()[:16])
    digest[6] = digest[6] & 0x0F | 0x50
    digest[8] = digest[8] & 0x3F | 0x80
    text = digest.hex()
    return f"{group_id}-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _replaced(sender: Member | None, instance_id: str, seen: int) -> frozenset[int]:
    """The slot that a join by this instance replaces (G11)."""
    if sender is None or sender.instance_id == instance_id or sender.joined >= seen:
        return NOBODY_GOES
    return frozenset([sender.slot])


def _answered(group: Group, sender: Member, number: int, answer: Answer, entries: tuple[Entry, ...]) -> Verdict:
    """X5, after the checks of G10: it is noted, or nothing changes."""
    checkpoints = group.checkpoints
    barrier = None if checkpoints is None else checkpoints.barrier
    if checkpoints is None or barrier is None or barrier.id != number:
        return Verdict(codes.NO_SUCH_BARRIER, True)
    if sender.slot in barrier.answers:
        return Verdict(codes.ALREADY_ANSWERED, True)
    cuts = barriers.Cuts(group, sender.slot, answer.generation, barrier)
    verdict = of_entries(tuple(map(cuts.commit, entries)))
    if verdict.code == codes.OK:
        checkpoints.note(sender.slot, answer, cuts.versions)
    return verdict


def _keep_refusal(group: Group, checkpoints: Checkpoints, checkpoint: int, action: int) -> str | None:
    """X9's checks."""
    kept = checkpoints.find(checkpoint)
    if kept is None:
        return codes.UNKNOWN_CHECKPOINT
    is_newest = checkpoint == checkpoints.newest
    if action == RETIRE and is_newest:
        return codes.NEWEST_CHECKPOINT
    if action == PIN and kept.kind != PINNED and not checkpoints.can_pin():
        return codes.TOO_MANY_CHECKPOINTS
    if action == END:
        if not is_newest:
            return codes.UNKNOWN_CHECKPOINT
        if group.members:
            return codes.GROUP_ACTIVE
    return None


class _OfMember(Settling):
    """Entries of a member: its pieces come first."""

    __slots__ = ("_makes", "_old")

    def __init__(
        self,
        group: Group,
        progress: Progress,
        sender: Member,
        generation: int,
        partition: tuple[str, int],
        offset: int,
        seen: int,
    ) -> None:
        topic, number = partition
        of_topic = group.pieces.get(topic)
        mine = [] if of_topic is None else [piece for piece in of_topic[number] if piece.owner == sender.slot]
        super().__init__(progress, Reach(key_spans(mine), makes=True), offset, seen)
        self._makes = group.settings.accept_individual_commit
        self._old = Reach(key_spans([piece for piece in mine if piece.since <= generation]))

    def done(self, first: int, last: int) -> str:
        """These offsets are done: the code."""
        return self._refusal(first, last, NO_KEY, False) or super().done(first, last)

    def _make(self, first: int, last: int, key_hash: int, attempts: int, reason: str | None) -> str:
        return self._refusal(first, last, key_hash, True) or super()._make(first, last, key_hash, attempts, reason)

    def _refusal(self, first: int, last: int, key_hash: int, makes: bool) -> str | None:
        """Why the sender may not settle these offsets, whatever their holes say."""
        hashes = [] if key_hash == NO_KEY else [key_hash]
        if self._progress.holes is not None:
            parts = self._progress.holes.parts(first, last)
            hashes += [hole.key_hash for _, _, hole in parts if hole is not None]
        if not all(map(self._reach.has_key, hashes)):
            return codes.NOT_ASSIGNED
        if not all(map(self._old.has_key, hashes)):
            return codes.ILLEGAL_GENERATION
        return codes.INDIVIDUAL_COMMIT_NOT_ALLOWED if makes and not self._makes else None
