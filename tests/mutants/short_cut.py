"""Planted bugs in the fast path of a replay: it skips what must not be skipped."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

SHORT_CUT: tuple[Mutation, ...] = (
    Mutation(
        "log time is taken back, on the short cut only",
        "fast_path",
        "lease: Lease = leases[group_id, topic, partition]",
        "lease: Lease = leases[group_id, topic, partition]; log.log_time = log_time = min(log_time, timestamp_ms)",
        "T1",
    ),
    Mutation(
        "a pause is ignored on the short cut",
        "fast_path",
        "or (pauses and group_id in pauses)",
        "or (pauses and group_id is None)",
        "C10",
    ),
    Mutation(
        "progress goes back on the short cut",
        "fast_path",
        "or not progress.stable <= done <= max_offset",
        "or not -1 <= done <= max_offset",
        "C5",
    ),
    Mutation(
        "progress goes back on the short cut of batches",
        "fast_path",
        "if moved is not None and moved > lease.progress.stable:",
        "if moved is not None:",
        "C5",
    ),
    Mutation(
        "one range is forgotten on the short cut",
        "fast_path",
        "or progress.intervals.firsts",
        "or len(progress.intervals) > 1",
        "P10",
    ),
    Mutation(
        "one range is forgotten on the short cut of batches",
        "_simple_batch",
        "or progress.intervals.firsts",
        "or len(progress.intervals) > 1",
        "P10",
    ),
    Mutation(
        "an older epoch counts on the short cut",
        "fast_path",
        "or lease.epoch != epoch",
        "or lease.epoch < epoch",
        "C5",
    ),
    Mutation(
        "an older epoch counts on the short cut of batches",
        "_simple_batch",
        "or lease.epoch != epoch",
        "or lease.epoch < epoch",
        "C5",
    ),
    Mutation(
        "on the short cut true is a partition",
        "fast_path",
        "type(partition) is not int  # True == 1 == 1.0, also as keys",
        "partition is None",
        "E2",
    ),
    Mutation(
        "on the short cut true is an epoch",
        "fast_path",
        "or type(epoch) is not int",
        "or epoch is None",
        "E2",
    ),
    Mutation(
        "on the short cut true is an offset",
        "fast_path",
        "or type(done) is not int",
        "or done is None",
        "E2",
    ),
    Mutation(
        "on the short cut nobody beats a free lease",
        "fast_path",
        "or client_id is None  # as the holder of a free lease is",
        "or group_id is None",
        "E2",
    ),
    Mutation(
        "beats on the short cut count as one",
        "count",
        "counts[code] = counts.get(code, 0) + records",
        "counts[code] = counts.get(code, 0) + 1",
        "S1",
    ),
)
