"""Checkpoints of a snapshot: what their rows (S1) must be, besides each field's own rule, to be believed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, cast

from rationalizer.groups.barriers import note_owners, show
from rationalizer.groups.checkpoints import NOT_SAVED, Answer, Barrier, Checkpoints, Kept, Key, Version, restored
from rationalizer.groups.group import Group
from rationalizer.leases.canonical import load_progress
from rationalizer.limits import MAX_KEPT, MAX_KEY_PIECES, MAX_OLD_WEIGHT, MAX_PINNED, NOTHING_DONE
from rationalizer.plane import Bounds
from rationalizer.progress import Progress
from rationalizer.state import BARRIER, CHECKPOINTS, DATED, VERSION, want, want_ascending
from rationalizer.wire import wellformed as ok
from rationalizer.wire.wellformed import PASSING, PERIODIC, PINNED

#: The fields of a partition in front of its versions.
_HEAD: Final = len(DATED.fields) - 1


def read_dated(named: str, row: object, bounds: Bounds) -> Any:
    """A partition of a group that takes checkpoints: topic, partition, pieces, initial, versions."""
    want(type(row) is tuple and len(row) >= _HEAD, f"a partition of {named} has not its {_HEAD} parts")
    assert type(row) is tuple
    return DATED.read((*row[:_HEAD], row[_HEAD:]), bounds.level, f"partition of {named}")


def load_checkpoints(named: str, group: Group, row: object, partitions: Sequence[Any], bounds: Bounds) -> None:
    """The group takes these checkpoints, and has the progress that the newest of them sees."""
    said = CHECKPOINTS.read(row, bounds.level, f"list of checkpoints of {named}")
    kept = [_kept(named, each, bounds) for each in said.kept]
    want(bool(kept) and said.keep >= 1, f"{named} keeps no checkpoints, and takes some")
    want_ascending(f"checkpoints of {named}", [each.id for each in kept])
    in_order = all(one.log_time <= other.log_time for one, other in pairwise(kept))
    want(in_order, f"a checkpoint of {named} was complete before an older one")
    kinds = [each.kind for each in kept]
    want(PASSING not in kinds[:-1], f"{named} keeps a passing checkpoint below its newest")
    fits = kinds.count(PERIODIC) <= MAX_KEPT and kinds.count(PINNED) <= MAX_PINNED
    want(fits, f"{named} keeps more checkpoints than it can")
    barrier = None if said.barrier is None else _barrier(named, group, said.barrier, kept[-1], bounds)
    unset: set[Key] = set()
    for each in partitions:
        key, which = (each.topic, each.partition), f"{each.topic}/{each.partition} of {named}"
        _add_versions(which, key, [_version(which, version, bounds) for version in each.versions], kept, barrier)
        seen = any(key in one.versions for one in kept)
        want(
            seen or each.initial is not None or not each.versions,
            f"{which} has a version of the barrier, and no progress before it",
        )
        if each.initial is not None:
            progress = group.keep(*key)
            progress.initial = progress.progress.stable = each.initial
        elif seen:
            unset.add(key)
    checkpoints = group.checkpoints = restored(said.keep, said.hold, kept)
    want(checkpoints.old_weight <= MAX_OLD_WEIGHT, f"the older versions of {named} are more than it keeps")
    checkpoints.unset = unset
    checkpoints.barrier = barrier
    for key in checkpoints.seen:
        show(group, key)


def check_barrier(named: str, group: Group, checkpoints: Checkpoints) -> None:
    """The pieces are there: the open barrier still waits for an owner."""
    note_owners(group)
    barrier = checkpoints.barrier
    if barrier is not None:
        # Not is_due: an owner may have refused while it owned nothing, which closes not even one of a hold group (X6).
        want(barrier.waiting > 0, f"the barrier of {named} would have been closed")
        want(bool(barrier.reached) or not barrier.versions, f"no owner has handed in what the barrier of {named} has")


def _kept(named: str, row: object, bounds: Bounds) -> Kept:
    want(type(row) is tuple and len(row) == 3, f"a checkpoint of {named} has not its 3 parts")
    checkpoint, log_time, kind = cast("tuple[Any, ...]", row)
    good = ok.is_offset(checkpoint) and ok.is_offset(log_time) and ok.KIND.holds(kind)
    want(good and checkpoint > 0, f"a checkpoint of {named} is invalid")
    is_past = checkpoint < bounds.next_offset and log_time <= bounds.log_time
    want(is_past, f"a checkpoint of {named} is to come")
    return Kept(checkpoint, log_time, kind, {})


def _barrier(named: str, group: Group, row: object, newest: Kept, bounds: Bounds) -> Barrier:
    said = BARRIER.read(row, bounds.level, f"barrier of {named}")
    fits = newest.id < said.id < bounds.next_offset and newest.log_time <= said.opened <= bounds.log_time
    want(fits, f"the barrier of {named} was opened when it could not be")
    barrier = Barrier(said.id, said.opened, said.timeout_ms, said.passing)
    want_ascending(f"answers of {named}", [each[:1] if type(each) is tuple else () for each in said.answers])
    for each in said.answers:
        want(type(each) is tuple and len(each) == 3, f"an answer of {named} has not its 3 parts")
        slot, generation, answer = each
        want(type(slot) is int and slot in group.members, f"the barrier of {named} was answered by no member")
        good = ok.is_offset(generation) and generation <= group.generation and ok.ANSWER.holds(answer)
        want(good, f"an answer of {named} is invalid")
        barrier.answers[slot] = Answer(generation, answer)
    return barrier


def _version(which: str, row: object, bounds: Bounds) -> Version:
    said = VERSION.read(row, bounds.level, f"version of {which}")
    progress = load_progress(which, said.done_through, said.ranges, NOTHING_DONE, bounds)
    saved = load_progress(f"{which}, as saved,", said.states, (), NOTHING_DONE, bounds)
    fits = saved.piece_count <= MAX_KEY_PIECES and progress.piece_count <= MAX_KEY_PIECES
    want(fits, f"{which} has a version of more than {MAX_KEY_PIECES:,} pieces")
    want(saved.stable >= NOT_SAVED, f"{which} has states of no checkpoint")
    newest = max(checkpoint for _, _, checkpoint in saved.done_through)
    want(newest <= said.checkpoint, f"{which} has states of a later checkpoint")
    return Version(said.checkpoint, saved, progress, said.metadata)


def _add_versions(which: str, key: Key, versions: list[Version], kept: list[Kept], barrier: Barrier | None) -> None:
    """Each version goes to the first checkpoint that sees it."""
    if versions and barrier is not None and versions[-1].checkpoint == barrier.id:
        made = barrier.versions[key] = versions.pop()
        want(_names(made.saved, barrier.id), f"{which} has a version of the barrier, and nothing was handed in")
    want_ascending(f"versions of {which}", [version.checkpoint for version in versions])
    place = 0
    for version in versions:
        while place < len(kept) and kept[place].id < version.checkpoint:
            place += 1
        want(place < len(kept) and version.checkpoint > 0, f"{which} has a version that no checkpoint sees")
        want(key not in kept[place].versions, f"{which} has a version that no checkpoint sees")
        kept[place].versions[key] = version


def _names(saved: Progress, checkpoint: int) -> bool:
    return any(each == checkpoint for _, _, each in saved.done_through)
