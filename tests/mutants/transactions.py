"""Planted bugs in exactly once into Kafka (M2 to M4, M7)."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_LARGER = "self._finish(assignment, position if offset is None else max(position, offset), now)"
_COMMIT = "transactions.commit(run, outputs, lambda: self._turn() is True)"
_TOLD = "with self._consumer._driver.lock.locked(): self._consumer._take(self._consumer._engine.delivery.done_run, run)"
_OFFSET = "producer.commit(self._group_id, assignment.key, run.last + 1, metadata, timeout_s)"

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
        "if offset is not None and not is_ours(metadata, assignment.epoch, self._log_name):",
        "if offset is not None and not metadata_of(assignment.epoch, self._log_name):",
        "M7",
    ),
    Mutation(
        "no heartbeat follows the producer's begin",
        "TakeOvers.answered",
        "assignment.taking.beat = self._consumer.source.reports.prove(assignment.lease, now)",
        "assignment.taking.beat = -inf",
        "M2",
    ),
    Mutation(
        "an older heartbeat counts",
        "TakeOvers.step",
        "if taking.step is TakingStep.PROVING and assignment.lease.proven_by >= taking.beat:",
        "if taking.step is TakingStep.PROVING:",
        "M2",
    ),
    Mutation(
        "committed offsets are read uncommitted",
        "_Asker.__init__",
        '"isolation.level": "read_committed",',
        '"isolation.level": properties.get("isolation.level", "read_uncommitted"),',
        "M2",
    ),
    Mutation(
        "an offset of another coordination topic is ours",
        "other_log",
        'return "" if named == log_name else named',
        'return ""',
        "M7",
    ),
    # Transactions.
    Mutation(
        "a partition's transactions come in any order",
        "TakeOvers.turn",
        "if tracker.done.stable + 1 >= run.covers_from:",
        "if tracker.done.stable + 1 >= 0:",
        "M5",
    ),
    Mutation(
        "the next batch is kept after an abort",
        "Delivery.drop",
        "for run in [run for run in assignment.tracker.runs.values() if run.last >= first]:",
        "for run in [run for run in assignment.tracker.runs.values() if run.first == first]:",
        "M5",
    ),
    Mutation(
        "a commit of a lost lease ends that of the new one",
        "Transacting.commit",
        "del self.under_way[run]",
        "[self.under_way.pop(x) for x in list(self.under_way) if x.assignment.key == key]",
        "M4",
    ),
    Mutation(
        "the log is told before the commit",
        "Transaction._commit",
        _COMMIT,
        f"{_TOLD}\n            {_COMMIT.replace('self._turn() is True', 'True')}",
        "M4",
    ),
    Mutation(
        "the last offset is committed, not the next",
        "TransactionalProducers._produce",
        _OFFSET,
        _OFFSET.replace(" + 1", ""),
        "M4",
    ),
)
