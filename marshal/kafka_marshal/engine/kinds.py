"""The two kinds of groups, and the errors for members of the wrong kind (G1)."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import quote

from kafka_marshal.errors import WrongKindError
from rationalizer import World


def is_coordinated(worlds: Mapping[int, World], group_id: str) -> bool:
    """Whether any coordination partition knows the group as coordinated."""
    return any(world.group(group_id) is not None for world in worlds.values())


def claimed_group(group_id: str) -> WrongKindError:
    """The error if the group is claimed: the log has leases of it, so it cannot have members."""
    return WrongKindError(
        f"group {group_id!r} is a claimed group: there are leases of it in the log. Nothing was changed. Use "
        "marshal.consumer, another group_id, or make it a coordinated group: kafka-marshal convert-group "
        f"{quote(group_id)} --to coordinated"
    )


def coordinated_group(group_id: str) -> WrongKindError:
    """The error if the group is coordinated: it has members and generations, so no lease of it can be claimed."""
    return WrongKindError(
        f"group {group_id!r} is a coordinated group: its members share out partitions, and no lease of it can be "
        "claimed. Nothing was changed. Use mode=Group() of marshal.consumer, marshal.ranges and "
        "ClaimedBatches, another group_id, or make it a claimed group: "
        f"kafka-marshal convert-group {quote(group_id)} --to claimed"
    )
