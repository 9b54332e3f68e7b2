"""Which member handled which message: the audit's tables, joined with the user's topic.

A message was handled by the member that marked its offset as done in the coordination log: a row of `progress` with
first <= offset <= last. At least once, this is the member that reported it, the last of possibly several that worked on
it; at most once, it is the only member that received it. Without such a row the message was not handled, or the log
does not reach that far. `ownership` shows which member held the partition at a time, whatever it did with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["HANDLED_BY", "OWNED_BY", "handled_by", "owned_by"]

#: Columns added by `handled_by` and `owned_by`.
HANDLED_BY: Final = (
    "handled_group",
    "handled_client",
    "handled_instance",
    "handled_epoch",
    "handled_time",
    "handled_as",
)
OWNED_BY: Final = ("owner_group", "owner_client", "owner_instance", "owner_epoch")


def handled_by(messages: DataFrame, progress: DataFrame, *, group: str | None = None) -> DataFrame:
    """Add to each message the member that handled it, its epoch, the log time (ms), and how (`what` of `progress`).

    `messages` has the columns topic, partition and offset, as from Spark's Kafka source, and any others; `progress` is
    the table of an audit. `group`: of this group only. A message that several groups handled, or that was handled
    again after its position was set back, has a row for each; one that no member handled has nulls.
    """
    wanted = progress.where("first IS NOT NULL")
    if group is not None:
        wanted = wanted.where(wanted["group"] == group)
    done = wanted.selectExpr(
        "topic AS _topic",
        "topic_partition AS _partition",
        "first AS _first",
        "last AS _last",
        *(f"`{name}` AS {column}" for name, column in zip(_HANDLED, HANDLED_BY, strict=True)),
    )
    here = (
        (messages["topic"] == done["_topic"])
        & (messages["partition"] == done["_partition"])
        & messages["offset"].between(done["_first"], done["_last"])
    )
    return messages.join(done, here, "left").drop("_topic", "_partition", "_first", "_last")


def owned_by(events: DataFrame, ownership: DataFrame, *, group: str | None = None) -> DataFrame:
    """Add to each event the member that held its partition at that time.

    `events` has the columns topic, partition and time (ms, by the broker's clock), and any others; `ownership` is the
    table of an audit. An event while no member held the lease has nulls.
    """
    wanted = ownership if group is None else ownership.where(ownership["group"] == group)
    held = wanted.selectExpr(
        "topic AS _topic",
        "topic_partition AS _partition",
        "coalesce(from_time, -1L) AS _from",
        "coalesce(to_time, 9223372036854775807L) AS _to",
        *(f"`{name}` AS {column}" for name, column in zip(_OWNED, OWNED_BY, strict=True)),
    )
    then = (
        (events["topic"] == held["_topic"])
        & (events["partition"] == held["_partition"])
        & (events["time"] >= held["_from"])
        & (events["time"] < held["_to"])
    )
    return events.join(held, then, "left").drop("_topic", "_partition", "_from", "_to")


_HANDLED: Final = ("group", "client", "instance", "epoch", "time", "what")
_OWNED: Final = ("group", "client", "instance", "epoch")
