"""From the targets of pieces to their owners: the second half of a rebalance (G16).

where owners and targets cut a partition into parts        owner          since          revoked
no member owns the part, or its owner is gone or replaced  the target     generation     none
... and it has no target                                   the part vanishes
owner and target are the same                              stays          stays          none
they differ                                                stays          stays          stays, else generation
"""

from __future__ import annotations

import itertools
from collections.abc import Set as AbstractSet
from operator import ne

from rationalizer.groups.assignors import Target
from rationalizer.groups.lots import NOBODY
from rationalizer.groups.pieces import NEVER, Piece, TopicPieces
from rationalizer.limits import MAX_KEY_HASH


def reconcile(topic: TopicPieces, targets: list[Target], gone: AbstractSet[int], generation: int) -> None:
    """Give the topic's partitions these targets, at this generation.

    `targets`: by partition; what lies beyond them has none. `gone`: slots whose pieces go to the targets at once, of
    members that are no more and of one that was replaced (G11).
    """
    topic.grow(len(targets))
    rest = len(topic.owners) - len(targets)
    wanted: list[Target] = targets + [NOBODY] * rest if rest else targets
    touched: AbstractSet[int] = set()
    if wanted != topic.targets:
        touched = set(itertools.compress(range(len(wanted)), map(ne, wanted, topic.targets)))
    if topic.cut:
        touched = touched | topic.cut.keys()
    if gone:
        touched = touched | {p for p, owner in enumerate(topic.owners) if owner in gone}
    owners, cut = topic.owners, topic.cut
    for partition in touched:
        target = wanted[partition]
        if type(target) is not int or partition in cut:
            topic.put(partition, _parts(topic[partition], target, gone, generation))
            continue
        owner = owners[partition]
        topic.targets[partition] = target
        if owner == NOBODY or owner in gone:
            owners[partition] = target
            topic.since[partition] = NEVER if target == NOBODY else generation
            topic.revoked[partition] = NEVER
        elif owner == target:
            topic.revoked[partition] = NEVER
        elif topic.revoked[partition] == NEVER:
            topic.revoked[partition] = generation


def let_go(topic: TopicPieces, partition: int, lo: int, hi: int, generation: int) -> list[Piece]:
    """Every revoked piece that lies within lo … hi goes to its target, or vanishes (G14).

    Returns those of a partition that was cut.
    """
    if partition not in topic.cut:
        if topic.revoked[partition] != NEVER and lo == 0 and hi == MAX_KEY_HASH:
            target = topic.targets[partition]
            topic.owners[partition] = target
            topic.since[partition] = NEVER if target == NOBODY else generation
            topic.revoked[partition] = NEVER
        return []
    left, right = topic.touched(partition, lo, hi)
    pieces: list[Piece] = []
    gone: list[Piece] = []
    for piece in topic.cut[partition][left:right]:
        if piece.revoked == NEVER or piece.lo < lo or hi < piece.hi:
            pieces.append(piece)
            continue
        gone.append(piece)
        if piece.target != NOBODY:
            pieces.append(Piece(piece.lo, piece.hi, piece.target, generation, piece.target, NEVER))
    if gone:
        topic.replace(partition, left, right, pieces)
    return gone


def _parts(before: object, target: Target, gone: AbstractSet[int], generation: int) -> list[Piece]:
    """The parts of one partition, where some are cut."""
    assert isinstance(before, (list, tuple))
    wanted = ((0, MAX_KEY_HASH, target),) if type(target) is int else target
    assert type(wanted) is tuple
    # Every place where an owner's or a target's part begins, or ends.
    begins = {0, *(piece.lo for piece in before), *(piece.hi + 1 for piece in before)}
    begins |= {lo for lo, _, _ in wanted} | {hi + 1 for _, hi, _ in wanted}
    edges = sorted({*begins, MAX_KEY_HASH + 1})
    parts: list[Piece] = []
    have, want = iter(before), iter(wanted)
    piece: Piece | None = next(have, None)
    part: tuple[int, int, int] | None = next(want, None)
    for lo, end in itertools.pairwise(edges):
        while piece is not None and piece.hi < lo:
            piece = next(have, None)
        while part is not None and part[1] < lo:
            part = next(want, None)
        slot = part[2] if part is not None and part[0] <= lo else NOBODY
        old = piece if piece is not None and piece.lo <= lo else None
        if old is None or old.owner in gone:
            if slot != NOBODY:
                parts.append(Piece(lo, end - 1, slot, generation, slot, NEVER))
        elif old.owner == slot:
            parts.append(Piece(lo, end - 1, slot, old.since, slot, NEVER))
        else:
            revoked = generation if old.revoked == NEVER else old.revoked
            parts.append(Piece(lo, end - 1, old.owner, old.since, slot, revoked))
    return parts
