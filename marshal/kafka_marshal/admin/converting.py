"""A group turned into one of the other kind, under one pause (G1, C16, G21).

::

    save all progress to a file ──▶ forget the group in every CP, pause it again at once ──▶ set all positions ──▶ done
       │ a failure: nothing was changed     │ a failure, from here on: the file has everything; run it again

A run that finds the file of an earlier one goes on where that was interrupted. What the log has by then is held against
the file: a position that is neither as it was saved nor absent means that somebody was at work in between, and only
force replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from kafka_marshal.admin.conversion import Conversion, Plan, Saved
from kafka_marshal.admin.coordinated import configure, set_positions
from kafka_marshal.admin.moving import move_all
from kafka_marshal.admin.pausing import PauseWork
from kafka_marshal.admin.session import GroupKind, group_in
from kafka_marshal.admin.topic import below_level
from kafka_marshal.admin.transfer import progress_of_all
from kafka_marshal.errors import AdminError
from rationalizer import Progress, World
from rationalizer.levels import GROUPS_LEVEL

__all__ = ["convert", "plan_conversion", "saved_in"]

#: Called between two steps with a name for what was done last. A seam for tests.
passed: Callable[[str], None] = lambda _: None  # noqa: E731


def plan_conversion(
    group: str, log: str, client_id: str, kind: GroupKind | None, to: GroupKind, saved: list[Saved], too_low: list[int]
) -> Plan:
    """What there is to convert. Raises AdminError where it can't be."""
    if kind is None:
        raise AdminError(
            f"the log knows no group {group!r}. Nothing was changed. kafka-marshal status names the groups"
        )
    if kind == to:
        raise AdminError(f"group {group!r} is a {to} group already. Nothing was changed")
    if to == "coordinated" and too_low:
        raise AdminError(
            f"partition(s) {too_low} of the coordination topic are below level {GROUPS_LEVEL} of the protocol, which "
            "coordinated groups need. Nothing was changed. Raise the topic first: kafka-marshal upgrade"
        )
    return Plan(group, log, to, client_id, "saved", tuple(saved))


def convert(work: PauseWork, log: str, to: GroupKind, path: Path, force: bool) -> Conversion:
    """Do it, or go on with it, under our pause."""
    work.ready()
    _refuse_living(work)
    plan = Plan.read(path)
    is_old = plan is not None and plan.phase != "done"
    if plan is None or plan.phase != "changing":
        plan = _saved(work, log, to).write(path, "saved")
        passed("saved")
        plan = plan.write(path, "changing")
    else:
        plan = _gone_on(work, plan, force).write(path, "changing")
    passed("changing")
    _forget_old(work, to)
    _set(work, plan)
    plan.write(path, "done")
    passed("done")
    return plan.conversion(path, resumed=is_old)


def _saved(work: PauseWork, log: str, to: GroupKind) -> Plan:
    """All progress as it is now."""
    session = work.session
    with session.locked():
        kind, too_low = session.kind(), below_level(session.worlds, GROUPS_LEVEL)
        saved = saved_in(session.worlds, session.group_id)
        group = session.group()
    plan = plan_conversion(session.group_id, log, session.client_id, kind, to, saved, too_low)
    return plan if group is None else replace(plan, settings=asdict(group.settings))


def saved_in(worlds: Mapping[int, World], group_id: str) -> list[Saved]:
    """The progress of all partitions, sorted."""
    found = progress_of_all(worlds, group_id)
    group = group_in(worlds, group_id)
    saved = []
    for key in sorted(found):
        kept = None if group is None else group.kept(*key)
        saved.append(Saved.of(key, found[key], None if kept is None else kept.metadata))
    return saved


def _refuse_living(work: PauseWork) -> None:
    alive = sorted(work.signs_of_life())
    if alive:
        raise AdminError(
            f"group {work.group_id!r} is alive: {', '.join(map(repr, alive[:4]))} answered the pause. Nothing was "
            "changed, and it goes on. Stop its workers first: those of the other kind take their place"
        )


def _gone_on(work: PauseWork, plan: Plan, force: bool) -> Plan:
    """The plan of an earlier run, held against what the log has now."""
    session = work.session
    with session.locked():
        found = progress_of_all(session.worlds, session.group_id)
        now = saved_in(session.worlds, session.group_id)
    moved = [
        f"{x.topic} [{x.partition}]: {x.offset} was saved, {found[x.key].stable + 1} is there"
        for x in plan.saved
        if x.key in found and not _is_as_left(x, found[x.key])
    ]
    if moved and not force:
        raise AdminError(
            f"group {plan.group!r} was at work after its conversion was interrupted: {'; '.join(moved[:3])}"
            + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
            + ". Nothing more was changed. If workers of the new kind have gone on from the saved positions, it is "
            "done: remove the file. Else force it: the saved positions are set, which loses nothing, and repeats what "
            "was done since"
        )
    known = {each.key for each in plan.saved}
    return replace(plan, saved=(*plan.saved, *(each for each in now if each.key not in known)))


def _is_as_left(saved: Saved, now: Progress) -> bool:
    """Whether the position is as it was saved, or not set yet: our own claim of it has made the lease."""
    return now.stable + 1 in (saved.offset, 0) and not (now.stable + 1 == 0 and now.intervals.firsts)


def _forget_old(work: PauseWork, to: GroupKind) -> None:
    """Forget the group wherever it is of the other kind, home first (G2)."""
    session = work.session
    for cp in sorted(session.cps, key=lambda cp: cp != session.home):
        with session.locked():
            world = session.worlds[cp]
            is_claimed = any(lease.group_id == session.group_id for lease in world.leases())
            is_left = is_claimed if to == "coordinated" else world.group(session.group_id) is not None
        if not is_left:
            continue
        if not work.hold.forget(cp):
            raise AdminError(
                f"partition {cp} of the coordination topic did not show in time that group {session.group_id!r} is "
                "forgotten and paused again, or somebody came in between. Its progress is in the file. Run it again"
            )
        passed(f"forgotten in {cp}")


def _set(work: PauseWork, plan: Plan) -> None:
    """Set the positions that are not set yet."""
    session = work.session
    work.extend_if_short()
    work.check()
    with session.locked():
        kind = session.kind()
        now = {key: progress.stable + 1 for key, progress in progress_of_all(session.worlds, plan.group).items()}
    if kind not in (None, plan.to):
        raise AdminError(
            f"group {plan.group!r} is a {kind} group again: one of its workers came in between. Its progress is in the "
            "file. Stop the workers, and run it again"
        )
    targets = {each.key: each.offset for each in plan.saved if now.get(each.key) != each.offset}
    if plan.to == "coordinated":
        configure(session, {})
        passed("marked")
        metadata = {each.key: each.metadata for each in plan.saved if each.metadata and each.key in targets}
        set_positions(session, targets, metadata)
    elif targets:
        move_all(work, session, targets)
    passed("set")
