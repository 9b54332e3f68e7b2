"""A segment's records, replayed one by one, as rows of the tables (schemas.py), watched over (invariants.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.pipeline.audit.invariants import Kind, LeaseKey, Watched
from kafka_marshal.pipeline.audit.schemas import Row
from rationalizer import Lease, World, codes
from rationalizer.limits import HEAD_FIELDS
from rationalizer.wire.unpacking import Message

__all__ = ["Ended", "Freed", "Holding", "Loose", "Observer"]

#: Rows that are kept before they are written.
KEPT_ROWS: Final = 16_384

_LEASE_TYPES: Final = frozenset({1, 2, 3, 4, 7})
_BATCH: Final = 6

#: Takes the name of a table and rows of it, which the caller forgets.
Write = Callable[[str, list[Row]], None]


class Ended:
    """How a tenure ended (the column `ended`)."""

    RELEASED = "released"
    REPLACED = "replaced"
    RESTARTED = "restarted"
    FORGOTTEN = "forgotten"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Holding:
    """One holder's time with a lease, as far as a segment saw of it; its epoch is the offset at which it began (C3)."""

    key: LeaseKey
    client: str
    instance: str
    epoch: int
    #: None: before the segment.
    from_time: int | None
    to_offset: int | None = None
    to_time: int | None = None
    ended: str = Ended.OPEN

    def row(self) -> Row:
        """As a row of `ownership`, whose partition the writer puts in."""
        return (
            *self.key,
            self.client,
            self.instance,
            self.epoch,
            self.epoch,
            self.from_time,
            self.to_offset,
            self.to_time,
            self.ended,
        )


@dataclass(frozen=True, slots=True)
class Freed:
    """A lease was let go: at which log time, and by whom."""

    time: int
    client: str | None
    instance: str | None


@dataclass(slots=True)
class Loose:
    """What one segment can't know alone; its neighbours make it whole (stitch.py). Bounded by the number of leases."""

    #: Ended in the segment, begun before it.
    ended: list[Holding] = field(default_factory=list)
    #: Held at the segment's end.
    open: list[Holding] = field(default_factory=list)
    #: Free at the segment's end: since when (log time) and by whom; None where that was before the segment.
    free: dict[LeaseKey, Freed | None] = field(default_factory=dict)
    #: Rows of `takeovers` that don't say from whom and after how long, the lease having been freed before the segment.
    takeovers: list[Row] = field(default_factory=list)


class Observer:
    """Replays records into a world and hands out rows. `write` is called with full buffers, and by `finish`."""

    def __init__(self, world: World, write: Write) -> None:
        self.world = world
        self.loose = Loose()
        #: Violations by kind.
        self.violations: dict[str, int] = {}
        self._write = write
        self._log_time = world.log_time
        self._offset = world.next_offset
        self._watched = {(each.group_id, each.topic, each.partition): Watched.of(each) for each in world.leases()}
        self._pauses = {pause.group_id: (pause.client_id, pause.expires) for pause in world.pauses()}
        self._rows: dict[str, list[Row]] = {
            name: [] for name in ("records", "ownership", "progress", "violations", "takeovers")
        }
        self._records = self._rows["records"]
        self._progress = self._rows["progress"]
        self._judges: dict[int, Callable[[Watched, Message, str], None]] = {
            1: self._heartbeat,
            2: self._claim,
            3: self._release,
            4: self._grant,
            7: self._commit,
        }

    def replay(self, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        """Replay records (offset, timestamp, value). Ends early before an Upgrade that the world can't follow (E4)."""
        apply = self.world.apply
        rows = self._records
        for offset, stamp, value in records:
            outcome = apply(offset, stamp, value)
            code = outcome.code
            if code == codes.UPGRADE_REQUIRED:
                return
            self._offset = offset
            if stamp > self._log_time:
                self._log_time = stamp
            message = outcome.message
            entries = outcome.entries
            if message is None:
                names: Row = (None, None, None, None, None, None)
            else:
                kind = message[1]
                if kind in _LEASE_TYPES:
                    said = message[8] if kind in (1, 3, 4) else None
                    names = (message[4], message[3], message[2], message[5], message[6], said)
                    if code != codes.WRONG_PARTITION:
                        self._lease_record(kind, message, outcome.accepted, code)
                else:
                    names = (message[4], message[3], message[2], None, None, None)
                    self._other_record(kind, message, outcome.accepted, entries)
            rows.append(
                (
                    offset,
                    stamp,
                    outcome.log_time,
                    outcome.type,
                    outcome.accepted,
                    code,
                    outcome.epoch,
                    *names,
                    entries,
                )
            )
            if len(rows) >= KEPT_ROWS or len(self._progress) >= KEPT_ROWS:
                self._flush()

    def finish(self) -> None:
        """The segment ends here: the last rows, and what is loose."""
        for watched in self._watched.values():
            if watched.client is None:
                self.loose.free[watched.key] = _freed(watched)
            else:
                self.loose.open.append(_holding(watched))
        self._flush()

    def _flush(self) -> None:
        for name, rows in self._rows.items():
            if rows:
                self._write(name, rows)
                rows.clear()

    # -- record by record ------------------------------------------------------------------------------------------

    def _lease_record(self, kind: int, message: Message, accepted: bool, code: str) -> None:
        """A record that names one lease."""
        self._compare(self._judge(kind, message, accepted, code))

    def _judge(self, kind: int, message: Message, accepted: bool, code: str) -> LeaseKey:
        """Hold the outcome against what went before; the lease that it is about."""
        key = (message[4], message[5], message[6])
        if accepted:
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = Watched(key)
            self._judges[kind](watched, message, code)
        return key

    def _other_record(self, kind: int, message: Message, accepted: bool, entries: tuple[str, ...] | None) -> None:
        if kind == _BATCH:
            if entries is not None:
                _, _, instance, client, group, beats = message
                for (topic, partition, epoch, done), code in zip(beats, entries, strict=True):
                    beat = (1, 1, instance, client, group, topic, partition, epoch, done)
                    self._judge(1, beat, code in codes.ACCEPTED, code)
                # A lease may be named more than once; the world shows only what became of it in the end.
                for key in dict.fromkeys((group, topic, partition) for topic, partition, _, _ in beats):
                    self._compare(key)
        elif kind == 5 and accepted:
            expires = message[HEAD_FIELDS]
            if expires > self._log_time:
                self._pauses[message[4]] = (message[3], expires)
            else:
                self._pauses.pop(message[4], None)
        elif kind == 8 and accepted:
            self._forget(message[4])

    def _heartbeat(self, watched: Watched, message: Message, code: str) -> None:
        _, _, instance, client, _, _, _, epoch, done = message
        if epoch is None:
            self._restart(watched, client, instance)
        else:
            if not (watched.epoch == epoch and watched.client == client and watched.instance == instance):
                self._stale(watched, client, instance, epoch)
            watched.last_beat = self._log_time
        if done is not None:
            self._done(watched, client, instance, done, code)

    def _claim(self, watched: Watched, message: Message, code: str) -> None:
        _, _, instance, client, _, _, _, interval = message
        if code == codes.ALREADY_HELD:
            if not watched.is_held_by(client, instance):
                self._violation(Kind.TWO_OWNERS, watched, f"{client}/{instance} was told that it holds the lease")
            return
        if watched.client is not None and not watched.is_stale(self._log_time):
            age = self._log_time - watched.last_beat
            self._violation(
                Kind.TWO_OWNERS,
                watched,
                f"{client}/{instance} was granted the lease {age} ms after its holder's last beat; "
                f"it is the holder's for {2 * watched.interval} ms (C3)",
            )
        watched.interval = interval
        self._begin(watched, client, instance, Ended.REPLACED)

    def _restart(self, watched: Watched, client: str, instance: str) -> None:
        """C7: allowed for another instance of the holder's client, while it is fresh."""
        age = self._log_time - watched.last_beat
        if watched.client != client or watched.instance == instance or age >= watched.interval:
            why = f"{client}/{instance} took the lease over with a heartbeat, {age} ms after the last beat (C7)"
            self._violation(Kind.TWO_OWNERS, watched, why)
        self._begin(watched, client, instance, Ended.RESTARTED)

    def _release(self, watched: Watched, message: Message, code: str) -> None:
        _, _, instance, client, _, _, _, epoch, done = message
        if not (watched.epoch == epoch and watched.client == client and watched.instance == instance):
            self._stale(watched, client, instance, epoch)
        self._end(watched, Ended.RELEASED)
        watched.former = (watched.client, watched.instance)
        watched.client = watched.instance = None
        watched.freed_at = self._log_time
        if done is not None:
            self._done(watched, client, instance, done, code, epoch)

    def _grant(self, watched: Watched, message: Message, code: str) -> None:
        _, _, instance, client, _, _, _, epoch, proposal = message
        if not (watched.epoch == epoch and watched.client == client and watched.instance == instance):
            self._stale(watched, client, instance, epoch)
        if proposal <= watched.granted or proposal <= watched.stable:
            self._violation(
                Kind.OVERLAPPING_GRANTS,
                watched,
                f"{client}/{instance} was granted offsets up to {proposal}; up to {watched.granted} they had been "
                f"granted, and up to {watched.stable} they were done (C12)",
            )
        watched.granted = max(watched.granted, proposal)
        self._rows_of_done(watched, client, instance, epoch, "granted", watched.through(proposal))

    def _commit(self, watched: Watched, message: Message, code: str) -> None:
        _, _, instance, client, _, _, _, epoch, ranges = message
        if not (watched.epoch == epoch and watched.client == client and watched.instance == instance):
            self._stale(watched, client, instance, epoch)
        done = split(watched.commit(ranges))
        self._rows_of_done(watched, client, instance, epoch, "range", list(done.ranges))
        self._rows_of_done(watched, client, instance, epoch, "topic", [(mark, mark) for mark in sorted(done.marks)])

    def _forget(self, group: str) -> None:
        """C16."""
        for key in [key for key in self._watched if key[0] == group]:
            watched = self._watched.pop(key)
            if watched.client is not None and not watched.is_stale(self._log_time):
                self._violation(Kind.TWO_OWNERS, watched, "the group was forgotten while the lease was held (C16)")
            self._end(watched, Ended.FORGOTTEN)
        self._pauses.pop(group, None)

    # -- what follows ------------------------------------------------------------------------------------------------

    def _done(
        self, watched: Watched, client: str, instance: str, done: int, code: str, epoch: int | None = None
    ) -> None:
        """A last_offset that took effect (C5, C8, C11)."""
        epoch = watched.epoch if epoch is None else epoch
        if code == codes.REPOSITIONED:
            pause = self._pauses.get(watched.key[0])
            if done < watched.stable and (pause is None or pause[0] != client or self._log_time >= pause[1]):
                self._violation(
                    Kind.PROGRESS_BACK,
                    watched,
                    f"{client}/{instance} set the position from {watched.stable} back to {done} without having the "
                    "group paused (C11)",
                )
            watched.reposition(done)
            self._rows_of_done(watched, client, instance, epoch, "repositioned", [(None, None)])
        elif done > watched.stable:
            self._rows_of_done(watched, client, instance, epoch, "done", watched.through(done))

    def _rows_of_done(
        self, watched: Watched, client: str, instance: str, epoch: int, what: str, runs: list[Any]
    ) -> None:
        for first, last in runs:
            self._progress.append(
                (
                    *watched.key,
                    client,
                    instance,
                    epoch,
                    self._offset,
                    self._log_time,
                    what,
                    first,
                    last,
                    watched.stable,
                    watched.granted,
                )
            )

    def _begin(self, watched: Watched, client: str, instance: str, ended: str) -> None:
        """A new holder from this record on."""
        if self._offset <= watched.epoch:
            self._violation(
                Kind.STALE_EPOCH,
                watched,
                f"{client}/{instance} was granted the epoch {self._offset}, not above {watched.epoch} before it (C9)",
            )
        if watched.epoch >= 0:
            how = "handed over" if watched.client is None else ended
            self._takeover(watched, client, instance, how)
        if watched.client is not None:
            self._end(watched, ended)
        watched.client, watched.instance, watched.epoch = client, instance, self._offset
        watched.last_beat = watched.from_time = self._log_time
        watched.freed_at = None

    def _takeover(self, watched: Watched, client: str, instance: str, how: str) -> None:
        free = watched.client is None
        unowned = None if watched.freed_at is None else self._log_time - watched.freed_at
        row: Row = (
            *watched.key,
            client,
            instance,
            self._offset,
            self._log_time,
            how,
            *(watched.former if free else (watched.client, watched.instance)),
            self._log_time - watched.last_beat,
            unowned if free else None,
        )
        if free and unowned is None:
            self.loose.takeovers.append(row)
        else:
            self._rows["takeovers"].append(row)

    def _end(self, watched: Watched, ended: str) -> None:
        if watched.client is None:
            return
        holding = _holding(watched, self._offset, self._log_time, ended)
        if holding.from_time is None:
            self.loose.ended.append(holding)
        else:
            self._rows["ownership"].append(holding.row())

    # -- the world, held against the outcomes --------------------------------------------------------------------------

    def _compare(self, key: LeaseKey) -> None:
        """After each record that names a lease, accepted or not."""
        watched = self._watched.get(key)
        lease = self.world.lease(*key)
        if lease is None:
            if watched is not None:
                self._violation(Kind.TWO_OWNERS, watched, "the state does not know the lease any more")
                self._end(watched, Ended.FORGOTTEN)
                del self._watched[key]
            return
        if watched is None:
            watched = self._watched[key] = Watched(key)
        progress = lease.progress
        if lease.epoch != watched.epoch or lease.instance_id != watched.instance or lease.client_id != watched.client:
            self._other_holder(watched, lease)
        if progress.stable != watched.stable or progress.granted != watched.granted:
            self._other_progress(watched, lease)

    def _other_holder(self, watched: Watched, lease: Lease) -> None:
        named = f"{lease.client_id}/{lease.instance_id}, epoch {lease.epoch}" if lease.held else "nobody"
        self._violation(Kind.TWO_OWNERS, watched, f"the state names {named} as the holder; no record made it so")
        self._end(watched, Ended.REPLACED)
        watched.former = (watched.client, watched.instance)
        watched.adopt(lease)
        watched.from_time = self._log_time if lease.held else None
        watched.freed_at = None if lease.held else self._log_time

    def _other_progress(self, watched: Watched, lease: Lease) -> None:
        progress = lease.progress
        if progress.stable < watched.stable:
            why = f"stable is {progress.stable}, and was {watched.stable}"
            self._violation(Kind.PROGRESS_BACK, watched, why)
        if progress.granted < watched.granted:
            why = f"offsets up to {watched.granted} were granted, of which the state knows up to {progress.granted}"
            self._violation(Kind.OVERLAPPING_GRANTS, watched, f"{why}: they can be granted again")
        watched.stable, watched.granted = progress.stable, progress.granted
        watched.ranges.clear()
        watched.commit(tuple(progress.ranges)) if progress.ranges else None

    def _stale(self, watched: Watched, client: str, instance: str, epoch: int) -> None:
        what = f"a record of {client}/{instance} with epoch {epoch} took effect (C5)"
        self._violation(Kind.STALE_EPOCH, watched, what)

    def _violation(self, kind: Kind, watched: Watched, detail: str) -> None:
        self.violations[kind] = self.violations.get(kind, 0) + 1
        self._rows["violations"].append(
            (
                str(kind),
                self._offset,
                self._log_time,
                *watched.key,
                watched.client,
                watched.instance,
                watched.epoch if watched.epoch >= 0 else None,
                detail,
            )
        )


def _freed(watched: Watched) -> Freed | None:
    return None if watched.freed_at is None else Freed(watched.freed_at, *watched.former)


def _holding(
    watched: Watched, to_offset: int | None = None, to_time: int | None = None, ended: str = Ended.OPEN
) -> Holding:
    assert watched.client is not None
    assert watched.instance is not None
    return Holding(
        watched.key, watched.client, watched.instance, watched.epoch, watched.from_time, to_offset, to_time, ended
    )
