"""CommitOffsets, entry by entry (G14, G15, K8), and the positions that a pausing client sets (G21)."""

from __future__ import annotations

from rationalizer import codes
from rationalizer.groups.group import Group
from rationalizer.groups.reconcile import let_go
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.progress import Progress
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

__all__ = ["commit_entry", "reposition_entry"]

#: As on the wire: topic, partition, lo, hi, action, through, ranges, metadata.
Entry = tuple[str, int, int, int, int, int | None, tuple[tuple[int, int], ...], str | None]


def commit_entry(group: Group, slot: int, generation: int, in_order: bool, entry: Entry) -> str:
    """One entry of a member's CommitOffsets (G14): its code. A rejected one changes nothing."""
    topic, partition, lo, hi, action, through, ranges, metadata = entry
    refusal = (
        _start_refusal(group, slot, generation, entry) if action == START else _refusal(group, slot, generation, entry)
    )
    if refusal is not None:
        return refusal
    code = codes.OK
    if through is not None or ranges:
        kept = group.kept(topic, partition)
        progress = Progress() if kept is None else kept.progress
        if through is not None:
            code = progress.commit_key_range(lo, hi, through)
        else:
            code = _commit_ranges(group, progress, ranges, in_order)
        if code not in codes.ACCEPTED:
            return code
        if kept is None:
            kept = group.keep(topic, partition)
            kept.progress = progress
        if action == START and through is not None:
            kept.initial = through
    if metadata is not None:
        group.keep(topic, partition).metadata = metadata
    if action == LET_GO:
        let_go(group.pieces[topic], partition, lo, hi, group.generation)
    return code


def reposition_entry(group: Group, entry: Entry) -> str:
    """One entry of the pausing client's CommitOffsets (G21): its code."""
    topic, partition, lo, hi, action, through, ranges, metadata = entry
    if action != COMMIT or lo != 0 or hi != MAX_KEY_HASH or ranges:
        return codes.NOT_ASSIGNED
    code = codes.OK
    if through is not None:
        code = group.keep(topic, partition).progress.reposition(through)
    if metadata is not None:
        group.keep(topic, partition).metadata = metadata
    return code


def _refusal(group: Group, slot: int, generation: int, entry: Entry) -> str | None:
    """Why the sender may not commit, or let go, for these keys."""
    topic, partition, lo, hi, action, *_ = entry
    pieces = group.pieces.get(topic)
    if pieces is None or partition >= len(pieces.owners):
        return codes.NOT_ASSIGNED
    if partition in pieces.cut:
        left, right = pieces.touched(partition, lo, hi)
        touched = pieces.cut[partition][left:right]
        at = lo
        for piece in touched:
            if piece.owner != slot or piece.lo > at:
                return codes.NOT_ASSIGNED
            at = piece.hi + 1
        if at <= hi:
            return codes.NOT_ASSIGNED
        since = max(piece.since for piece in touched)
        revoked = max(piece.revoked for piece in touched)
    elif pieces.owners[partition] != slot:
        return codes.NOT_ASSIGNED
    else:
        since, revoked = pieces.since[partition], pieces.revoked[partition]
    if since > generation or (action == LET_GO and revoked > generation):
        return codes.ILLEGAL_GENERATION
    return None


def _start_refusal(group: Group, slot: int, generation: int, entry: Entry) -> str | None:
    """Why the sender may not set the start of this partition."""
    topic, partition, *_ = entry
    pieces = group.pieces.get(topic)
    owned = [] if pieces is None else [piece.since for piece in pieces[partition] if piece.owner == slot]
    if not owned:
        return codes.NOT_ASSIGNED
    if min(owned) > generation:
        return codes.ILLEGAL_GENERATION
    return None if group.kept(topic, partition) is None else codes.ALREADY_STARTED


def _commit_ranges(group: Group, progress: Progress, ranges: tuple[tuple[int, int], ...], in_order: bool) -> str:
    if not group.settings.accept_individual_commit:
        return codes.INDIVIDUAL_COMMIT_NOT_ALLOWED
    if in_order and not progress.is_in_order(ranges):
        return codes.OUT_OF_ORDER
    return progress.commit(ranges, group.settings.max_individual_commits)
