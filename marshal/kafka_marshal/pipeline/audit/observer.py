"""Replays a segment's records, writes them as rows of the tables (files.py) and checks them (invariants.py).

Shares of leases are followed by the outcomes alone, too (B1-B4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS, split
from kafka_marshal.pipeline.audit.files import Row
from kafka_marshal.pipeline.audit.group_observer import GroupObserver
from kafka_marshal.pipeline.audit.hole_observer import EndedRun, HoleObserver, OpenRun, SettlingSender
from kafka_marshal.pipeline.audit.invariants import KEPT_ROWS, Breach, Notes, WatchedLease, WatchedShare, Write
from kafka_marshal.pipeline.audit.watched_group import EndedPiece, PieceSpan, Place
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Lease,
    Outcome,
    ReleaseGroup,
    ReleasingPartition,
    SettlingMessages,
    World,
    codes,
)
from rationalizer.history import BEFORE, End, LeaseKey, Owners, Span
from rationalizer.holes import NO_KEY
from rationalizer.intervals import Intervals
from rationalizer.levels import REDO_LEVEL
from rationalizer.wire.records import KINDS

#: A share that was silent for more than 2·HI ended by another sharer's take, or for room (B3, B4).
EXPIRED: Final = "expired"


def share_row(share: WatchedShare) -> Row:
    """A row of `shares`; the writer adds its partition. The epoch is the offset at which it began (B3)."""
    keys = (None, None) if share.by_batches else (share.lo, share.hi)
    since = None if share.since == BEFORE else share.since
    silent = None if share.until is None else share.until - share.last_beat
    names = (*share.key, share.client, share.instance, share.epoch, *keys)
    return (*names, share.epoch, since, share.until_offset, share.until, share.ended, silent)


class ShareObserver:
    """The shares of all leases of one CP."""

    def __init__(self, notes: Notes, holes: HoleObserver) -> None:
        self._notes = notes
        self._holes = holes
        #: Shares that ended, and began before this replay.
        self.ended: list[WatchedShare] = []

    def claim(self, watched: WatchedLease, message: Any, code: str) -> None:
        """An accepted ClaimingShare (B3)."""
        client, offset, log_time = message.client_id, *self._notes.at
        lo, hi = (NO_KEY, NO_KEY) if message.lo is None else (message.lo, message.hi)
        ids = watched.key, offset, client, message.instance_id
        asked = WatchedShare(*ids, message.heartbeat_interval_ms, log_time, lo, hi, log_time)
        met = [share for share in watched.shares.values() if share.overlaps(asked)]
        alive = next((share for share in met if not share.is_stale(log_time)), None)
        if code == codes.ALREADY_HELD:
            mine = alive is not None and alive.is_held_by(client, asked.instance) and (alive.lo, alive.hi) == (lo, hi)
            if not mine:
                self._two(watched, f"{client}/{asked.instance} was confirmed as a sharer, which it is not (B3)")
            return
        if alive is not None:
            age = log_time - alive.last_beat
            self._two(watched, f"{asked}, was granted {age} ms after the last beat of {alive}, which it overlaps (B3)")
        was_silent = watched.shares_are_silent(log_time)
        self._end(watched, met, End.REPLACED)
        self._make_room(watched)
        if was_silent:
            watched.revive(log_time, client)
        watched.shares[offset] = asked

    def of_sharer(self, watched: WatchedLease, message: Any, outcome: Outcome) -> None:
        """An accepted record with the epoch of a share (B2), or an entry of a batch."""
        kind, log_time = message.type, self._notes.log_time
        share = watched.shares[message.epoch]
        if kind == ReleasingPartition.TYPE:
            self._end(watched, [share], End.RELEASED)
        elif kind == ClaimingMessages.TYPE:
            self._notes.violation(Breach.OVERLAPPING_GRANTS, watched, f"messages were granted for good to {share} (B2)")
        elif kind == Heartbeat.TYPE or (kind == SettlingMessages.TYPE and not self.is_paused(message)):
            if watched.shares_are_silent(log_time):
                watched.revive(log_time)
            share.last_beat = log_time
        if kind == SettlingMessages.TYPE:
            self._settle(watched, share, message, outcome)

    def _settle(self, watched: WatchedLease, share: WatchedShare, message: Any, outcome: Outcome) -> None:
        """The entries, then the take (H3)."""
        names, stable = (share.client, share.instance, share.epoch), watched.stable
        if share.by_batches:
            by = SettlingSender(*names, share.epoch, ())
        else:
            by = SettlingSender(*names, keys=((share.lo, share.hi),), makes=True)
        self._holes.settle(watched.key, by, message, outcome.entries or (), stable)
        if message.take is not None:
            self._make_room(watched)
        if outcome.taken is not None:
            self._holes.take(watched.key, by, outcome.taken, message.take[2], stable)

    def claim_whole(self, watched: WatchedLease, by: str) -> None:
        """A ClaimingPartition was granted, which overlaps all shares (B4)."""
        self._end_all(watched, f"{by} was granted the whole lease", End.REPLACED)

    def forget(self, watched: WatchedLease) -> None:
        """The group was forgotten (C16)."""
        self._end_all(watched, "the group was forgotten", End.FORGOTTEN)

    def compare(self, watched: WatchedLease, lease: Lease, epoch: int | None) -> None:
        """Compare the state's shares with what the outcomes imply.

        epoch: of the only one that the record is about; there may be a thousand. None: all are compared.
        """
        shares, state = watched.shares, lease.shares
        mine = None if epoch is None else shares.get(epoch)
        if mine is not None and state is not None and len(state) == len(shares):
            theirs = state.of(mine.instance, mine.client, mine.epoch)
            if mine.is_so_in(theirs):
                return
        there = {share.epoch: share for share in state or ()}
        differing = [each for each, share in shares.items() if not share.is_so_in(there.get(each))]
        more = [each for each in there if each not in shares]
        if not differing and not more:
            return
        if differing:
            share = shares[differing[0]]
            found = there.get(share.epoch)
            named = "no more" if found is None else f"as {found!r}"
            self._two(watched, f"the state knows {share}, last beat {share.last_beat}, {named}; no record made it so")
        else:
            self._two(watched, f"the state has {there[more[0]]!r}; no record made it so")
        self._end(watched, [share for each, share in shares.items() if each not in there], End.REPLACED)
        since = {each: share.since for each, share in shares.items()}
        for each, now in there.items():
            shares[each] = WatchedShare.of(watched.key, now, since.get(each, self._notes.log_time))

    def is_paused(self, message: Any) -> bool:
        """Whether another client has the group paused: then a settle is no beat (H3)."""
        return self._notes.pauser(message.group_id) not in (None, message.client_id)

    def _make_room(self, watched: WatchedLease) -> None:
        """End stale shares that the state has no more: whether a take repeats one, or room is needed, is its to say."""
        lease, log_time = self._notes.world.lease(*watched.key), self._notes.log_time
        there = {share.epoch for share in (lease and lease.shares) or ()}
        gone = [each for each in watched.shares.values() if each.is_stale(log_time) and each.epoch not in there]
        self._end(watched, gone, EXPIRED)

    def _end_all(self, watched: WatchedLease, what: str, ended: str) -> None:
        log_time = self._notes.log_time
        alive = next((share for share in watched.shares.values() if not share.is_stale(log_time)), None)
        if alive is not None:
            self._two(watched, f"{what} {log_time - alive.last_beat} ms after the last beat of {alive} (B4, C16)")
        self._end(watched, list(watched.shares.values()), ended)

    def _end(self, watched: WatchedLease, shares: Iterable[WatchedShare], ended: str) -> None:
        for share in shares:
            del watched.shares[share.epoch]
            self._holes.disown(watched.key, share.epoch)
            share.until_offset, share.until, share.ended = *self._notes.at, str(ended)
            if share.since == BEFORE:
                self.ended.append(share)
            else:
                self._notes.rows["shares"].append(share_row(share))

    def _two(self, watched: WatchedLease, detail: str) -> None:
        self._notes.violation(Breach.TWO_OWNERS_OF_A_KEY, watched, detail)


_BEAT: Final = Heartbeat.TYPE
_BATCH: Final = HeartbeatBatch.TYPE
_LEASE_TYPES: Final = frozenset(number for number, kind in KINDS.items() if kind.names_lease)
#: Of records that name one lease, the field that is an offset of its partition.
_OFFSETS: Final = {
    Heartbeat.TYPE: "last_offset",
    ReleasingPartition.TYPE: "last_offset",
    ClaimingMessages.TYPE: "proposed_last_offset",
}


def ownership_row(span: Span) -> Row:
    """A row of `ownership`; the writer adds its partition. The epoch is the offset at which it began (C3)."""
    since = None if span.since == BEFORE else span.since
    names = (*span.key, span.client_id, span.instance_id)
    return (*names, span.epoch, span.epoch, since, span.until_offset, span.until, str(span.ended))


@dataclass(slots=True)
class Loose:
    """Spans that reach into other segments, to be combined (`stitch` in audit.py). Bounded by the number of leases."""

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
        self._notes = Notes(world, write)
        self._owners = Owners()
        self._owners.begin(world)
        self._watched = {(each.group_id, each.topic, each.partition): WatchedLease.of(each) for each in world.leases()}
        self._holes = HoleObserver(self._notes)
        for lease in world.leases():
            owners = {share.epoch: (share.client_id, share.instance_id) for share in lease.shares or ()}
            self._holes.begin((lease.group_id, lease.topic, lease.partition), lease.progress, owners)
        self._groups = GroupObserver(self._notes, self._holes)
        self._shares = ShareObserver(self._notes, self._holes)
        self._judges: dict[int, Callable[[WatchedLease, Any, str], None]] = {
            _BEAT: self._heartbeat,
            ClaimingPartition.TYPE: self._claim,
            ReleasingPartition.TYPE: self._release,
            ClaimingMessages.TYPE: self._grant,
            CommitRanges.TYPE: self._commit,
            ClaimingShare.TYPE: self._claim_share,
            SettlingMessages.TYPE: self._settle,
        }

    @property
    def violations(self) -> dict[str, int]:
        """How many there are, by kind."""
        return self._notes.violations

    def replay(self, records: Iterable[tuple[int, int, bytes | None]]) -> None:
        """Replay records (offset, timestamp, value). Stops before an Upgrade that the world can't follow (E4)."""
        apply, notes = self.world.apply, self._notes
        rows, progress, pieces = (notes.rows[name] for name in ("records", "progress", "assignments"))
        for offset, stamp, value in records:
            outcome = self._outcome = apply(offset, stamp, value)
            code = outcome.code
            if code == codes.UPGRADE_REQUIRED:
                return
            notes.offset = offset
            if stamp > notes.log_time:
                notes.log_time = stamp
            message = outcome.message
            entries = outcome.entries
            if message is None:
                names: Row = (None, None, None, None, None, None)
            else:
                kind = message.type
                if kind in _LEASE_TYPES:
                    said = getattr(message, _OFFSETS.get(kind, ""), None)
                    sender = message.group_id, message.client_id, message.instance_id
                    names = (*sender, message.topic, message.partition, said)
                    if code != codes.WRONG_PARTITION:
                        if kind == SettlingMessages.TYPE:
                            self._holes.name(message)
                        key = self._judge(kind, message, outcome.accepted, code)
                        self._compare(key, getattr(message, "epoch", None))
                else:
                    names = (message.group_id, message.client_id, message.instance_id, None, None, None)
                    if outcome.of_group:
                        leases = () if self._groups.knows(message.group_id) else self._watched
                        is_claimed = any(key[0] == message.group_id for key in leases)
                        self._groups.record(kind, message, outcome, is_claimed)
                    else:
                        self._other_record(kind, message, outcome.accepted, entries)
            what = outcome.log_time, outcome.type, outcome.accepted, code, outcome.epoch
            rows.append((offset, stamp, *what, *names, entries, outcome.generation, outcome.member))
            if len(rows) >= KEPT_ROWS or len(progress) >= KEPT_ROWS or len(pieces) >= KEPT_ROWS:
                notes.flush()

    def finish(self) -> None:
        """The segment ends here: write the last rows, return what is loose."""
        self._groups.finish()
        for key, watched in list(self._watched.items()):
            lease = self.world.lease(*key)
            if lease is not None and (watched.shares or lease.shares is not None):
                self._shares.compare(watched, lease, None)
            self._holes.compare(key, None if lease is None else lease.progress, whole=True)
            self.loose.shares_now += watched.shares.values()
        self.loose.shares_ended += self._shares.ended
        self.loose.holes_ended += self._holes.ended
        self.loose.holes_now |= self._holes.now()
        self.loose.now += self._owners.now.values()
        self.loose.pieces_ended += self._groups.ended
        self.loose.pieces_now |= self._groups.spans.now
        self.loose.forgotten |= self._groups.spans.forgotten
        self._notes.flush()

    # -- record by record ------------------------------------------------------------------------------------------

    def _judge(self, kind: int, message: Any, accepted: bool, code: str) -> LeaseKey:
        """Check the outcome against the previous state; returns the lease."""
        key = (message.group_id, message.topic, message.partition)
        if accepted:
            watched = self._watched.get(key)
            if watched is None:
                watched = self._watched[key] = WatchedLease(key)
                if self._groups.knows(key[0]):
                    self._notes.violation(Breach.TWO_KINDS, watched, "a lease of a coordinated group was granted (G1)")
            if watched.shares and watched.has_share(
                message.instance_id, message.client_id, getattr(message, "epoch", None)
            ):
                self._shares.of_sharer(watched, message, self._outcome)
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
            if expires > self._notes.log_time:
                self._notes.pauses[message.group_id] = (message.client_id, expires)
            else:
                self._notes.pauses.pop(message.group_id, None)
        elif kind == ForgetGroup.TYPE and accepted:
            self._forget(message.group_id)
            self._groups.forget(message.group_id)

    def _sender(self, watched: WatchedLease, message: Any) -> tuple[str, str, int]:
        """(client, instance, epoch) of a record, which must be those of the holder."""
        by = message.client_id, message.instance_id, message.epoch
        if by != (watched.client, watched.instance, watched.epoch):
            what = f"a record of {by[0]}/{by[1]} with epoch {by[2]} took effect (C5)"
            self._notes.violation(Breach.STALE_EPOCH, watched, what)
        return by

    def _heartbeat(self, watched: WatchedLease, message: Any, code: str) -> None:
        if message.epoch is None:
            self._restart(watched, message.client_id, message.instance_id)
        else:
            self._sender(watched, message)
            watched.last_beat = self._notes.log_time
        if message.last_offset is not None:
            self._done(watched, (message.client_id, message.instance_id, watched.epoch), message.last_offset, code)

    def _claim(self, watched: WatchedLease, message: Any, code: str) -> None:
        instance, client, interval = message.instance_id, message.client_id, message.heartbeat_interval_ms
        if code == codes.ALREADY_HELD:
            if not watched.is_held_by(client, instance):
                why = f"{client}/{instance} was confirmed as the lease's holder"
                self._notes.violation(Breach.TWO_OWNERS, watched, why)
            return
        if watched.shares:
            self._shares.claim_whole(watched, f"{client}/{instance}")
        log_time = self._notes.log_time
        if watched.client is not None and not watched.is_stale(log_time):
            age = log_time - watched.last_beat
            self._notes.violation(
                Breach.TWO_OWNERS,
                watched,
                f"{client}/{instance} was granted the lease {age} ms after its holder's last beat; "
                f"it is the holder's for {2 * watched.interval} ms (C3)",
            )
        watched.interval = interval
        self._begin(watched, client, instance, End.REPLACED)

    def _restart(self, watched: WatchedLease, client: str, instance: str) -> None:
        """C7: allowed for another instance of the holder's client while the lease is fresh."""
        age = self._notes.log_time - watched.last_beat
        if watched.client != client or watched.instance == instance or age >= watched.interval:
            why = f"{client}/{instance} took the lease over with a heartbeat, {age} ms after the last beat (C7)"
            self._notes.violation(Breach.TWO_OWNERS, watched, why)
        self._begin(watched, client, instance, End.RESTARTED)

    def _release(self, watched: WatchedLease, message: Any, code: str) -> None:
        by = self._sender(watched, message)
        self._note(self._owners.free(watched.key, *self._notes.at))
        watched.client = watched.instance = None
        if message.last_offset is not None:
            self._done(watched, by, message.last_offset, code)

    def _grant(self, watched: WatchedLease, message: Any, code: str) -> None:
        by, proposal = self._sender(watched, message), message.proposed_last_offset
        if proposal <= watched.granted or proposal <= watched.stable:
            self._notes.violation(
                Breach.OVERLAPPING_GRANTS,
                watched,
                f"{by[0]}/{by[1]} was granted offsets up to {proposal}; up to {watched.granted} they had been "
                f"granted, and up to {watched.stable} they were done (C12)",
            )
        watched.granted = max(watched.granted, proposal)
        self._rows_of_done(watched, by, "granted", watched.through(proposal))

    def _commit(self, watched: WatchedLease, message: Any, code: str) -> None:
        self._rows_of_done(watched, self._sender(watched, message), "range", watched.commit(message.ranges))

    def _claim_share(self, watched: WatchedLease, message: Any, code: str) -> None:
        """B3: the share's epoch is this offset."""
        client, instance = message.client_id, message.instance_id
        if code != codes.ALREADY_HELD and watched.client is not None:
            if not watched.is_stale(self._notes.log_time):
                age = self._notes.log_time - watched.last_beat
                why = f"{client}/{instance} was granted a share {age} ms after the last beat of the lease's holder (B3)"
                self._notes.violation(Breach.TWO_OWNERS, watched, why)
            self._note(self._owners.free(watched.key, *self._notes.at, End.REPLACED))
            watched.client = watched.instance = None
        self._shares.claim(watched, message, code)
        self._follow(watched, message, "repositioned")  # to its start

    def _settle(self, watched: WatchedLease, message: Any, code: str) -> None:
        """H3, by the holder, or by an operator."""
        if message.epoch is None:
            redoes = message.version >= REDO_LEVEL
            by = SettlingSender(message.client_id, message.instance_id, is_operator=True, redoes=redoes)
        else:
            by = SettlingSender(*self._sender(watched, message), makes=True, makes_unkeyed=True)
            if not self._shares.is_paused(message):
                watched.last_beat = self._notes.log_time
        self._holes.settle(watched.key, by, message, self._outcome.entries or (), watched.stable)
        self._follow(watched, message)

    def _follow(self, watched: WatchedLease, message: Any, what: str = "shared") -> None:
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
            if how == "repositioned":
                self._holes.write_position(watched, by, how)
            else:
                self._rows_of_done(watched, by, how, sorted(runs))
        watched.stable, watched.ranges = lease.progress.stable, Intervals.of(lease.progress.ranges)

    def _forget(self, group: str) -> None:
        """C16."""
        for key in [key for key in self._watched if key[0] == group]:
            watched = self._watched.pop(key)
            if watched.client is not None and not watched.is_stale(self._notes.log_time):
                self._notes.violation(
                    Breach.TWO_OWNERS, watched, "the group was forgotten while the lease was held (C16)"
                )
            if watched.shares:
                self._shares.forget(watched)
            self._note(self._owners.forget(key, *self._notes.at))
        self._holes.forget(group)
        self._notes.pauses.pop(group, None)

    # -- consequences ------------------------------------------------------------------------------------------------

    def _done(self, watched: WatchedLease, by: tuple[str, str, int], done: int, code: str) -> None:
        """A last_offset that took effect (C5, C8, C11). by: (client, instance, epoch)."""
        if code == codes.REPOSITIONED:
            if done < watched.stable and self._notes.pauser(watched.key[0]) != by[0]:
                self._notes.violation(
                    Breach.PROGRESS_BACK,
                    watched,
                    f"{by[0]}/{by[1]} set the position from {watched.stable} back to {done} without having the "
                    "group paused (C11)",
                )
            watched.reposition(done)
            self._holes.reposition(watched.key, done, self.world.level)
            self._holes.write_position(watched, by, "repositioned")
        elif done > watched.stable:
            self._rows_of_done(watched, by, "done", watched.through(done))

    def _rows_of_done(
        self, watched: WatchedLease, by: tuple[str, str, int | None], what: str, runs: list[tuple[int, int]]
    ) -> None:
        """Rows of runs, ascending; marks (P12) have their own rows."""
        done = split(runs)
        self._holes.write_done(watched, by, what, done.ranges)
        marks = [*done.marks, *([KAFKA_COUNTS] if done.kafka_counts else [])]
        self._holes.write_done(watched, by, "topic", [(mark, mark) for mark in sorted(marks)])

    def _begin(self, watched: WatchedLease, client: str, instance: str, ended: End) -> None:
        """Record a new holder from this record on."""
        epoch, log_time = self._notes.at
        if epoch <= watched.epoch:
            why = f"{client}/{instance} was granted the epoch {epoch}, not above {watched.epoch} before it (C9)"
            self._notes.violation(Breach.STALE_EPOCH, watched, why)
        before = self._owners.grant(watched.key, client, instance, epoch, epoch, log_time, ended)
        if before is not None:
            self._takeover(before, client, instance, log_time - watched.last_beat)
            self._note(before)
        watched.client, watched.instance, watched.epoch = client, instance, epoch
        watched.last_beat = log_time

    def _takeover(self, before: Span, client: str, instance: str, silent_ms: int) -> None:
        known = before.since != BEFORE
        row: Row = (
            *before.key,
            client,
            instance,
            self._notes.offset,
            self._notes.log_time,
            str(before.ended) if before.held else "handed over",
            before.client_id or None,
            before.instance_id or None,
            silent_ms,
            self._notes.log_time - before.since if known and not before.held else None,
        )
        if known or before.held:
            self._notes.rows["takeovers"].append(row)
        else:
            self.loose.takeovers.append(row)

    def _note(self, ended: Span | None) -> None:
        """A span ended: if the lease was held, that is a row or part of one."""
        if ended is not None and ended.held:
            if ended.since == BEFORE:
                self.loose.ended.append(ended)
            else:
                self._notes.rows["ownership"].append(ownership_row(ended))

    # -- the world compared with the outcomes --------------------------------------------------------------------------

    def _compare(self, key: LeaseKey, about: int | None) -> None:
        """Compare the world after each record that names a lease, accepted or not. about: the epoch that it names."""
        watched = self._watched.get(key)
        lease = self.world.lease(*key)
        if lease is None:
            if watched is not None:
                self._notes.violation(Breach.TWO_OWNERS, watched, "the state does not know the lease any more")
                self._note(self._owners.forget(key, *self._notes.at))
                del self._watched[key]
            return
        if watched is None:
            watched = self._watched[key] = WatchedLease(key)
        progress = lease.progress
        epoch = lease.epoch if lease.was_held else -1
        if epoch != watched.epoch or lease.instance_id != watched.instance or lease.client_id != watched.client:
            self._other_holder(watched, lease)
        if watched.shares or lease.shares is not None:
            self._shares.compare(watched, lease, about)
        if progress.holes is not None or self._holes.open:
            self._holes.compare(key, progress)
        if progress.stable != watched.stable or progress.granted != watched.granted:
            self._other_progress(watched, lease)

    def _other_holder(self, watched: WatchedLease, lease: Lease) -> None:
        named = f"{lease.client_id}/{lease.instance_id}, epoch {lease.epoch}" if lease.held else "nobody"
        self._notes.violation(
            Breach.TWO_OWNERS, watched, f"the state names {named} as the holder; no record made it so"
        )
        at = self._notes.at
        if lease.client_id is None or lease.instance_id is None:
            self._note(self._owners.free(watched.key, *at, End.REPLACED))
        else:
            names = lease.client_id, lease.instance_id, lease.epoch
            self._note(self._owners.grant(watched.key, *names, *at, End.REPLACED))
        watched.adopt(lease)

    def _other_progress(self, watched: WatchedLease, lease: Lease) -> None:
        progress = lease.progress
        if progress.stable < watched.stable:
            why = f"stable is {progress.stable}, and was {watched.stable}"
            self._notes.violation(Breach.PROGRESS_BACK, watched, why)
        if progress.granted < watched.granted:
            why = f"offsets up to {watched.granted} were granted, of which the state knows up to {progress.granted}"
            self._notes.violation(Breach.OVERLAPPING_GRANTS, watched, f"{why}: they can be granted again")
        watched.stable, watched.granted = progress.stable, progress.granted
        watched.ranges.clear()
        watched.commit(tuple(progress.ranges)) if progress.ranges else None
