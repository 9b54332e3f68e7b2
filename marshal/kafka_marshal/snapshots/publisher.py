"""Takes snapshots of this member's replica, and compares it with those of other members (S2).

When a snapshot of a CP is due, the replica hands over its state as bytes. That costs a millisecond for a thousand
leases, and is all that happens under the driver's lock. A look-up thread does the rest: after a jitter it reads the log
of snapshots. A member writes its snapshot only if no matching one exists. So one member of a fleet writes, and all
compare.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Generic, TypeVar

from kafka_marshal.errors import AuthorizationError, ClosedError, KafkaUnavailableError, MarshalError, grant
from kafka_marshal.logs import log
from kafka_marshal.ports import Ack, Cluster
from kafka_marshal.snapshots.reader import SnapshotReader, StoredAt
from kafka_marshal.snapshots.start import Difference
from rationalizer import SnapshotError
from rationalizer.log_hash import LogHash, encode_hash
from rationalizer.snapshot import digest_of
from rationalizer.snapshot_log import encode_state

#: The longest wait before one's own snapshot is written. Of a hundred members that wait up to 5 s each, two come within
#: the 50 ms that looking and writing takes; both then write the same bytes, which does no harm.
JITTER_MS = 5_000.0

#: How often the log of snapshots is read if no own snapshot is due: a forged one is noticed within this time.
LOOK_MS = 30_000.0

#: After a failure: Kafka is unreachable, or an ACL is missing.
RETRY_MS = 10_000.0

#: How long a snapshot may take to be written before it is left to the next one.
WRITE_TIMEOUT_S = 10.0

#: Places of each CP whose digests are kept for comparing: enough for 2.5 million records; no member writes later.
KEPT_PLACES = 256


Place = TypeVar("Place", bound=Hashable)

#: The first offset, and the one behind the last.
_Range = tuple[int, int]


@dataclass(slots=True)
class _Pending:
    """An own state that may have to be written."""

    next_offset: int
    state: bytes
    #: Of the records since the place before this one; None: they were not all read here.
    log_hash: LogHash | None
    #: Own clock (ms): not before.
    at: float


class _Digests(Generic[Place]):
    """Digests by place; the oldest go first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Place, set[str]] = OrderedDict()

    def add(self, place: Place, digest: str) -> None:
        self._kept.setdefault(place, set()).add(digest)
        if len(self._kept) > KEPT_PLACES:
            self._kept.popitem(last=False)

    def at(self, place: Place) -> Iterable[str]:
        return sorted(self._kept.get(place, ()))

    def places(self) -> list[Place]:
        return list(self._kept)

    def pairs(self) -> list[tuple[Place, str]]:
        """Each digest, with its place."""
        return [(place, digest) for place in self._kept for digest in self.at(place)]


class SnapshotKeeper:
    """Snapshots of one replica. `note` may be called by any thread, `work` by one at a time."""

    def __init__(self, cluster: Cluster, reader: SnapshotReader, topic: str, rng: Random, now: float) -> None:
        """topic: the log of snapshots, of which the reader has read the end. now: by our own clock (ms)."""
        self._cluster = cluster
        self._reader = reader
        self._topic = topic
        self._rng = rng
        self._lock = cluster.runtime.lock()
        #: The latest state of each CP that was due, until a member has written it.
        self._pending: dict[int, list[_Pending]] = {}
        self._ours: dict[int, _Digests[int]] = {cp: _Digests() for cp in reader.partitions}
        self._theirs: dict[int, _Digests[int]] = {cp: _Digests() for cp in reader.partitions}
        #: Of hashes of the log, by the first offset that they cover and the one behind the last.
        self._our_hashes: dict[int, _Digests[_Range]] = {cp: _Digests() for cp in reader.partitions}
        self._their_hashes: dict[int, _Digests[_Range]] = {cp: _Digests() for cp in reader.partitions}
        self._told: set[tuple[int, int, str]] = set()
        self._look_at = now + LOOK_MS
        self._warned = False
        # They stay with the reader until the first work(): a start may still have to go further back among them.
        self._take(place for stored in reader.partitions.values() for place in stored.sorted())

    def note(self, cp: int, next_offset: int, state: bytes, now: float, log_hash: LogHash | None = None) -> None:
        """Our replica is at a place where a snapshot is due, with this state. Returns at once.

        log_hash: of the records that it has read since the place before (S4).
        """
        digest = digest_of(state)
        with self._lock:
            self._ours[cp].add(next_offset, digest)
            if log_hash is not None:
                self._our_hashes[cp].add((log_hash.since, next_offset), log_hash.digest)
            waiting = self._pending.setdefault(cp, [])
            # In the order of their places: a reader of the newest ones finds them at the end.
            at = max([now + self._rng.uniform(0, JITTER_MS), *(one.at for one in waiting)])
            waiting.append(_Pending(next_offset, state, log_hash, at))
            # A start needs the newest two (S3). What is older is not worth its memory.
            del waiting[:-2]

    def due_at(self) -> float:
        """When `work` should be called next, by our own clock (ms)."""
        with self._lock:
            return min([self._look_at, *(one.at for waiting in self._pending.values() for one in waiting)])

    def is_news(self, difference: Difference) -> bool:
        """Whether this was not reported before; it counts as reported from now on."""
        key = (difference.cp, difference.next_offset, difference.theirs)
        with self._lock:
            if key in self._told:
                return False
            self._told.add(key)
            return True

    def work(self, now: float, read: Collection[int]) -> list[Difference]:
        """Read what others wrote, compare, write what is due (*blocking*); returns all differences, reported or not.

        read: the CPs that our replica reads. Other CPs are left to the members that read them.
        """
        try:
            self._take(self._reader.read_news(read))
            self._reader.forget()
            found = self._compare()
            self._write(now, read)
        except ClosedError:  # so was the member, meanwhile
            return []
        except MarshalError as error:
            self._put_off(now + RETRY_MS)
            self._warn(error)
            return self._compare()
        self._look_at = now + LOOK_MS
        self._warned = False
        return found

    def _warn(self, error: MarshalError) -> None:
        """Once for each outage: a late snapshot costs nothing."""
        if not self._warned:
            self._warned = True
            # The member reports an outage, once.
            level = logging.DEBUG if isinstance(error, KafkaUnavailableError) else logging.WARNING
            log(level, "snapshots_put_off", "no snapshots for now, trying again: %s", error)

    def _put_off(self, until: float) -> None:
        self._look_at = until
        with self._lock:
            for waiting in self._pending.values():
                for one in waiting:
                    one.at = max(one.at, until)

    # Comparing.

    def _take(self, places: Iterable[StoredAt]) -> None:
        for place in places:
            # An invalid snapshot says nothing about the state; it is reported and then ignored.
            self._theirs[place.cp].add(place.next_offset, place.digest if place.holds else f"damaged {place.digest}")
        for cp, partition in self._reader.partitions.items():
            for each in partition.hashes:
                self._their_hashes[cp].add((each.since, each.next_offset), each.digest)

    def _compare(self) -> list[Difference]:
        found = []
        with self._lock:
            all_ours = [(cp, *pair) for cp, ours in self._ours.items() for pair in ours.pairs()]
        for cp, next_offset, mine in all_ours:
            for digest in self._theirs[cp].at(next_offset):
                why = f"differs from our own replica, which had {mine} there"
                if digest.startswith("damaged "):
                    digest, why = digest.removeprefix("damaged "), "is damaged: its digest is not of its bytes"
                elif digest == mine:
                    continue
                found.append(Difference(cp, next_offset, digest, mine, why))
        return [*found, *self._out_of_place(), *self._compare_hashes()]

    def _compare_hashes(self) -> list[Difference]:
        """Those of the same records that are not the same: the log that others read is not ours (S4)."""
        found = []
        for cp, ours in self._our_hashes.items():
            with self._lock:
                mine = ours.pairs()
            for (since, next_offset), digest in mine:
                found += [
                    Difference.of_hash(LogHash(cp, since, next_offset, theirs), digest)
                    for theirs in self._their_hashes[cp].at((since, next_offset))
                    if theirs != digest
                ]
        return found

    def _out_of_place(self) -> list[Difference]:
        """Those between two of our own places: all replicas take theirs at the same, so no member wrote these (S2)."""
        found = []
        why = "is at a place that is not due for a snapshot: no member wrote it, and none compares it"
        for cp, ours in self._ours.items():
            with self._lock:
                places = set(ours.places())
            theirs = self._theirs[cp]
            for at in theirs.places() if places else ():
                if min(places) < at < max(places) and at not in places:
                    found += [Difference(cp, at, digest, None, why) for digest in theirs.at(at)]
        return found

    # Writing.

    def _write(self, now: float, read: Collection[int]) -> None:
        with self._lock:
            for cp in [cp for cp in self._pending if cp not in read]:
                del self._pending[cp]
            wanted = [(cp, one) for cp, waiting in self._pending.items() for one in waiting if one.at <= now]
        for cp, one in wanted:
            records = self._records(cp, one)
            if records:
                self._append(cp, one.next_offset, records)
            with self._lock:
                self._pending[cp] = [other for other in self._pending[cp] if other is not one]

    def _records(self, cp: int, one: _Pending) -> list[bytes]:
        """What no member has written yet: the snapshot, then the hash of the log before it."""
        records: list[bytes] = []
        digest = digest_of(one.state)
        if digest not in self._theirs[cp].at(one.next_offset):
            try:
                records += encode_state(cp, one.next_offset, one.state, digest)
            except SnapshotError as error:
                text = "partition %d at offset %d: no snapshot can be written: %s"
                log(logging.WARNING, "snapshot_not_written", text, cp, one.next_offset, error, log_partition=cp)
        stored = one.log_hash
        if stored is not None and stored.digest not in self._their_hashes[cp].at((stored.since, stored.next_offset)):
            records.append(encode_hash(stored))
        return records

    def _append(self, cp: int, next_offset: int, records: Sequence[bytes]) -> None:
        failures: list[str] = []
        forbidden: list[Ack] = []

        def answered(ack: Ack) -> None:
            if ack.error is not None:
                failures.append(ack.error)
            if ack.forbidden:
                forbidden.append(ack)

        appender = self._cluster.appender(self._topic, delivery_timeout_ms=int(WRITE_TIMEOUT_S * 1000))
        try:
            for record in records:
                appender.append(cp, record, answered)
            left = appender.flush(WRITE_TIMEOUT_S)
        finally:
            appender.close()
        if failures or left:
            kind, needs = MarshalError, ""
            if forbidden:
                kind, needs = AuthorizationError, f". {grant('WRITE', 'topic', [self._topic])}"
            raise kind(
                f"the snapshot of partition {cp} at offset {next_offset} was not written to {self._topic!r} "
                f"({'; '.join(sorted(set(failures))) or 'no answer in time'}). Nothing is lost: replicas start from an "
                f"older one, or from the log{needs}"
            )
