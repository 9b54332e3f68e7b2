"""Removes old log and old snapshots together, up to a snapshot that was checked, never further (L1, S2, S3).

Checked means: a replay of the log, from its beginning or from an earlier cut, led to the same state. What is kept is
enough for every start: the snapshots from the cut on, at least two, and all later log.

If only what is older than some time may go, the replay ends at the last snapshot that has to be checked for that
(Q53): so each record is replayed once for its removal, however much is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf

from kafka_marshal.errors import AdminError, ConfigurationError, TopicChangedError, TopicMissingError
from kafka_marshal.node.log_reader import read_range
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.ports import Cluster
from kafka_marshal.snapshots.reader import StoredAt
from kafka_marshal.snapshots.start import CpStart, Difference

#: Checked snapshots of each CP that are kept: the newest two, which a start needs (S3), and one more for a start that
#: finds one of those two damaged.
DEFAULT_KEEP = 3
LEAST_KEEP = 2

#: A process that was stopped for longer than this (ms) between its last checks and the removal removes nothing.
FRESH_MS = 30_000.0


@dataclass(frozen=True, slots=True)
class OlderThan:
    """Only log older than this may go, by the broker's stamps (ms).

    Counted back from the last record of each CP, or from this machine's time if that is earlier: so neither a wrong
    clock here nor one of a broker that ran ahead makes records look old.
    """

    ms: float
    now_ms: float

    def limit(self, last_stamp: int) -> float:
        """The newest log time (ms) at which a CP with this last stamp may be cut."""
        return min(self.now_ms, last_stamp) - self.ms


@dataclass(frozen=True, slots=True)
class PrunedPartition:
    """The removal in one CP, planned or done."""

    partition: int
    #: First offset and high watermark of its log, before.
    log_start: int
    log_end: int
    #: Next offsets of the correct snapshots: a replay reached them, or an earlier prune cut there; ascending.
    checked: tuple[int, ...]
    #: The log below this offset is removed: the next offset of a checked snapshot. None: nothing is.
    cut: int | None
    #: The log of snapshots below this offset is removed, with this number of whole snapshots.
    snapshots_cut: int
    snapshots_removed: int
    #: Snapshots that contradict the log, or are damaged.
    differences: tuple[Difference, ...]
    #: Why not more is removed, in words.
    why: str

    @property
    def records_removed(self) -> int:
        """Offsets of the log that are removed."""
        return 0 if self.cut is None else self.cut - self.log_start


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """The whole removal, planned or done. `topic_ids`: of the log and its snapshots, to recognize them."""

    topic: str
    snapshots_topic: str
    topic_ids: tuple[str, str]
    partitions: tuple[PrunedPartition, ...]

    @property
    def records_removed(self) -> int:
        """Offsets of the log that are removed, in all CPs."""
        return sum(each.records_removed for each in self.partitions)

    @property
    def snapshots_removed(self) -> int:
        """Whole snapshots that are removed, in all CPs."""
        return sum(each.snapshots_removed for each in self.partitions)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Snapshots that contradict the log, or are damaged, in all CPs."""
        return tuple(found for each in self.partitions for found in each.differences)


def make_plan(
    cluster: Cluster,
    topic: str,
    timeout_s: float,
    *,
    keep: int = DEFAULT_KEEP,
    force: bool = False,
    older_than: OlderThan | None = None,
    only: Collection[int] | None = None,
    step: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PrunePlan:
    """Replay the log beside its snapshots, and plan the removal; nothing is removed (*blocking*).

    keep: checked snapshots of each CP that stay, at least two. force: also remove log that contradicts a snapshot.
    older_than: what is not older stays, and is replayed only as far as necessary. only: these CPs; None: all.
    step: replay no more records than about this, if that is enough to remove some. progress: called with (records
    replayed, records in all).
    """
    if keep < LEAST_KEEP:
        raise ConfigurationError(
            f"keep must be at least {LEAST_KEEP}, not {keep}: a replica starts from the second newest snapshot and "
            "compares at the newest. Nothing was removed"
        )
    replica = Replica(cluster, topic, timeout_s, Begin.CHECK, only=only)
    try:
        if replica.start.snapshots is None:
            raise TopicMissingError(
                f"{replica.start.lacks_snapshots}: without snapshots no log can be removed. Nothing was. Make it with "
                "kafka-marshal init; members write snapshots as the log grows"
            )
        ids = _topic_ids(cluster, topic, replica.start.snapshots_topic, timeout_s)
        replica.check(cluster.topic_info([topic], timeout_s).get(topic))
        limits = {} if older_than is None else _limits(cluster, replica, older_than, timeout_s)

        def enough() -> bool:
            if step is not None and replica.records_read >= step:
                is_checked = all(len(start.agreed) >= keep for start in replica.starts.values())
            else:
                is_checked = older_than is not None and all(
                    sum(at > limits[cp] for at in start.agreed.values()) >= keep - 1
                    for cp, start in replica.starts.items()
                )
            return is_checked and all(_is_judged(start, keep) for start in replica.starts.values())

        replica.catch_up(timeout_s, progress, enough=enough)
        partitions = tuple(
            _plan(start, replica.start.snapshots.partitions[cp].sorted(), keep, force, limits.get(cp))
            for cp, start in sorted(replica.starts.items())
        )
        return PrunePlan(topic, replica.start.snapshots_topic, ids, partitions)
    finally:
        replica.close()


def _is_judged(start: CpStart, keep: int) -> bool:
    """Whether no hash (S4) that is still compared covers what may be cut now."""
    checks = start.hashes.checks
    since = None if checks is None else checks.unjudged_since
    return since is None or len(start.agreed) < keep or since >= sorted(start.agreed)[-keep]


def _limits(cluster: Cluster, replica: Replica, older_than: OlderThan, timeout_s: float) -> dict[int, float]:
    """CP → the newest log time at which it may be cut (*blocking*); none of one that is empty."""
    last = {cp: (at.log_end - 1, at.log_end) for cp, at in replica.starts.items() if at.log_end > at.log_start}
    limits = dict.fromkeys(replica.starts, -inf)
    for cp, entries in read_range(cluster, replica.topic, last, timeout_s):
        limits[cp] = older_than.limit(entries[-1][1])
    return limits


def _plan(
    start: CpStart, places: list[StoredAt], keep: int, force: bool, until_ms: float | None = None
) -> PrunedPartition:
    """until_ms: the newest log time at which it may be cut; None: any."""
    # An earlier prune removed log up to a checked snapshot: the replay begins there.
    on_snapshot = start.begun_at == start.log_start > 0 and bool(start.agreed)
    grounded = start.from_beginning or on_snapshot
    checked = tuple(sorted({*start.agreed, *([start.begun_at] if on_snapshot else [])}))
    # Snapshots before the log's beginning don't matter any more.
    late = [found for found in start.differences if found.next_offset >= start.begun_at]
    doubts = {found.next_offset if found.since is None else found.since + 1: found for found in late}  # kept from there
    limit = None if force or not doubts else min(doubts)
    cut = None
    why = ""
    if not grounded:
        why = "its log begins at no snapshot that it bears out: what it holds is proven by nothing"
    elif len(checked) < keep:
        why = f"{len(checked)} checked snapshot(s), and {keep} are kept"
    else:
        fit = [
            at for at in checked[: len(checked) - keep + 1] if at > start.log_start and (limit is None or at < limit)
        ]
        old = fit if until_ms is None else [at for at in fit if start.agreed[at] <= until_ms]
        cut = old[-1] if old else None
        why = "" if old else "nothing up to a checked snapshot is that old" if fit else "it was pruned as far already"
    if grounded and limit is not None and len(checked) >= keep and limit <= checked[-keep]:
        why = f"{_what(doubts[limit])} contradicts the log, which stays from before that on, to be examined"
    floor = start.log_start if cut is None else cut
    # Snapshots that the log does not reach any more are useless.
    kept = [place.first for place in places if place.next_offset >= floor]
    gone = [place for place in places if place.next_offset < floor]
    snapshots_cut = min(kept) if kept and grounded else 0
    return PrunedPartition(
        start.cp,
        start.log_start,
        start.log_end,
        checked,
        cut,
        snapshots_cut,
        sum(place.last < snapshots_cut for place in gone),
        tuple(start.differences),
        why,
    )


def _what(found: Difference) -> str:
    if found.since is None:
        return f"the snapshot at offset {found.next_offset}"
    return f"the stored hash of offsets {found.since} to {found.next_offset - 1}"


def carry_out(
    cluster: Cluster, plan: PrunePlan, timeout_s: float, still_wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Carry out the plan, if it is still wanted (*blocking*); whether it was. It may be called again after a failure.

    Raises TopicChangedError if the topics were recreated, AdminError if less was removed than planned.
    """
    asked_at = cluster.runtime.now_ms()
    if not still_wanted():
        return False
    if _topic_ids(cluster, plan.topic, plan.snapshots_topic, timeout_s) != plan.topic_ids:
        raise TopicChangedError(
            f"{plan.topic!r} or {plan.snapshots_topic!r} was deleted and recreated since it was checked. Nothing was "
            "removed. Look again"
        )
    if cluster.runtime.now_ms() - asked_at > FRESH_MS:
        raise AdminError(
            f"this process was stopped just before the removal, and {plan.topic!r} may be another topic by now. "
            "Nothing was removed. Do it again"
        )
    # The log first: snapshots below its beginning do no harm, and are removed the next time.
    cuts = {(plan.topic, each.partition): each.cut for each in plan.partitions if each.cut is not None}
    starts = cluster.delete_records(cuts, timeout_s) if cuts else {}
    behind = sorted(cp for (_, cp), cut in cuts.items() if starts.get((plan.topic, cp), 0) < cut)
    if behind:
        raise AdminError(
            f"partition(s) {behind} of {plan.topic!r} were not cut as asked for; others may have been. No snapshot was "
            "removed, and every replica can start. Do it again"
        )
    olds = {
        (plan.snapshots_topic, each.partition): each.snapshots_cut for each in plan.partitions if each.snapshots_cut > 0
    }
    if olds:
        cluster.delete_records(olds, timeout_s)
    return True


def _topic_ids(cluster: Cluster, topic: str, snapshots: str, timeout_s: float) -> tuple[str, str]:
    infos = cluster.topic_info([topic, snapshots], timeout_s)
    missing = [name for name in (topic, snapshots) if name not in infos]
    if missing:
        raise TopicMissingError(f"{missing[0]!r} does not exist. Nothing was removed")
    return infos[topic].topic_id, infos[snapshots].topic_id
