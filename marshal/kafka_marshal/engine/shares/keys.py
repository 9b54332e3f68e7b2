"""A consumer of partitions, or keys of them, that the program has named (U12): where it differs from others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from kafka_marshal.engine.claims.keys import KeySource
from kafka_marshal.engine.holding import Holding, Owner
from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.positions import Positions
from kafka_marshal.types import Key


class KeyPositions(Positions):
    """Where the group begins is looked up before the claim of some keys: the first one sets it for all (B3)."""

    _consumer: KeyConsumer

    def _needs_start(self, assignment: Assignment) -> bool:
        return assignment.lease.keys is None and super()._needs_start(assignment)

    def located(self, assignment: Assignment, low: int, high: int, start: int, now: float) -> None:
        if assignment.stage is Stage.CLAIMING:
            self._consumer.named.claim_from(assignment.lease, start or None, now)
        else:
            super().located(assignment, low, high, start, now)


class KeyConsumer(ConsumerEngine):
    """A consumer of named partitions."""

    positions: KeyPositions

    _positions_kind = KeyPositions

    @property
    def named(self) -> KeySource:
        """The same as ``source``."""
        return cast("KeySource", self.source)

    def take_on(
        self,
        key: Key,
        is_first: bool,
        want: Callable[[Owner], Holding],
        claims_before: Mapping[int, int] | None = None,
    ) -> None:
        super().take_on(key, is_first, want, claims_before)
        assignment = self.assignments[key]
        if assignment.lease.keys is None:
            return
        assignment.wary = None  # others may have died of its messages, and nothing is done yet (U1)
        came_later = self.source.view.came_later(key)
        if self.named.is_known(key) or came_later or self.settings.start == "earliest":
            self.named.claim_from(assignment.lease, None, self.named.now)
        else:
            self.positions.look_up(assignment, self.settings.start, claims_before)

    def on_granted(self, assignment: Assignment, now: float) -> None:
        self.named.granted(assignment.key)
        super().on_granted(assignment, now)

    def on_refused(self, assignment: Assignment, code: str, now: float) -> None:
        super().on_refused(assignment, code, now)
        self.named.refused(assignment.key, code, now)
