"""Who shared a partition, over its whole history: their names and keys, at each change. Batches are not kept."""

from __future__ import annotations

from typing import Final

from kafka_marshal.observe.rows import place_text
from kafka_marshal.ui.checkpoints import Moments
from kafka_marshal.ui.index import KeySpans
from rationalizer import ClaimingShare, Lease, Outcome, World
from rationalizer.holes import NO_KEY
from rationalizer.limits import MAX_KEY_HASH

#: The most changes of one partition that are kept: the last ones.
MOST: Final = 128

#: (client_id, instance_id, lo, hi) of each; lo NO_KEY: by batches.
Sharing = tuple[tuple[str, str, int, int], ...]


def follow(found: KeySpans, lease: Lease | None, outcome: Outcome | None, world: World) -> bool:
    """Take in the state after a record (None: the initial one); whether other members share the partition now."""
    shares = () if lease is None else lease.shares or ()
    if found.shares is None:
        if not shares:
            return False
        found.shares, found.is_shared = Moments(MOST), True
    values = found.shares.values
    before: Sharing = values[-1] if values else ()
    if len(before) == len(shares) and outcome is not None and not outcome.is_a(ClaimingShare):
        return False  # a share begins by its claim alone
    known = {each: each for each in before}  # the same objects: they may be many
    names = [(each.client_id, each.instance_id, each.lo, each.hi) for each in shares]
    now: Sharing = tuple(known.get(each, each) for each in names)
    if now == before:
        return False
    found.shares.add(world.log_time, world.next_offset - 1, now)
    return True


def shared_at(found: KeySpans, at: int, *, by_offset: bool) -> Sharing:
    """Who shared it at this log time, or after this offset; (): it was not shared, or that is too long ago."""
    if found.shares is None:
        return ()
    number = found.shares.before(0, at) if by_offset else found.shares.before(at)
    sharing: Sharing = found.shares.values[number - 1] if number else ()
    return sharing


def shared_text(when: str, sharing: Sharing) -> str:
    """Who shared it at that moment, in a sentence."""
    by_batches = sharing[0][2] == NO_KEY
    names = [
        client if by_batches else f"{client} {place_text(0, lo, hi).partition(' ')[2] or '(all)'}"
        for client, _, lo, hi in sorted(sharing, key=lambda each: (each[2], each[0]))
    ]
    return f"{when}: shared by {'batches' if by_batches else 'keys'}: {', '.join(names)}."


def gaps(sharing: Sharing) -> list[tuple[int, int]]:
    """The keys that no sharer by keys had."""
    found, begin = [], 0
    for _, _, lo, hi in sorted(sharing, key=lambda each: each[2]):
        if lo > begin:
            found.append((begin, lo - 1))
        begin = hi + 1
    return [*found, (begin, MAX_KEY_HASH)] if begin <= MAX_KEY_HASH else found
