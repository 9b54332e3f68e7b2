"""Logs of groups that share leases, open and park messages: records near what fits the state, and beside it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    CommitEntry,
    CommitOffsets,
    CommitRanges,
    ConfigureGroup,
    ForgetGroup,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SettleOffsets,
    SettlingMessages,
    Upgrade,
    World,
    encode,
)
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.plane import Entry
from rationalizer.wire.records import Done, Opened, Parked
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

WHO = (("1", "a"), ("2", "a"), ("1", "b"), ("1", "c"), ("1", "admin"))
CLAIMED, COORDINATED = "g", "h"
#: Offsets of messages, and keys: few, so that records meet.
LAST = 24
KEYS = tuple(MAX_KEY_HASH * part // 8 for part in range(9))


class _Author:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.world = World(0, 1)
        self.now = 1_000

    def entries(self, *, keyed: bool) -> tuple[Done, Opened, Parked]:
        draw = self.random
        done = tuple([self.span() for _ in range(draw.choice((0, 0, 1, 1, 2)))])
        opened = []
        for _ in range(draw.choice((0, 0, 1, 2))):
            first, last = self.span()
            key = draw.choice(KEYS) if first == last and (keyed or draw.random() < 0.6) else None
            opened.append((first, last, key, draw.choice((0, 1, 2, 3))))
        parked = [(draw.randint(0, LAST), draw.choice(KEYS), 5, "Bad") for _ in range(draw.choice((0, 0, 0, 1)))]
        return done, tuple(opened), tuple(parked)

    def span(self) -> tuple[int, int]:
        draw = self.random
        kept = self.world.lease(CLAIMED, "t", 0)
        holes = [] if kept is None else kept.progress.open
        if holes and draw.random() < 0.6:
            hole = draw.choice(holes)
            first = draw.randint(max(0, hole.first - 1), hole.last)
            return first, draw.randint(first, hole.last + draw.choice((0, 0, 0, 1)))
        first = draw.randint(0, LAST)
        return first, min(LAST, first + draw.choice((0, 0, 0, 1, 3)))

    def seen(self) -> int:
        draw = self.random
        return max(0, self.world.next_offset - draw.choice((0, 0, 0, 1, 3, 9))) + draw.choice((0, 0, 0, 50))

    def of_lease(self) -> Record:
        draw, lease = self.random, self.world.lease(CLAIMED, "t", 0)
        who = draw.choice(WHO[:4])
        epoch = 0 if lease is None else lease.epoch
        shares = [] if lease is None else list(lease.shares or ())
        if shares and draw.random() < 0.9:
            share = draw.choice(shares)
            who, epoch = (share.instance_id, share.client_id), share.epoch
        elif lease is not None and lease.client_id is not None and lease.instance_id is not None:
            who = draw.choice(((lease.instance_id, lease.client_id), who))
        ids, place = (*who, CLAIMED), ("t", 0)
        last = draw.choice((None, None, draw.randint(-1, LAST)))
        take = (draw.choice((1, 2, 4)), draw.choice((LAST, LAST, 5)), draw.random() < 0.15)
        anyone = (*draw.choice(WHO[:4]), CLAIMED)
        low, high = sorted(draw.sample(range(9), 2))
        keys = (KEYS[low] + (low > 0), KEYS[high])
        match draw.choices(range(9), (4, 2, 6, 14, 4, 2, 1, 2, 1))[0]:
            case 0:
                return ClaimingShare(*anyone, *place, draw.choice((1000, 3000)), None, None, draw.choice((None, 0, 5)))
            case 1:
                return ClaimingShare(*anyone, *place, 1000, *keys)
            case 2:
                return Heartbeat(*ids, *place, draw.choice((epoch, epoch, epoch, epoch, None)), last)
            case 3:
                done, opened, parked = self.entries(keyed=False)
                asked = take if draw.random() < 0.6 else None
                return SettlingMessages(*ids, *place, epoch, self.seen(), done, opened, parked, asked)
            case 4:
                done, opened, parked = self.entries(keyed=False)
                done = done or (self.span(),)
                return SettlingMessages(*anyone, *place, None, self.seen(), done, opened, parked)
            case 5:
                return ReleasingPartition(*ids, *place, epoch, last)
            case 6:
                return ClaimingMessages(*ids, *place, epoch, draw.randint(0, LAST))
            case 7:
                return CommitRanges(*ids, *place, epoch, (self.span(), self.span()))
            case _:
                return ClaimingPartition(*anyone, *place, 1000)

    def of_group(self) -> Record:
        draw, group = self.random, self.world.group(COORDINATED)
        who = draw.choice(WHO[:4])
        member = None if group is None else group.clients.get(who[1])
        member_id = "" if member is None else member.member_id
        if member is not None:
            who = (member.instance_id, member.client_id)
        ids, generation = (*who, COORDINATED), 0 if group is None else group.generation
        generation = max(0, generation - draw.choice((0, 0, 0, 1, 5)))
        low, high = sorted(draw.sample(range(9), 2))
        keys = (KEYS[low] + (low > 0), KEYS[high])
        match draw.choices(range(6), (3, 5, 2, 12, 4, 2))[0]:
            case 0:
                return JoinGroup(*ids, member_id, self.world.next_offset, 2000, "sticky", True, "", (("t", 1),))
            case 1 if member_id:
                action = draw.choice((COMMIT, COMMIT, LET_GO))
                entry = CommitEntry("t", 0, *keys, action, draw.choice((None, draw.randint(-1, LAST))))
                if draw.random() < 0.2:
                    entry = CommitEntry("t", 0, action=START, through=5)
                return CommitOffsets(*ids, member_id, generation, False, (entry,))
            case 2 if member_id and draw.random() < 0.3:
                return LeaveGroup(*ids, member_id, generation)
            case 3 if member_id:
                return SettleOffsets(*ids, member_id, generation, self.seen(), "t", 0, *self.entries(keyed=True))
            case 4:
                done, opened, parked = self.entries(keyed=True)
                done = done or (self.span(),)
                return SettleOffsets(*draw.choice(WHO), COORDINATED, "", 0, self.seen(), "t", 0, done, opened, parked)
            case 5:
                shared = draw.choice((("t",), ("t",), ()))
                return ConfigureGroup(
                    *ids, (("accept_range_fetch", shared), ("accept_individual_commit", bool(shared)))
                )
            case _:
                entry = CommitEntry("t", 0, through=draw.randint(-1, LAST))
                return CommitOffsets(*WHO[4], COORDINATED, "", 0, False, (entry,))

    def next(self) -> Record:
        draw = self.random
        if draw.random() < 0.03:
            group = draw.choice((CLAIMED, COORDINATED))
            until = self.now + draw.choice((-1, 0, 2_500, 20_000))
            return ReleaseGroup(*draw.choice(WHO[3:]), group, max(0, until))
        if draw.random() < 0.01:
            return ForgetGroup(*WHO[4], draw.choice((CLAIMED, COORDINATED)))
        lease, pause = self.world.lease(CLAIMED, "t", 0), self.world.pause(CLAIMED)
        if lease is not None and pause is not None and draw.random() < 0.5:  # its client sets a position
            ids, place = ("1", pause.client_id, CLAIMED), ("t", 0)
            if lease.client_id != pause.client_id:
                return ClaimingPartition(*ids, *place, 1000)
            return Heartbeat(*ids, *place, lease.epoch, draw.randint(-1, LAST))
        return self.of_lease() if draw.random() < 0.65 else self.of_group()


def sharing_log(seed: int, length: int) -> Iterator[Entry]:
    """A log at level 4."""
    author = _Author(seed)
    for offset in range(length):
        record = Upgrade(*WHO[4], CLAIMED, 4) if offset == 0 else author.next()
        author.now += author.random.choice((0, 0, 10, 400, 900, 2_500) if offset % 7 else (0, 6_000))
        entry = (offset, author.now, encode(record))
        author.world.apply(*entry)
        yield entry
