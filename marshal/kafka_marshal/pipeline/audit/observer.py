"""Replays a segment's records, writes them as rows of the tables (schemas.py) and checks them (invariants.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS, split
from kafka_marshal.pipeline.audit.group_observer import GroupObserver
from kafka_marshal.pipeline.audit.hole_observer import EndedRun, HoleObserver, OpenRun, Sender
from kafka_marshal.pipeline.audit.invariants import Kind, Watched, WatchedShare
from kafka_marshal.pipeline.audit.piece_spans import EndedPiece, PieceSpan, Place
from kafka_marshal.pipeline.audit.schemas import TABLES, Row
from kafka_marshal.pipeline.audit.share_observer import ShareObserver
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Lease,
    ReleaseGroup,
    ReleasingPartition,
    SettlingMessages,
    World,
    codes,
)
from rationalizer.history import BEFORE, End, LeaseKey, Owners, Span
from rationalizer.intervals import Intervals
from rationalizer.wire.records import KINDS

#: Rows that are buffered before they are written.
KEPT_ROWS: Final = 16_384

_BEAT: Final = Heartbeat.TYPE
_BATCH: Final = HeartbeatBatch.TYPE
_LEASE_TYPES: Final = frozenset(number for number, kind in KINDS.items() if kind.names_lease)
#: Of records that name one lease, the field that is an offset of its partition.
_OFFSETS: Final = {
    Heartbeat.TYPE: "last_offset",
    ReleasingPartition.TYPE: "last_offset",
    ClaimingMessages.TYPE: "proposed_last_offset",
}

#: Takes a table's name and its rows.
Write = Callable[[str, list[Row]], None]


def ownership_row(span: Span) -> Row:
    """A row of `ownership`; the writer adds its partition. The epoch is the offset at which it began (C3)."""
    since = None if span.since == BEFORE else span.since
    names = (*span.key, span.client_id, span.instance_id)
    return (*names, span.epoch, span.epoch, since, span.until_offset, span.until, str(span.ended))


@dataclass(slots=True)
class Loose:
    """Spans that reach into other segments, to be combined (stitch.py). Bounded by the number of leases."""

    #: Owned; began before the segment and ended in it.
    ended: list[Span] = field(default_factory=list)
    #: The spans at the segment's end, owned or not.
    now: list[Span] = field(default_factory=list)
    #: Rows of `takeovers` without former holder and duration, as the lease was released before the segment.
    takeovers: list[Row] = field(default_factory=list)
    #: Pieces of coordinated groups that ended, those at the end, and groups that were forgotten.
    pieces_ended: list[EndedPiece] = field(default_factory=list)
    pieces_now: dict[Place, list[PieceSpan]] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    #: Shares that began before the segment and ended in it, and those at the end.
    shares_ended: list[WatchedShare] = field(default_factory=list)
    shares_now: list[WatchedShare] = field(default_factory=list)
    #: Messages that were open before the segment and ended in it, and those at the end.
    holes_ended: list[EndedRun] = field(default_factory=list)
    holes_now: dict[LeaseKey, list[OpenRun]] = field(default_factory=dict)


class Observer:
    """Replays records into a world and produces rows. `write` is called with full buffers, and by `finish`."""

    def __init__(self, world: World, write: Write) -> None:
        self.world = world
        self.loose: Loose = Loose()
        #: Violations by kind.
        self.violations: dict[str, int] = {}
        self._write = write
        self._log_time = world.log_time
        self._offset = world.next_offset
        self._owners = Owners()
        self._owners.begin(world)
        self._watched = {(each.group_id, each.topic, each.partition): Watched.of(each) for each in world.leases()}
        self._pauses = {pause.group_id: (pause.client_id, pause.expires) for pause in world.pauses()}
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES if name != "statistics"}
        self._holes = HoleObserver(self._rows["holes"], write, self._report)
        for lease in world.leases():
            owners = {share.epoch: (share.client_id, share.instance_id) for share in lease.shares or ()}
            self._holes.begin((lease.group_id, lease.topic, lease.partition), lease.progress, owners)
        self._groups = GroupObserver(world, self._rows, self._pauses, self._holes, self._report)
        self._shares = ShareObserver(self._rows["shares"], self._holes, self._pauses, self._violation)
        self._judges: dict[int, Callable[[Watched, Any, str], None]] = {
            _BEAT: self._heartbeat,
            ClaimingPartition.TYPE: self._claim,
            ReleasingPartition.TYPE: self._release,
            ClaimingMessages.TYPE: self._grant,
            CommitRanges.TYPE: self._commit,
            ClaimingShare.TYPE: self._claim_share,
            SettlingMessages.TYPE: self._settle,
        }

    def replay(self, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        """Replay records (offset, timestamp, value). Stops before an Upgrade that the world can't follow (E4)."""
        apply = self.world.apply
        rows, progress, pieces = self._rows["records"], self._rows["progress"], self._rows["assignments"]
        for offset, stamp, value in records:
            outcome = self._outcome = apply(offset, stamp, value)
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
                kind = message.type
                if kind in _LEASE_TYPES:
                    said = getattr(message, _OFFSETS.get(kind, ""), None)
                    names = (
                        message.group_id,
                        message.client_id,
                        message.instance_id,
                        message.topic,
                        message.partition,
                        said,
                    )
                    if code != codes.WRONG_PARTITION:
                        self._lease_record(kind, message, outcome.accepted, code)
                else:
                    names = (message.group_id, message.client_id, message.instance_id, None, None, None)
                    if outcome.of_group:
                        leases = () if self._groups.knows(message.group_id) else self._watched
                        is_claimed = any(key[0] == message.group_id for key in leases)
                        self._groups.record(kind, message, outcome, (offset, self._log_time), is_claimed)
                    else:
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
                    outcome.generation,
                    outcome.member,
                )
            )
            if len(rows) >= KEPT_ROWS or len(progress) >= KEPT_ROWS or len(pieces) >= KEPT_ROWS:
                self._flush()

    def finish(self) -> None:
        """The segment ends here: write the last rows, return what is loose."""
        self._groups.finish()
        for key, watched in list(self._watched.items()):
            lease = self.world.lease(*key)
            if lease is not None and (watched.shares or lease.shares is not None):
                self._shares.compare(watched, lease, self._at, None)
            self._holes.compare(key, None if lease is None else lease.progress, self._at, whole=True)
            self.loose.shares_now += watched.shares.values()
        self.loose.shares_ended += self._shares.ended
        self.loose.holes_ended += self._holes.ended
        self.loose.holes_now |= self._holes.now()
        self.loose.now += self._owners.now.values()
        self.loose.pieces_ended += self._groups.ended
        self.loose.pieces_now |= self._groups.spans.now
        self.loose.forgotten |= self._groups.spans.forgotten
        self._flush()

    @property
    def _at(self) -> tuple[int, int]:
        """The offset and the log time of this record."""
        return self._offset, self._log_time

    def _flush(self) -> None:
        for name, rows in self._rows.items():
            if rows:
                self._write(name, rows)
                rows.clear()

    # -- record by record ------------------------------------------------------------------------------------------

    def _lease_record(self, kind: int, message: Any, accepted: bool, code: str) -> None:
        """A record that names one lease."""
        if kind == SettlingMessages.TYPE:
            self._holes.name(message)
        self._compare(self._judge(kind, message, accepted, code), getattr(message, "epoch", None))

    def _judge(self, kind: int, message: Any, accepted: bool, code: str) -> LeaseKey:
        """Check the outcome against the previous state; returns the lease."""
        key = (message.group_id, message.topic, message.partition)
        if accepted:
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = Watched(key)
                if self._groups.knows(key[0]):
                    self._violation(Kind.TWO_KINDS, watched, "a lease of a coordinated group was granted (G1)")
            if watched.shares and watched.has_share(
                message.instance_id, message.client_id, getattr(message, "epoch", None)
            ):
                self._shares.of_sharer(watched, message, self._outcome, self._at, self.world.lease(*key))
                self._follow(watched, message)
            else:
                self._judges[kind](watched, message, code)
        return key

    def _other_record(self, kind: int, message: Any, accepted: bool, entries: tuple[str, ...] | None) -> None:
        if kind == _BATCH:
            if entries is not None:
                group, beats = message.group_id, message.entries
                for entry, code in zip(beats, entries, strict=True):
                    beat = KINDS[_BEAT].named((1, _BEAT, message.instance_id, message.client_id, group, *entry))
                    self._judge(_BEAT, beat, code in codes.ACCEPTED, code)
                # A lease may be named more than once; the world shows only the final result.
                about = {(group, topic, partition): epoch for topic, partition, epoch, _ in beats}
                for key, epoch in about.items():
                    self._compare(key, epoch)
        elif kind == ReleaseGroup.TYPE and accepted:
            expires = message.msg_expire_time
            if expires > self._log_time:
                self._pauses[message.group_id] = (message.client_id, expires)
            else:
                self._pauses.pop(message.group_id, None)
        elif kind == ForgetGroup.TYPE and accepted:
            self._forget(message.group_id)
            self._groups.forget(message, (self._offset, self._log_time))

    def _heartbeat(self, watched: Watched, message: Any, code: str) -> None:
        instance, client, epoch, done = message.instance_id, message.client_id, message.epoch, message.last_offset
        if epoch is None:
            self._restart(watched, client, instance)
        else:
            if not (watched.epoch == epoch and watched.client == client and watched.instance == instance):
                self._stale(watched, client, instance, epoch)
            watched.last_beat = self._log_time
        if done is not None:
            self._done(watched, client, instance, done, code)

    def _claim(self, watched: Watched, message: Any, code: str) -> None:
        instance, client, interval = message.instance_id, message.client_id, message.heartbeat_interval_ms
        if code == codes.ALREADY_HELD:
            if not watched.is_held_by(client, instance):
                self._violation(Kind.TWO_OWNERS, watched, f"{client}/{instance} was confirmed as the lease's holder")
            return
        if watched.shares:
            self._shares.claim_whole(watched, f"{client}/{instance}", self._at)
        if watched.client is not None and not watched.is_stale(self._log_time):
            age = self._log_time - watched.last_beat
            self._violation(
                Kind.TWO_OWNERS,
                watched,
                f"{client}/{instance} was granted the lease {age} ms after its holder's last beat; "
                f"it is the holder's for {2 * watched.interval} ms (C3)",
            )
        watched.interval = interval
        self._begin(watched, client, instance, End.REPLACED)

    def _restart(self, watched: Watched, client: str, instance: str) -> None:
        """C7: allowed for another instance of the holder's client while the lease is fresh."""
        age = self._log_time - watched.last_beat
        if watched.client != client or watched.instance == instance or age >= watched.interval:
            why = f"{client}/{instance} took the lease over with a heartbeat, {age} ms after the last beat (C7)"
            self._violation(Kind.TWO_OWNERS, watched, why)
        self._begin(watched, client, instance, End.RESTARTED)

    def _release(self, watched: Watched, message: Any, code: str) -> None:
        instance, client, epoch, done = message.instance_id, message.client_id, message.epoch, message.last_offset
        if not (watched.epoch == epoch and watched.client == client and watched.instance == instance):
            self._stale(watched, client, instance, epoch)
        self._note(self._owners.free(watched.key, self._offset, self._log_time))
        watched.client = watched.instance = None
        if done is not None:
            self._done(watched, client, instance, done, code, epoch)

    def _grant(self, watched: Watched, message: Any, code: str) -> None:
        instance, client, epoch = message.instance_id, message.client_id, message.epoch
        proposal = message.proposed_last_offset
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

    def _commit(self, watched: Watched, message: Any, code: str) -> None:
        instance, client, epoch, ranges = message.instance_id, message.client_id, message.epoch, message.ranges
        if not (watched.epoch == epoch and watched.client == client and watched.instance == instance):
            self._stale(watched, client, instance, epoch)
        self._rows_of_done(watched, client, instance, epoch, "range", watched.commit(ranges))

    def _claim_share(self, watched: Watched, message: Any, code: str) -> None:
        """B3: the share's epoch is this offset."""
        client, instance = message.client_id, message.instance_id
        if code != codes.ALREADY_HELD and watched.client is not None and not watched.is_stale(self._log_time):
            age = self._log_time - watched.last_beat
            why = f"{client}/{instance} was granted a share {age} ms after the last beat of the lease's holder (B3)"
            self._violation(Kind.TWO_OWNERS, watched, why)
        if code != codes.ALREADY_HELD and watched.client is not None:
            self._note(self._owners.free(watched.key, self._offset, self._log_time, End.REPLACED))
            watched.client = watched.instance = None
        self._shares.claim(watched, message, code, self._at, self.world.lease(*watched.key))
        self._follow(watched, message, "repositioned")  # to its start

    def _settle(self, watched: Watched, message: Any, code: str) -> None:
        """H3, by the holder, or by an operator."""
        by = Sender(message.client_id, message.instance_id, is_operator=True)
        client, instance, epoch = message.client_id, message.instance_id, message.epoch
        if epoch is not None:
            if not (watched.epoch == epoch and watched.client == client and watched.instance == instance):
                self._stale(watched, client, instance, epoch)
            if not self._shares.is_paused(message, self._log_time):
                watched.last_beat = self._log_time
            by = Sender(client, instance, epoch, makes=True, makes_unkeyed=True)
        self._holes.settle(watched.key, by, message, self._outcome.entries or (), self._at, watched.stable)
        self._follow(watched, message)

    def _follow(self, watched: Watched, message: Any, what: str = "shared") -> None:
        """What shares and holes do to the progress is the world's to say; but it does not go back."""
        lease = self.world.lease(*watched.key)
        if lease is None or lease.progress.stable < watched.stable:
            return
        by = message.client_id, message.instance_id, message.epoch if message.type != ClaimingShare.TYPE else None
        if message.type == SettlingMessages.TYPE and message.take is not None and message.take[2]:
            what = "granted"
        found: dict[str, list[tuple[int, int]]] = {}
        for how, run in self._holes.made_done(watched, lease.progress, what):
            found.setdefault(how, []).append(run)
        for how, runs in found.items():
            self._rows_of_done(watched, *by, how, sorted(runs) if how != "repositioned" else [(None, None)])
        watched.stable, watched.ranges = lease.progress.stable, Intervals.of(lease.progress.ranges)

    def _forget(self, group: str) -> None:
        """C16."""
        for key in [key for key in self._watched if key[0] == group]:
            watched = self._watched.pop(key)
            if watched.client is not None and not watched.is_stale(self._log_time):
                self._violation(Kind.TWO_OWNERS, watched, "the group was forgotten while the lease was held (C16)")
            if watched.shares:
                self._shares.forget(watched, self._at)
            self._note(self._owners.forget(key, self._offset, self._log_time))
        self._holes.forget(group, self._at)
        self._pauses.pop(group, None)

    # -- consequences ------------------------------------------------------------------------------------------------

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
            self._holes.reposition(watched.key, done, self._at)
            self._rows_of_done(watched, client, instance, epoch, "repositioned", [(None, None)])
        elif done > watched.stable:
            self._rows_of_done(watched, client, instance, epoch, "done", watched.through(done))

    def _rows_of_done(
        self, watched: Watched, client: str, instance: str, epoch: int | None, what: str, runs: list[Any]
    ) -> None:
        """Rows of runs, ascending; open messages are left out, and marks (P12) have their own rows."""
        named = [(what, *run) for run in runs]
        if what != "repositioned":
            done = split(runs)
            marks = [*done.marks, *([KAFKA_COUNTS] if done.kafka_counts else [])]
            named = [(what, *run) for run in self._holes.not_open(watched.key, done.ranges)]
            named += [("topic", mark, mark) for mark in sorted(marks)]
        names = (*watched.key, client, instance, epoch, self._offset, self._log_time)
        progress = watched.stable, watched.granted
        self._rows["progress"] += [(*names, *each, *progress) for each in named]

    def _begin(self, watched: Watched, client: str, instance: str, ended: End) -> None:
        """Record a new holder from this record on."""
        if self._offset <= watched.epoch:
            self._violation(
                Kind.STALE_EPOCH,
                watched,
                f"{client}/{instance} was granted the epoch {self._offset}, not above {watched.epoch} before it (C9)",
            )
        before = self._owners.grant(watched.key, client, instance, self._offset, self._offset, self._log_time, ended)
        if before is not None:
            self._takeover(before, client, instance, self._log_time - watched.last_beat)
            self._note(before)
        watched.client, watched.instance, watched.epoch = client, instance, self._offset
        watched.last_beat = self._log_time

    def _takeover(self, before: Span, client: str, instance: str, silent_ms: int) -> None:
        known = before.since != BEFORE
        row: Row = (
            *before.key,
            client,
            instance,
            self._offset,
            self._log_time,
            str(before.ended) if before.held else "handed over",
            before.client_id or None,
            before.instance_id or None,
            silent_ms,
            self._log_time - before.since if known and not before.held else None,
        )
        if known or before.held:
            self._rows["takeovers"].append(row)
        else:
            self.loose.takeovers.append(row)

    def _note(self, ended: Span | None) -> None:
        """A span ended: if the lease was held, that is a row or part of one."""
        if ended is not None and ended.held:
            if ended.since == BEFORE:
                self.loose.ended.append(ended)
            else:
                self._rows["ownership"].append(ownership_row(ended))

    # -- the world compared with the outcomes --------------------------------------------------------------------------

    def _compare(self, key: LeaseKey, about: int | None) -> None:
        """Compare the world after each record that names a lease, accepted or not. about: the epoch that it names."""
        watched = self._watched.get(key)
        lease = self.world.lease(*key)
        if lease is None:
            if watched is not None:
                self._violation(Kind.TWO_OWNERS, watched, "the state does not know the lease any more")
                self._note(self._owners.forget(key, self._offset, self._log_time))
                del self._watched[key]
            return
        if watched is None:
            watched = self._watched[key] = Watched(key)
        progress = lease.progress
        epoch = lease.epoch if lease.was_held else -1
        if epoch != watched.epoch or lease.instance_id != watched.instance or lease.client_id != watched.client:
            self._other_holder(watched, lease)
        if watched.shares or lease.shares is not None:
            self._shares.compare(watched, lease, self._at, about)
        if progress.holes is not None or self._holes.open:
            self._holes.compare(key, progress, self._at)
        if progress.stable != watched.stable or progress.granted != watched.granted:
            self._other_progress(watched, lease)

    def _other_holder(self, watched: Watched, lease: Lease) -> None:
        named = f"{lease.client_id}/{lease.instance_id}, epoch {lease.epoch}" if lease.held else "nobody"
        self._violation(Kind.TWO_OWNERS, watched, f"the state names {named} as the holder; no record made it so")
        at = self._offset, self._log_time
        if lease.client_id is None or lease.instance_id is None:
            self._note(self._owners.free(watched.key, *at, End.REPLACED))
        else:
            names = lease.client_id, lease.instance_id, lease.epoch
            self._note(self._owners.grant(watched.key, *names, *at, End.REPLACED))
        watched.adopt(lease)

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
        epoch = watched.epoch if watched.epoch >= 0 else None
        self._report(kind, watched.key, (watched.client, watched.instance, epoch), detail)

    def _report(
        self,
        kind: Kind,
        about: tuple[str, str | None, int | None],
        owner: tuple[str | None, str | None, int | None],
        detail: str,
    ) -> None:
        self.violations[kind] = self.violations.get(kind, 0) + 1
        self._rows["violations"].append((str(kind), self._offset, self._log_time, *about, *owner, detail))
