"""Planted bugs in the fast path of a replay: it skips what must not be skipped."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

SHORT_CUT: tuple[Mutation, ...] = (
    Mutation(
        "log time is taken back, on the short cut only",
        "fast_path",
        "lease, done = beat",
        "lease, done = beat; log.log_time = log_time = min(log_time, timestamp_ms)",
        "T1",
    ),
    Mutation(
        "a pause is ignored on the short cut",
        "_simple_beat",
        "or (pauses and group_id in pauses)",
        "or (pauses and group_id is None)",
        "C10",
    ),
    Mutation(
        "progress goes back on the short cut",
        "_simple_beat",
        "or not progress.stable <= done <= MAX_OFFSET",
        "or not -1 <= done <= MAX_OFFSET",
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
        "_simple_beat",
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
        "_simple_beat",
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
        "_simple_beat",
        "type(partition) is not int  # True == 1 == 1.0, also as keys",
        "partition is None",
        "E2",
    ),
    Mutation(
        "on the short cut true is an epoch",
        "_simple_beat",
        "or type(epoch) is not int",
        "or epoch is None",
        "E2",
    ),
    Mutation(
        "on the short cut true is an offset",
        "_simple_beat",
        "or type(done) is not int",
        "or done is None",
        "E2",
    ),
    Mutation(
        "on the short cut nobody beats a free lease",
        "_simple_beat",
        "or client_id is None  # as the holder of a free lease is",
        "or group_id is None",
        "E2",
    ),
    Mutation(
        "progress goes back where a lease is known by its bytes",
        "fast_path",
        "if done < lease.progress.stable:",
        "if done < -1:",
        "C5",
    ),
    Mutation(
        "a lease is known by bytes that end within its epoch",
        "fast_path",
        "if beats >= _LONG_RUN and value[-5] == _FOUR_BYTES and 0xFFFF < done <= 0xFFFF_FFFF:",
        "if beats >= _LONG_RUN and value[-5] == _FOUR_BYTES and done <= 0xFFFF_FFFF:",
        "C5",
    ),
    Mutation(
        "four bytes that are no offset are one where a lease is known by its bytes",
        "fast_path",
        "if same is not None and value[-5] == _FOUR_BYTES:",
        "if same is not None:",
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
