"""A group's checkpoints as rows, by the broker's clock; and how old what the log says of a piece may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from kafka_marshal.observe.cuts import waits_for

if TYPE_CHECKING:
    from kafka_marshal.observe.checkpoints import CheckpointHistory
    from rationalizer import Group

#: A cut is old if this many checkpoints were taken since.
OLD_AFTER: Final = 3


@dataclass(frozen=True, slots=True)
class BarrierRow:
    """The checkpoint that is being taken. Times are the broker's (ms)."""

    id: int
    opened: int
    timeout_ms: int
    passing: bool
    open_ms: int
    #: Members that own pieces and have not answered.
    waits_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UnsavedRow:
    """A member whose states are not saved."""

    client: str
    instance: str
    #: Since its first answer that says so, in the log that was read (ms), and the last checkpoint that lacks them.
    since_ms: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class CheckpointsRow:
    """The checkpoints of a group that takes some."""

    keep: int
    hold: bool
    newest: int
    #: Since it was complete (ms).
    age_ms: int
    #: (id, log time of its completion) of all that are kept, ascending.
    kept: tuple[tuple[int, int], ...]
    barrier: BarrierRow | None = None
    unsaved: tuple[UnsavedRow, ...] = ()

    @property
    def is_slow(self) -> bool:
        """Whether the one that is being taken waits for members for more than half of its time."""
        found = self.barrier
        return found is not None and bool(found.waits_for) and 2 * found.open_ms > found.timeout_ms

    def is_unsaved(self, client: str | None, instance: str | None) -> bool:
        """Whether this member's states are not saved."""
        return any((each.client, each.instance) == (client, instance) for each in self.unsaved)

    @property
    def as_of_ms(self) -> int:
        """How old what the log says of the group is: the age of the newest, but not above what is usual (ms).

        If nothing is done no checkpoint is begun, and its age says nothing.
        """
        gaps = [later[1] - earlier[1] for earlier, later in pairwise(self.kept)]
        return min(self.age_ms, OLD_AFTER * max(gaps)) if gaps else self.age_ms

    @property
    def old_below(self) -> int | None:
        """The third newest: cuts for older ones are old. None: fewer are kept."""
        return self.kept[-OLD_AFTER][0] if len(self.kept) >= OLD_AFTER else None

    def since_ms(self, checkpoint: int) -> int:
        """Since this checkpoint, or the next that is kept, was complete (ms): the least age of a cut for it."""
        newest_at = self.kept[-1][1]
        return self.age_ms + newest_at - next((at for id_, at in self.kept if id_ >= checkpoint), newest_at)


def checkpoints_row(
    group: Group, now_ms: int, histories: Mapping[str, CheckpointHistory] | None = None
) -> CheckpointsRow | None:
    """The row of a group; None: it takes no checkpoints. histories: by group, as far as the log was read."""
    found = group.checkpoints
    if found is None:
        return None
    open_one = found.barrier
    barrier = None
    if open_one is not None:
        barrier = BarrierRow(
            open_one.id,
            open_one.opened,
            open_one.timeout_ms,
            open_one.passing,
            max(0, now_ms - open_one.opened),
            tuple(waits_for(group)),
        )
    kept = tuple((each.id, each.log_time) for each in found.kept)
    history = (histories or {}).get(group.group_id)
    unsaved = tuple(
        UnsavedRow(each.client, each.instance, max(0, now_ms - each.since), each.checkpoint)
        for each in (history.unsaved.values() if history is not None else ())
    )
    return CheckpointsRow(found.keep, found.hold, found.newest, max(0, now_ms - kept[-1][1]), kept, barrier, unsaved)


def barrier_json(barrier: BarrierRow | None) -> dict[str, object] | None:
    """The open barrier as JSON."""
    if barrier is None:
        return None
    return {
        "id": barrier.id,
        "opened": barrier.opened,
        "timeout_ms": barrier.timeout_ms,
        "passing": barrier.passing,
        "waits_for": list(barrier.waits_for),
    }


def checkpoints_json(row: CheckpointsRow | None) -> dict[str, object]:
    """The fields that `group` and `status` have of a group's checkpoints; null where it takes none."""
    return {
        "newest": None if row is None else row.newest,
        "age_ms": None if row is None else row.age_ms,
        "barrier": None if row is None else barrier_json(row.barrier),
    }
