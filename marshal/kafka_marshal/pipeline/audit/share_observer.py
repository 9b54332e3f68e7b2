"""Follows the shares of leases by the outcomes alone (B1-B4): checks each, and writes rows of the table `shares`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kafka_marshal.pipeline.audit.hole_observer import HoleObserver, Sender
from kafka_marshal.pipeline.audit.invariants import Kind, Watched, WatchedShare
from kafka_marshal.pipeline.audit.schemas import Row
from rationalizer import ClaimingMessages, Heartbeat, Lease, Outcome, ReleasingPartition, SettlingMessages, codes
from rationalizer.history import BEFORE, End
from rationalizer.holes import NO_KEY

#: A share that was silent for more than 2·HI ended by another sharer's take, or for room (B3, B4).
EXPIRED: Final = "expired"

#: Takes a kind of violation, the lease, what it is about, and a sentence.
Report = Callable[[Kind, Watched, str], None]


def share_row(share: WatchedShare) -> Row:
    """A row of `shares`; the writer adds its partition. The epoch is the offset at which it began (B3)."""
    keys = (None, None) if share.by_batches else (share.lo, share.hi)
    since = None if share.since == BEFORE else share.since
    silent = None if share.until is None else share.until - share.last_beat
    names = (*share.key, share.client, share.instance, share.epoch, *keys)
    return (*names, share.epoch, since, share.until_offset, share.until, share.ended, silent)


class ShareObserver:
    """The shares of all leases of one CP. Adds rows to `rows`; the caller writes and clears them."""

    def __init__(
        self, rows: list[Row], holes: HoleObserver, pauses: Mapping[str, tuple[str, int]], report: Report
    ) -> None:
        self._rows = rows
        self._holes = holes
        self._pauses = pauses
        self._report = report
        #: Shares that ended, and began before this replay.
        self.ended: list[WatchedShare] = []

    def claim(self, watched: Watched, message: Any, code: str, at: tuple[int, int], lease: Lease | None) -> None:
        """An accepted ClaimingShare (B3), at (offset, log time). lease: the state after it."""
        client, offset, log_time = message.client_id, *at
        lo, hi = (NO_KEY, NO_KEY) if message.lo is None else (message.lo, message.hi)
        ids = watched.key, offset, client, message.instance_id
        asked = WatchedShare(*ids, message.heartbeat_interval_ms, log_time, lo, hi, log_time)
        met = [share for share in watched.shares.values() if share.overlaps(asked)]
        alive = next((share for share in met if not share.is_stale(log_time)), None)
        if code == codes.ALREADY_HELD:
            mine = alive is not None and alive.is_of(client, asked.instance) and (alive.lo, alive.hi) == (lo, hi)
            if not mine:
                self._two(watched, f"{client}/{asked.instance} was confirmed as a sharer, which it is not (B3)")
            return
        if alive is not None:
            age = log_time - alive.last_beat
            self._two(watched, f"{asked}, was granted {age} ms after the last beat of {alive}, which it overlaps (B3)")
        was_silent = watched.shares_are_silent(log_time)
        self._end(watched, met, End.REPLACED, at)
        self._make_room(watched, at, lease)
        if was_silent:
            watched.revive(log_time, client)
        watched.shares[offset] = asked

    def of_sharer(
        self, watched: Watched, message: Any, outcome: Outcome, at: tuple[int, int], lease: Lease | None
    ) -> None:
        """An accepted record with the epoch of a share (B2), or an entry of a batch. lease: the state after it."""
        kind = message.type
        share = watched.shares[message.epoch]
        if kind == ReleasingPartition.TYPE:
            self._end(watched, [share], End.RELEASED, at)
        elif kind == ClaimingMessages.TYPE:
            self._report(Kind.OVERLAPPING_GRANTS, watched, f"messages were granted for good to {share} (B2)")
        elif kind == Heartbeat.TYPE or (kind == SettlingMessages.TYPE and not self.is_paused(message, at[1])):
            if watched.shares_are_silent(at[1]):
                watched.revive(at[1])
            share.last_beat = at[1]
        if kind == SettlingMessages.TYPE:
            self._settle(watched, share, message, outcome, at, lease)

    def _settle(
        self,
        watched: Watched,
        share: WatchedShare,
        message: Any,
        outcome: Outcome,
        at: tuple[int, int],
        lease: Lease | None,
    ) -> None:
        """The entries, then the take (H3)."""
        names, stable = (share.client, share.instance, share.epoch), watched.stable
        if share.by_batches:
            by = Sender(*names, share.epoch, ())
        else:
            by = Sender(*names, keys=((share.lo, share.hi),), makes=True)
        self._holes.settle(watched.key, by, message, outcome.entries or (), at, stable)
        if message.take is not None:
            self._make_room(watched, at, lease)
        if outcome.taken is not None:
            self._holes.take(watched.key, by, outcome.taken, message.take[2], at, stable)

    def claim_whole(self, watched: Watched, by: str, at: tuple[int, int]) -> None:
        """A ClaimingPartition was granted, which overlaps all shares (B4)."""
        self._end_all(watched, f"{by} was granted the whole lease", End.REPLACED, at)

    def forget(self, watched: Watched, at: tuple[int, int]) -> None:
        """The group was forgotten (C16)."""
        self._end_all(watched, "the group was forgotten", End.FORGOTTEN, at)

    def compare(self, watched: Watched, lease: Lease, at: tuple[int, int], epoch: int | None) -> None:
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
        self._end(watched, [share for each, share in shares.items() if each not in there], End.REPLACED, at)
        since = {each: share.since for each, share in shares.items()}
        for each, now in there.items():
            shares[each] = WatchedShare.of(watched.key, now, since.get(each, at[1]))

    def is_paused(self, message: Any, log_time: int) -> bool:
        """Whether another client has the group paused: then a settle is no beat (H3)."""
        pause = self._pauses.get(message.group_id)
        return pause is not None and pause[0] != message.client_id and log_time < pause[1]

    def _make_room(self, watched: Watched, at: tuple[int, int], lease: Lease | None) -> None:
        """End stale shares that the state has no more: whether a take repeats one, or room is needed, is its to say."""
        there = {share.epoch for share in (lease and lease.shares) or ()}
        gone = [each for each in watched.shares.values() if each.is_stale(at[1]) and each.epoch not in there]
        self._end(watched, gone, EXPIRED, at)

    def _end_all(self, watched: Watched, what: str, ended: str, at: tuple[int, int]) -> None:
        alive = next((share for share in watched.shares.values() if not share.is_stale(at[1])), None)
        if alive is not None:
            self._two(watched, f"{what} {at[1] - alive.last_beat} ms after the last beat of {alive} (B4, C16)")
        self._end(watched, list(watched.shares.values()), ended, at)

    def _end(self, watched: Watched, shares: Iterable[WatchedShare], ended: str, at: tuple[int, int]) -> None:
        for share in shares:
            del watched.shares[share.epoch]
            self._holes.disown(watched.key, share.epoch)
            share.until_offset, share.until, share.ended = *at, str(ended)
            if share.since == BEFORE:
                self.ended.append(share)
            else:
                self._rows.append(share_row(share))

    def _two(self, watched: Watched, detail: str) -> None:
        self._report(Kind.TWO_OWNERS_OF_A_KEY, watched, detail)
