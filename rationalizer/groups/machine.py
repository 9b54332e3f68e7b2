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
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from hashlib import sha1
from typing import Any, Final

from rationalizer import codes
from rationalizer.groups import barriers
from rationalizer.groups.assignors import STRATEGIES
from rationalizer.groups.canonical import load_groups
from rationalizer.groups.commits import Commits, Starts, reposition_entry
from rationalizer.groups.group import Group, Member
from rationalizer.groups.judging import of_entries, settle, slots_of
from rationalizer.groups.settle_records import SettleRecords
from rationalizer.groups.witness import NOBODY_GOES, NOTHING, Witness, witness_of, witness_of_positions
from rationalizer.limits import HEAD_FIELDS, MAX_GROUP_PARTITIONS, MAX_MEMBERS
from rationalizer.plane import ApplyContext, Bounds, Verdict
from rationalizer.routing import route_group
from rationalizer.snapshot import GROUPS
from rationalizer.state import GROUP
from rationalizer.wire.records import Belongs, Kind, Topics
from rationalizer.wire.unpacking import Message

#: RFC 4122's name space for DNS names, which uuid5 hashes first (G6).
_NAMESPACE: Final = bytes.fromhex("6ba7b8129dad11d180b400c04fd430c8")


class GroupPlane(SettleRecords):
    """The coordinated groups of one CP, by group_id: those it is the home of, and marks of others (G2)."""

    __slots__ = ("part",)

    def __init__(self, partition: int, partitions: int) -> None:
        super().__init__(partition, partitions)
        self.part = GROUPS

    # -- as a plane ------------------------------------------------------------------------------------

    def belongs(self, kind: Kind, message: Message) -> bool:
        """L3, by group; ConfigureGroup belongs to every CP."""
        return kind.belongs is Belongs.EVERYWHERE or self._is_home(message[4])

    def epoch(self, kind: Kind, message: Message) -> None:
        """No record of a coordinated group names a lease."""

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

    # -- record by record ------------------------------------------------------------------------------

    def _join_group(self, message: Message, context: ApplyContext) -> Verdict:
        """G11: a newcomer, the same instance again, or another instance in its place."""
        (
            _,
            _,
            instance_id,
            client_id,
            group_id,
            member_id,
            seen,
            session_timeout_ms,
            strategy,
            share,
            pattern,
            topics,
        ) = message
        known = self.groups.get(group_id)
        group = Group(group_id) if known is None else known
        if member_id:
            sender = group.sender(member_id, client_id, instance_id)
            if sender is None:
                return Verdict(codes.UNKNOWN_CONSUMER, False)
        else:
            sender = group.clients.get(client_id)
        witness = witness_of(group, sender, context.log_time, _replaced(sender, instance_id, seen))
        if sender is not None and witness.removes(sender):
            sender = None
            if member_id:
                return Verdict(codes.UNKNOWN_CONSUMER, False)
        if sender is not None and sender.instance_id != instance_id and sender.joined >= seen:
            return Verdict(codes.REPLACED, False)
        refusal = self._join_refusal(group, sender, witness, session_timeout_ms, strategy, topics)
        if refusal is not None:
            return Verdict(refusal, False)

        self.groups[group_id] = group
        others = settle(group, witness, context)
        names = frozenset([topic for topic, _ in topics])
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
        if others and group.strategy != strategy:
            return codes.INCONSISTENT_PARTITIONING_STRATEGY
        if session_timeout_ms > group.settings.max_session_timeout_ms:
            return codes.SESSION_TIMEOUT_TOO_HIGH
        if others >= MAX_MEMBERS:
            return codes.GROUP_FULL
        if self._too_many(group, topics, gone | slots_of(sender), topics):
            return codes.TOO_MANY_PARTITIONS
        return None

    def _group_heartbeat(self, message: Message, context: ApplyContext) -> Verdict:
        """G13: it lives, whatever generation it knows."""
        *_, member_id, generation = message
        found = self._sender(message, member_id, context)
        if found is None:
            return Verdict(codes.UNKNOWN_CONSUMER, False)
        group, sender, witness = found
        if generation > group.generation:
            return Verdict(codes.ILLEGAL_GENERATION, False)
        if witness is NOTHING:
            group.beat(sender, context.log_time)
        else:
            self._lives(group, sender, witness, context)
        return Verdict(codes.OK if generation == group.generation else codes.ILLEGAL_GENERATION, True)

    def _leave_group(self, message: Message, context: ApplyContext) -> Verdict:
        """G13: the sender goes."""
        *_, member_id, generation = message
        found = self._sender(message, member_id, context, leaves=True)
        if found is None:
            return Verdict(codes.UNKNOWN_CONSUMER, False)
        group, sender, witness = found
        if generation > group.generation:
            return Verdict(codes.ILLEGAL_GENERATION, False)
        others = settle(group, witness, context)
        leaver = frozenset([sender.slot])
        group.remove(leaver)
        self._rebalance(group, context, witness.gone | leaver, others)
        return Verdict(codes.OK, True)

    def _commit_offsets(self, message: Message, context: ApplyContext) -> Verdict:
        """G14, or G21 without a member_id."""
        *_, member_id, generation, in_order, entries = message
        if not member_id:
            return self._reposition(message, context)
        found = self._sender(message, member_id, context)
        if found is None:
            return Verdict(codes.UNKNOWN_CONSUMER, False)
        group, sender, witness = found
        if generation > group.generation:
            return Verdict(codes.ILLEGAL_GENERATION, False)
        if witness is NOTHING:
            group.beat(sender, context.log_time)
        else:
            self._lives(group, sender, witness, context)
        judge = Commits if group.checkpoints is None else Starts
        commits = judge(group, sender.slot, generation, in_order)
        return of_entries(tuple(map(commits.commit, entries)))

    def _reposition(self, message: Message, context: ApplyContext) -> Verdict:
        """G21: the pausing client sets positions, of a group without members at work."""
        group_id, entries = message[4], message[-1]
        if not context.pausing:
            return Verdict(codes.UNKNOWN_CONSUMER, False)
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group(group_id)
        witness = witness_of_positions(group, context.log_time)
        if witness is None:
            return Verdict(codes.GROUP_ACTIVE, False)
        others = settle(group, witness, context)
        if witness.gone or others:
            self._rebalance(group, context, witness.gone, others)
        if group.checkpoints is not None:
            return of_entries(barriers.set_positions(group, context.offset, context.log_time, entries))
        return of_entries(tuple([reposition_entry(group, entry) for entry in entries]))

    def _topics_changed(self, message: Message, context: ApplyContext) -> Verdict:
        """G13: what the sender's pattern matches now."""
        *_, member_id, topics = message
        found = self._sender(message, member_id, context)
        if found is None:
            return Verdict(codes.UNKNOWN_CONSUMER, False)
        group, sender, witness = found
        absent = witness.absent
        reported, leaving = (topics, absent | {sender.slot}) if sender.pattern else ((), absent)
        if self._too_many(group, topics, leaving, reported):
            return Verdict(codes.TOO_MANY_PARTITIONS, False)
        others = settle(group, witness, context)
        before = sender.topics
        if sender.pattern:
            group.report(sender, frozenset([topic for topic, _ in topics]))
        changed = group.raise_counts(topics) or sender.topics != before
        group.beat(sender, context.log_time)
        if changed or witness.gone or others:
            self._rebalance(group, context, witness.gone, others)
        return Verdict(codes.OK, True)

    def _configure_group(self, message: Message, context: ApplyContext) -> Verdict:
        """G19; elsewhere than at home it only says what kind of group it is (G2)."""
        group_id, pairs = message[4], message[HEAD_FIELDS]
        group = self.groups.get(group_id)
        if group is None:
            group = self.groups[group_id] = Group(group_id)
        if not self._is_home(group_id):
            return Verdict(codes.OK, True)
        found: dict[str, Any] = dict(pairs)
        if "accept_range_fetch" in found:
            found["accept_range_fetch"] = tuple(sorted(set(found["accept_range_fetch"])))
        before, group.settings = group.settings, replace(group.settings, **found)
        changed = (
            before.accept_individual_commit != group.settings.accept_individual_commit
            or before.accept_range_fetch != group.settings.accept_range_fetch
        )
        if changed and group.members:
            self._rebalance(group, context, NOBODY_GOES)
        return Verdict(codes.OK, True)

    # -- what they share -------------------------------------------------------------------------------

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
