"""The short cut through most of a log: heartbeats, single or in batches, that move nothing but numbers.

It leaves out what the lease they meet has proved already. Where a lease is found by the three names, they are well
formed and routed here; where its holder is the sender, the sender's ids are well formed; and fields that are all of
known types hold nothing that E2 forbids. The first three bytes say: an array of nine (six), version 1, type 1 (6).
Whatever is not that simple goes the long way, from its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgpack import unpackb
from msgpack.exceptions import UnpackException

from rationalizer import codes
from rationalizer.leases.lease import Lease
from rationalizer.limits import MAX_ID_BYTES, MAX_OFFSET, MAX_TIME_MS, MAX_TOPIC_BYTES
from rationalizer.pause import Pause
from rationalizer.plane import Beaten, Entries, Entry, Heard, Log, Pauses, SeeBeats

#: How a Heartbeat, and a HeartbeatBatch, of version 1 begin in the shortest form.
_HEARTBEAT: Final = b"\x99\x01\x01"
_BATCH: Final = b"\x96\x01\x06"

#: No well-formed Heartbeat in the shortest form is longer; what is longer could make unpacking expensive.
_MAX_HEARTBEAT_BYTES: Final = 3 + 3 * (2 + MAX_ID_BYTES) + (2 + MAX_TOPIC_BYTES) + 5 + 9 + 9

#: The same for batches: what they hold at most, within these bytes, takes 3 MB while it is unpacked.
_MAX_BATCH_BYTES: Final = 4_096
_MAX_BATCH_ENTRIES: Final = 256

_NOT_SIMPLE = (ValueError, KeyError, TypeError, UnpackException)  # TypeError: a list is no key


class BeatsFastPath:
    """The short cut of one CP, over its leases by (group_id, topic, partition)."""

    __slots__ = ("_leases",)

    def __init__(self, leases: dict[tuple[str, str, int], Lease]) -> None:
        self._leases = leases

    def run(
        self, records: Entries, log: Log, pauses: Pauses, heard: Heard | None = None, see: SeeBeats | None = None
    ) -> Entry | None:
        """Apply records for as long as they are simple; the first that is not, None: there is none left.

        heard: gets the last record of each sender. see: is called after each record.
        """
        leases, unpack, heartbeat, max_offset, max_time = self._leases, unpackb, _HEARTBEAT, MAX_OFFSET, MAX_TIME_MS
        next_offset, log_time = log.next_offset, log.log_time
        beats = 0
        watched = heard is not None or see is not None
        try:
            for record in records:
                offset, timestamp_ms, value = record
                if (
                    type(value) is not bytes
                    or type(offset) is not int
                    or type(timestamp_ms) is not int
                    or not next_offset <= offset <= max_offset
                    or timestamp_ms > max_time
                ):
                    return record
                start = value[:3]
                if start == heartbeat and len(value) <= _MAX_HEARTBEAT_BYTES:
                    try:
                        fields: list[Any] = unpack(value)
                        _, _, instance_id, client_id, group_id, topic, partition, epoch, done = fields
                        lease: Lease = leases[group_id, topic, partition]
                    except _NOT_SIMPLE:
                        return record
                    progress = lease.progress
                    if (
                        type(partition) is not int  # True == 1 == 1.0, also as keys
                        or type(epoch) is not int
                        or type(done) is not int
                        or client_id is None  # as the holder of a free lease is
                        or lease.epoch != epoch
                        or lease.instance_id != instance_id
                        or lease.client_id != client_id
                        or (pauses and group_id in pauses)
                        or not progress.stable <= done <= max_offset
                        or progress.pieces is not None
                        or progress.intervals.firsts
                    ):
                        return record
                    progress.stable = done
                    if timestamp_ms > log_time:
                        log.log_time = log_time = timestamp_ms
                    lease.last_beat = log_time
                elif start == _BATCH and len(value) <= _MAX_BATCH_BYTES:
                    beaten = self._simple_batch(value, pauses)
                    if not beaten:
                        return record
                    if timestamp_ms > log_time:
                        log.log_time = log_time = timestamp_ms
                    for lease, moved in beaten:
                        lease.last_beat = log_time
                        if moved is not None and moved > lease.progress.stable:
                            lease.progress.stable = moved
                else:
                    return record
                log.next_offset = next_offset = offset + 1
                beats += 1
                if watched:
                    if heard is not None:
                        heard[lease.group_id, lease.client_id or "", lease.instance_id or ""] = log_time, offset
                    if see is not None:
                        see(offset, log_time, beaten if start == _BATCH else [(lease, done)])
            return None
        finally:
            if beats:
                log.count(codes.OK, True, beats)

    def _simple_batch(self, value: bytes, pauses: Mapping[str, Pause]) -> Beaten:
        """Each entry's lease and its last_offset, if all entries are simple; nothing is changed."""
        leases, max_offset = self._leases, MAX_OFFSET
        found: Beaten = []
        try:
            _, _, instance_id, client_id, group_id, entries = unpackb(value, max_array_len=_MAX_BATCH_ENTRIES)
            if client_id is None or (pauses and group_id in pauses) or type(entries) is not list:
                return []
            for topic, partition, epoch, done in entries:
                lease = leases[group_id, topic, partition]
                progress = lease.progress
                if (
                    type(partition) is not int
                    or type(epoch) is not int
                    or lease.epoch != epoch
                    or lease.instance_id != instance_id
                    or lease.client_id != client_id
                    or progress.pieces is not None
                    or progress.intervals.firsts
                    or (done is not None and (type(done) is not int or not -1 <= done <= max_offset))
                ):
                    return []
                found.append((lease, done))
        except _NOT_SIMPLE:
            return []
        return found
