"""Planted bugs in exactly once into Kafka (M2 to M4, M7)."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

__all__ = ["TRANSACTIONS"]

_LARGER = "self._finish(assignment, position if offset is None else max(position, offset), now)"
_COMMIT = "transactions.commit(run.assignment, outputs, run.last, lambda: self._turn() is True)"
_TOLD = "with self._consumer._driver.locked() as engine: engine.take(DoneRun(self._number, run), 0.0)"
_OFFSET = "producer.commit(self._group_id, assignment.key, last_offset + 1, metadata, timeout_s)"

TRANSACTIONS: tuple[Mutation, ...] = (
    # Taking over.
    Mutation(
        "Kafka's offset is ignored",
        "TakeOvers._read",
        _LARGER,
        _LARGER.replace("max(position, offset)", "position"),
        "M2",
    ),
    Mutation("the mark is forgotten", "TakeOvers.step", "if kafka_counts(progress):", "if progress is None:", "M3"),
    Mutation(
        "the mark comes before Kafka's offset is set",
        "TakeOvers.step",
        "self._wait(assignment, TakingStep.SETTING)",
        "return self._mark(assignment, now)",
        "M3",
    ),
    Mutation(
        "another program's offset is taken for ours",
        "TakeOvers._read",
        "if offset is not None and not is_ours(metadata, assignment.epoch):",
        "if offset is not None and not metadata_of(assignment.epoch):",
        "M7",
    ),
    # Transactions.
    Mutation(
        "the log is told before the commit",
        "Transaction._commit",
        _COMMIT,
        f"{_TOLD}\n            {_COMMIT.split(', lambda')[0]})",
        "M4",
    ),
    Mutation(
        "the last offset is committed, not the next",
        "Transactions._produce",
        _OFFSET,
        _OFFSET.replace(" + 1", ""),
        "M4",
    ),
)
