"""Invariants after each move, computed from the log and from delivered messages, independent of the engine."""

from __future__ import annotations

from dataclasses import replace

from kafka_marshal.engine.settings import proof_margin_ms
from tests.campaigns.small_scope.engine.member import HI, LENGTH, PARTITIONS, HandedOut, Moved
from tests.campaigns.small_scope.engine.situation import Situation, Standing, Truth, trusted
from tests.campaigns.small_scope.records import BrokenError

#: For people: what is checked after each move.
CHECKED = """\
- no two members trust a lease at once; who trusts one holds it in the log, and until 2 HI - margin after its last
  beat there at most (T4)
- every replica is, byte for byte, what the log says at its offset (S1)
- a message is handed out by the holder, who trusts its lease; not if the log says that it is done (P6), nor twice
  under one epoch
- at most once: no message twice, none before it is granted, none that is reported as not handed out (C12, C13)
- at least once: the log says of no message that it is done before somebody has got it done (C14)
- progress and epochs never go back (C5, C9)
- no more faults, and users at work: all is owned and done within 8 HI; at most once, what nobody was given is reported,
  but for what a killed process had been granted (C13)"""


def check(before: Situation, after: Situation, moved: Moved | None) -> None:
    """Raise BrokenError where a rule is broken."""
    for earlier, later in zip(after.truths[len(before.log) :], after.truths[len(before.log) + 1 :], strict=False):
        _check_log(earlier, later, after)
    _check_trust(after)
    if moved is None:
        return
    member = moved.member
    if member.world != after.truths[member.applied].state:
        raise BrokenError(f"the replica of {member.instance} at offset {member.applied} is not what the log says (S1)")
    if moved.handed_out is not None:
        _check_handed_out(after, moved.handed_out)
    if after.shape.at_most_once:
        for partition, first, last in member.reported:
            for out in after.handed_out:
                if out.instance == member.instance and out.partition == partition and first <= out.offset <= last:
                    raise BrokenError(f"reported as not handed out, and it was (C13): {out}")


def check_all_told(situation: Situation) -> None:
    """At most once, where all is done and no process was killed: what was delivered to no user is reported (C13)."""
    if any(member.instance != f"{member.client}1" for member in situation.members):
        return
    told = {
        (partition, offset)
        for member in situation.members
        for partition, first, last in member.reported
        for offset in range(first, last + 1)
    }
    told.update((out.partition, out.offset) for out in situation.handed_out)
    if untold := sorted({(partition, offset) for partition in PARTITIONS for offset in range(LENGTH)} - told):
        raise BrokenError(f"granted, neither handed out nor reported (C13): (partition, offset) {untold}")


def accounted(before: Situation, situation: Situation, moved: Moved | None) -> Situation:
    """Record delivered and done messages; forget those that no longer matter."""
    is_news = moved is not None and (moved.handed_out is not None or moved.done is not None)
    if situation.truths is before.truths and not is_news:
        return situation
    handed_out, done = situation.handed_out, situation.done
    if moved is not None and moved.handed_out is not None:
        handed_out = handed_out | {moved.handed_out}
    if moved is not None and moved.done is not None:
        done = done | {moved.done}
    leases = {lease.partition: lease for lease in situation.truth.leases}
    if not situation.shape.at_most_once:  # messages of an earlier epoch may be delivered again
        handed_out = frozenset(
            out for out in handed_out if (lease := leases.get(out.partition)) is None or out.epoch >= lease.epoch
        )
    done = frozenset(x for x in done if (lease := leases.get(x[0])) is None or not lease.is_done(x[1]))
    if (handed_out, done) == (situation.handed_out, situation.done):
        return situation
    return replace(situation, handed_out=handed_out, done=done)


def _check_log(earlier: Truth, later: Truth, situation: Situation) -> None:
    for partition in PARTITIONS:
        was, now = earlier.lease(partition), later.lease(partition)
        if now is None:
            if was is not None:
                raise BrokenError(f"a lease is gone (C8): partition {partition}")
            continue
        _check_done(was, now, situation)
        if was is not None and now.epoch < was.epoch:
            raise BrokenError(f"an epoch went back (C9): {was} to {now}")
        if was is not None and (now.stable < was.stable or now.granted < was.granted):
            raise BrokenError(f"progress went back (C5): {was} to {now}")


def _check_done(was: Standing | None, now: Standing, situation: Situation) -> None:
    """Check messages that are newly done by the log."""
    last = max(now.stable, *(last for _, last in now.ranges), -1)
    for offset in range(last + 1):
        if not now.is_done(offset) or (was is not None and was.is_done(offset)):
            continue
        if situation.shape.at_most_once:
            if offset > now.granted and not _is_passed_over(situation, offset):
                raise BrokenError(f"done without having been granted (C12): {now}")
        elif (now.partition, offset) not in situation.done and not _is_passed_over(situation, offset):
            raise BrokenError(f"the log says that offset {offset} is done, and nobody has got it done (C14): {now}")


def _is_passed_over(situation: Situation, offset: int) -> bool:
    """A group that begins at the latest message skips those before it (P9)."""
    return situation.shape.start == "latest" and offset < LENGTH - 1


def _check_trust(situation: Situation) -> None:
    margin = proof_margin_ms(HI)
    believing: dict[int, str] = {}
    for member, belief in trusted(situation):
        if (other := believing.setdefault(belief.partition, member.instance)) != member.instance:
            raise BrokenError(f"two owners of partition {belief.partition} at once: {other} and {member.instance}")
        lease = situation.truth.lease(belief.partition)
        if lease is None or (lease.instance, lease.epoch) != (member.instance, belief.epoch):
            raise BrokenError(f"{member.instance} trusts what it does not hold: {belief}, and the log has {lease}")
        if belief.proven_until > situation.own_time(lease.last_beat) + 2 * HI - margin:
            raise BrokenError(f"{member.instance} trusts a lease for too long (T4): {belief}, and the log has {lease}")


def _check_handed_out(situation: Situation, out: HandedOut) -> None:
    holder = [
        m.instance for m, belief in trusted(situation) if (belief.partition, belief.epoch) == (out.partition, out.epoch)
    ]
    if holder != [out.instance]:
        raise BrokenError(f"handed out by somebody who does not hold it (T4): {out}, trusted by {holder}")
    lease = situation.truth.lease(out.partition)
    if situation.shape.at_most_once:
        if any((x.partition, x.offset) == (out.partition, out.offset) for x in situation.handed_out):
            raise BrokenError(f"handed out twice, at most once (C12): {out}")
        if lease is None or out.offset > lease.granted:
            raise BrokenError(f"handed out before it was granted (C13): {out}")
        return
    if out in situation.handed_out:
        raise BrokenError(f"handed out twice under one epoch: {out}")
    if lease is not None and lease.is_done(out.offset):
        raise BrokenError(f"handed out though the log says that it is done (P6): {out}")
