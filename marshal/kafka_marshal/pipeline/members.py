"""The member behind claimed batches: it claims partitions, or has them of a coordinated group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from kafka_marshal import arguments
from kafka_marshal.checkpoints import Checkpoint, CheckpointPolicy, Restore
from kafka_marshal.client.checkpointing import Checkpoints
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.client.ranges import GroupRangeConsumer, RangeConsumer
from kafka_marshal.engine.policies import Policy
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.types import Strategy


class OfGroup(TypedDict, total=False):
    """What only members of coordinated groups take; as for :meth:`Marshal.group_ranges`."""

    strategy: Strategy
    session_timeout_ms: int
    checkpoints: CheckpointPolicy | None
    on_checkpoint: Callable[[Checkpoint], object] | None
    on_restore: Callable[[Restore], object] | None
    on_completed: Callable[[int], object] | None


def make_member(
    marshal: Marshal, topics: Sequence[str], *, group: bool, policy: Policy | None, of_group: OfGroup, **shared: Any
) -> RangeConsumer:
    """A consumer of ranges; shared: the arguments that both kinds take."""
    for name in of_group.keys() - OfGroup.__annotations__.keys():
        raise TypeError(f"ClaimedBatches() got an unexpected keyword argument {name!r}")
    given = [name for name, value in of_group.items() if value is not None]
    if not arguments.a_flag("group", group):
        if given:
            raise ConfigurationError(
                f"{', '.join(given)}: for a member of a coordinated group, and these batches claim their partitions. "
                "Nothing was claimed. Add group=True, at all drivers of the group"
            )
        return marshal.ranges(topics, policy=policy, **shared)
    if policy is not None:
        raise ConfigurationError(
            "policy= decides what a member claims, and with group=True the group assigns partitions. Nothing was "
            "claimed. Leave it out, and choose a strategy="
        )
    return marshal.group_ranges(topics, **of_group, **shared)


class CheckpointCalls:
    """The calls for checkpoints; ConfigurationError if the driver claims its partitions."""

    _consumer: RangeConsumer

    def checkpoint(self) -> None:
        """Begin a checkpoint of the group now, and return at once. In fn: this round is in it, once fn has returned."""
        self._member_for("checkpoint()").checkpoint()

    def rollback(self, to: int | None = None) -> None:
        """Have all members go back, as :meth:`GroupRangeConsumer.rollback`; the round at work is cancelled."""
        self._member_for("rollback()").rollback(to)

    @property
    def checkpoints(self) -> Checkpoints:
        """What this driver knows of the group's checkpoints, now."""
        return self._member_for("checkpoints").checkpoints

    def _member_for(self, what: str) -> GroupRangeConsumer:
        if isinstance(self._consumer, GroupRangeConsumer):
            return self._consumer
        raise ConfigurationError(
            f"{what} is for a group that takes checkpoints, and these batches claim their partitions. Nothing was "
            "changed. Add group=True and checkpoints=CheckpointPolicy(), at all drivers of the group"
        )
