"""Who owned which keys of a coordinated group from when to when, and its rebalances: one fold over its home's log.

A span is as in `rationalizer.history`, of a range of key hashes. Where a part of a range goes to another owner, its
span falls into two: one continues, one has ended. So for any key the spans that hold it are its owners, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rationalizer.groups.group import Group, Member, done_in, pieces_of
from rationalizer.history import BEFORE, End, Span
from rationalizer.limits import MAX_KEY_HASH, NOTHING_DONE
from rationalizer.outcome import Outcome
from rationalizer.wire.records import (
    CommitOffsets,
    ConfigureGroup,
    ForgetGroup,
    JoinGroup,
    LeaveGroup,
    Rollback,
    TopicsChanged,
)
from rationalizer.wire.wellformed import LET_GO
from rationalizer.world import World


class Moved(NamedTuple):
    """A range of keys that got another owner, or none. `before` None: no member had it."""

    before: Span | None
    after: Span

    @property
    def vacant_ms(self) -> int | None:
        """From the former owner's last sign of life until the next one had it; None: one of the two is not known."""
        if self.before is None or not self.after.held or self.before.last_beat == BEFORE:
            return None
        return max(0, self.after.since - self.before.last_beat)


@dataclass(slots=True)
class Rebalance:
    """One rebalance, and what moved until the next one. Times are log time (ms)."""

    generation: int
    log_time: int
    #: What began it: client_ids by what happened to them.
    joined: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    #: It joined again with other values, or reported other topics.
    changed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    #: An operator had it leave (C20): (client_id, the operator's).
    evicted: list[tuple[str, str]] = field(default_factory=list)
    #: Found overdue: (client_id, for how long it had been silent).
    silent: list[tuple[str, int]] = field(default_factory=list)
    configured: bool = False
    #: The checkpoint that was complete by it, so that what was handed in went to other members (X6); 0: none.
    checkpoint: int = 0
    #: All went back to this checkpoint (X8), by this client.
    rolled_back: tuple[int, str] | None = None
    members: int = 0
    moved: list[Moved] = field(default_factory=list)


@dataclass(slots=True)
class Assignments:
    """Folds the log of a group's home. `keep`: how many rebalances it remembers, the last ones."""

    group_id: str
    keep: int = 20
    #: (topic, partition) → the spans it is in now, ascending by keys; those without an owner, too.
    now: dict[tuple[str, int], list[Span]] = field(default_factory=dict)
    rebalances: list[Rebalance] = field(default_factory=list)
    _generation: int = 0
    _newest: int = 0
    #: slot → member; what it was called, and when it last beat, as of its last record.
    _members: dict[int, Member] = field(default_factory=dict)
    _names: dict[int, tuple[str, int]] = field(default_factory=dict)
    #: member_id → client_id of an operator who said that it is to leave.
    _evictors: dict[str, str] = field(default_factory=dict)

    def begin(self, world: World) -> None:
        """The replay begins with this state: what is so has been so since before."""
        group = world.group(self.group_id)
        if group is None:
            return
        for topic, partition in group.partitions():
            spans = _spans(group, topic, partition, 0, 0)
            for span in spans:
                span.since, span.since_offset, span.last_beat = BEFORE, max(0, span.epoch), BEFORE
            self.now[topic, partition] = spans
        self._remember(group)

    def see(self, world: World, outcome: Outcome) -> list[Span]:
        """Take in a record that this world has just applied; the spans that it began, or that fell off others."""
        message = outcome.message
        is_about_groups = outcome.of_group or outcome.is_a(ForgetGroup)
        if message is None or not is_about_groups or message.group_id != self.group_id:
            return []
        if not outcome.accepted:
            self.overhear(outcome)
            return []
        at = world.next_offset - 1, world.log_time
        group = world.group(self.group_id)
        if group is None:
            self._forget(*at)
            return []
        me = group.clients.get(message.client_id)
        if me is not None and self._names.get(me.slot, ("", 0))[0] == me.instance_id:
            self._names[me.slot] = me.instance_id, me.last_beat
        if group.generation != self._generation:
            self._note_rebalance(group, outcome, *at)
            begun = self._see_all(group, outcome, *at)
            self._remember(group, message.client_id)
            return begun
        self._newest = _newest_of(group)
        begun = []
        if outcome.is_a(CommitOffsets):
            keys = {(entry[0], entry[1]) for entry in message.entries if entry[4] == LET_GO}
            for key in sorted(keys):
                begun += self._refit(group, key, outcome, *at)
        if me is not None:
            self._names[me.slot] = me.instance_id, me.last_beat
        return begun

    def overhear(self, outcome: Outcome) -> None:
        """Take in a record that was rejected: it may say who evicts a member (C20)."""
        message = outcome.message
        if not outcome.is_a(LeaveGroup) or outcome.accepted or message is None or message.group_id != self.group_id:
            return
        member_id = message.member_id
        if any(each.member_id == member_id and each.client_id != message.client_id for each in self._members.values()):
            self._evictors[member_id] = message.client_id

    def spans(self, group: Group | None, key: tuple[str, int]) -> list[Span]:
        """What a partition is in now, with what is done of it and its owners' last beats."""
        found = self.now.get(key, [])
        for span in found:
            self._touch(group, span)
        return found

    # -- inside ----------------------------------------------------------------------------------------

    def heard(self, client_id: str) -> int | None:
        """Log time (ms) of a member's own last record: after an outage all last beats in the state are newer (G8)."""
        return next((self._names[slot][1] for slot, each in self._members.items() if each.client_id == client_id), None)

    def _remember(self, group: Group, sender: str = "") -> None:
        self._generation = group.generation
        self._newest = _newest_of(group)
        self._members = dict(group.members)
        for slot, member in group.members.items():
            if member.client_id == sender or self._names.get(slot, ("", 0))[0] != member.instance_id:
                self._names[slot] = member.instance_id, member.last_beat
        for slot in self._names.keys() - group.members.keys():
            del self._names[slot]

    def _note_rebalance(self, group: Group, outcome: Outcome, offset: int, log_time: int) -> None:
        found = Rebalance(offset, log_time, members=len(group.members))
        found.silent = [(client, log_time - (self.heard(client) or log_time - ms)) for client, ms in outcome.silent]
        message = outcome.message
        assert message is not None
        sender, overdue = message.client_id, {client for client, _ in outcome.silent}
        newest = _newest_of(group)
        if outcome.is_a(Rollback):
            found.rolled_back = (newest, sender)
        elif newest != self._newest:
            found.checkpoint = newest
        for slot, member in self._members.items():
            if slot not in group.members:
                by = self._evictors.pop(member.member_id, None)
                if outcome.is_a(LeaveGroup) and member.client_id == sender:
                    if by is None:
                        found.left.append(sender)
                    else:
                        found.evicted.append((sender, by))
                elif member.client_id not in overdue:  # at a checkpoint (X6)
                    found.left.append(member.client_id)
            elif member.instance_id != self._names[slot][0]:
                found.restarted.append(member.client_id)
        found.joined = [member.client_id for slot, member in group.members.items() if slot not in self._members]
        if outcome.is_a(JoinGroup) and sender not in (*found.joined, *found.restarted):
            found.changed.append(sender)
        if outcome.is_a(TopicsChanged):
            found.changed.append(sender)
        found.configured = outcome.is_a(ConfigureGroup)
        self.rebalances.append(found)
        del self.rebalances[: -self.keep]

    def _see_all(self, group: Group, outcome: Outcome, offset: int, log_time: int) -> list[Span]:
        begun: list[Span] = []
        for key in sorted({*self.now, *group.partitions()}):
            begun += self._refit(group, key, outcome, offset, log_time)
        return begun

    def _refit(self, group: Group, key: tuple[str, int], outcome: Outcome, offset: int, log_time: int) -> list[Span]:
        """Bring the spans of one partition in line with its pieces; those that are new."""
        before, after = self.now.get(key, []), _spans(group, *key, offset, log_time)
        if [_identity(span) for span in before] == [_identity(span) for span in after]:
            return []
        kept: list[Span] = []
        new: list[Span] = []
        moved: list[Moved] = []
        cuts: dict[int, list[Span]] = {}
        for lo, hi, old, span in _parts(before, after):
            if old is not None and _owner(old) == _owner(span):
                _add(kept, old, lo, hi, cuts)
                continue
            ended = None
            if old is not None:
                ended = self._ended(group, old, lo, hi, outcome, offset, log_time, span)
                cuts.setdefault(old.lo, []).append(ended)
            begun = replace(span, lo=lo, hi=hi)
            if ended is not None and not begun.held:
                begun.last_beat = ended.last_beat
            kept.append(begun)
            new.append(begun)
            moved.append(Moved(ended, begun))
        fallen = _settle(before, kept, cuts)
        self.now[key] = kept
        if self.rebalances:
            self.rebalances[-1].moved += [
                each for each in moved if each.after.held or (each.before is not None and each.before.held)
            ]
        return [*fallen, *new]

    def _ended(
        self, group: Group, old: Span, lo: int, hi: int, outcome: Outcome, offset: int, log_time: int, by: Span
    ) -> Span:
        span = replace(old, lo=lo, hi=hi)
        self._touch(group, span)
        span.until, span.until_offset, span.ended_by = log_time, offset, by.client_id if by.held else ""
        member = group.clients.get(old.client_id)
        sender = "" if outcome.message is None else outcome.message.client_id
        if not old.held:
            span.ended = End.CLAIMED
        elif member is None:
            is_leaver = old.client_id in self.rebalances[-1].left or (
                outcome.is_a(LeaveGroup) and sender == old.client_id
            )
            span.evictor = next((by for client, by in self.rebalances[-1].evicted if client == old.client_id), "")
            span.ended = (End.EVICTED if span.evictor else End.LEFT) if is_leaver else End.REPLACED
            span.last_beat = log_time if is_leaver else span.last_beat
        elif member.instance_id != old.instance_id:
            span.ended = End.RESTARTED
        elif by.held and (by.client_id, by.instance_id) == (old.client_id, old.instance_id):
            span.ended = End.RESET
        else:
            span.ended = End.RESET if outcome.is_a(Rollback) else End.RELEASED
        return span

    def _touch(self, group: Group | None, span: Span) -> None:
        """How far its keys are, and when its owner last beat."""
        if group is None:
            return
        span.stable = done_in(group, span.key[1], span.key[2], span.lo, span.hi)
        member = group.clients.get(span.client_id)
        if not span.held:
            return
        if member is not None and member.instance_id == span.instance_id:
            span.last_beat = self._names.get(member.slot, ("", member.last_beat))[1]
            return
        for slot, known in self._members.items():
            if known.client_id == span.client_id:
                span.last_beat = max(span.last_beat, self._names[slot][1])

    def _forget(self, offset: int, log_time: int) -> None:
        for spans in self.now.values():
            for span in spans:
                span.until, span.until_offset, span.ended = log_time, offset, End.FORGOTTEN
        self.now.clear()
        self._members, self._names, self._evictors, self._generation = {}, {}, {}, 0


def _newest_of(group: Group) -> int:
    return 0 if group.checkpoints is None else group.checkpoints.newest


def owner_names(group: Group, slot: int) -> tuple[str, str]:
    """(client_id, instance_id) of the member with this slot; "" where there is none."""
    member = group.members.get(slot)
    return ("", "") if member is None else (member.client_id, member.instance_id)


def _spans(group: Group, topic: str, partition: int, offset: int, log_time: int) -> list[Span]:
    """A span for each range of keys with one owner and one token, and for what has no owner."""
    key = (group.group_id, topic, partition)
    found: list[Span] = []
    at = 0
    for piece in pieces_of(group, topic, partition):
        if piece.lo > at:
            found.append(_span(key, at, piece.lo - 1, "", "", NOTHING_DONE, offset, log_time))
        before = found[-1] if found else None
        names = owner_names(group, piece.owner)
        if before is not None and before.hi + 1 == piece.lo and _owner(before) == (True, *names, piece.since):
            before.hi = piece.hi
        else:
            found.append(_span(key, piece.lo, piece.hi, *names, piece.since, offset, log_time))
        at = piece.hi + 1
    if at <= MAX_KEY_HASH:
        found.append(_span(key, at, MAX_KEY_HASH, "", "", NOTHING_DONE, offset, log_time))
    return found


def _span(
    key: tuple[str, str, int],
    lo: int,
    hi: int,
    client_id: str,
    instance_id: str,
    epoch: int,
    offset: int,
    log_time: int,
) -> Span:
    span = Span(key, bool(client_id), client_id, instance_id, epoch, log_time, offset, log_time)
    span.lo, span.hi, span.is_lease = lo, hi, False
    return span


def _owner(span: Span) -> tuple[bool, str, str, int]:
    return span.held, span.client_id, span.instance_id, span.epoch


def _identity(span: Span) -> tuple[object, ...]:
    return span.lo, span.hi, *_owner(span)


def _parts(before: Sequence[Span], after: Sequence[Span]) -> Iterator[tuple[int, int, Span | None, Span]]:
    """Both cut wherever one of them begins: (lo, hi, what it was in, what it is in now)."""
    edges = sorted({*(span.lo for span in before), *(span.lo for span in after), MAX_KEY_HASH + 1})
    old, new = iter(before), iter(after)
    was, now = next(old, None), next(new)
    for lo, end in itertools.pairwise(edges):
        if was is not None and was.hi < lo:
            was = next(old, None)
        if now.hi < lo:
            now = next(new)
        yield lo, end - 1, was, now


def _add(kept: list[Span], old: Span, lo: int, hi: int, cuts: dict[int, list[Span]]) -> None:
    """This part of an old span continues."""
    parts = cuts.setdefault(old.lo, [])
    if parts and kept[-1] is parts[-1]:
        kept[-1].hi = hi
        return
    parts.append(replace(old, lo=lo, hi=hi))
    kept.append(parts[-1])


def _settle(before: Sequence[Span], kept: list[Span], cuts: dict[int, list[Span]]) -> list[Span]:
    """Each old span continues as the first of its parts, whichever member owns it; the others, which fell off it."""
    fallen: list[Span] = []
    for old in before:
        first, *others = cuts.get(old.lo, [old])
        for name in Span.__dataclass_fields__:
            setattr(old, name, getattr(first, name))
        kept[:] = [old if each is first else each for each in kept]
        fallen += others
    return fallen
