"""The broker's time, and the speed of positions, as learned while a log is read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.observe.text import local_ms
from kafka_marshal.observe.verdict import WINDOW_MS
from rationalizer.groups.history import done_in, owner_names
from rationalizer.limits import NOTHING_DONE

if TYPE_CHECKING:
    from rationalizer import World

#: The longest wait for a record that shows the broker's time (s): a heartbeat at the default interval of 3 s.
LISTEN_S = 1.2

#: Members at work are silent for long enough if chance alone would do that once in this many times.
UNLIKELY = 10_000

#: Waits are chosen in these steps (s).
STEP_S = 0.05

#: (group, topic, partition, the first of its key hashes)
LeaseKey = tuple[str, str, int, int]


def beyond(ranges: Sequence[tuple[int, int]]) -> int:
    """The number of messages done beyond a gap."""
    return sum(last - first + 1 for first, last in split(ranges).ranges)


def _standings(world: World) -> Iterator[tuple[LeaseKey, int, int, int, str | None]]:
    """(key, epoch, stable, messages done, owner) of each lease, and of each piece of a coordinated group."""
    for lease in world.leases():
        key, progress = (lease.group_id, lease.topic, lease.partition), lease.progress
        more = beyond(progress.ranges)
        if lease.shares is None or lease.shares.by_batches:
            yield (*key, 0), lease.epoch, progress.stable, progress.stable + more, lease.client_id
            continue
        for lo, hi, share in lease.shares.parts():
            stable, part = progress.floor([(lo, hi)]), share or lease
            yield (*key, lo), part.epoch, stable, stable + more, part.client_id
    for group in world.groups():
        for topic, partition in group.partitions():
            kept, pieces = group.kept(topic, partition), group.pieces.get(topic)
            more = 0 if kept is None else beyond(kept.progress.ranges)
            for piece in () if pieces is None else pieces[partition]:
                stable = done_in(group, topic, partition, piece.lo, piece.hi)
                owner = owner_names(group, piece.owner)[0]
                yield (group.group_id, topic, partition, piece.lo), piece.since, stable, stable + more, owner


def listening_s(intervals: Sequence[float]) -> float:
    """How long (s) to listen: if processes are at work that write at these intervals (s), a record will have come.

    They write at different moments, so of many one is heard soon.
    """
    for step in range(1, int(LISTEN_S / STEP_S)):
        waited = step * STEP_S
        if prod(max(0.0, 1 - waited / each) for each in intervals) < 1 / UNLIKELY:
            return waited
    return LISTEN_S


class BrokerClock:
    """The broker's time as far as known. `source`: "traffic", "tick", or "local" if no record has shown it."""

    def __init__(self, now: Callable[[], float] = local_ms) -> None:
        self._now = now
        self._ahead: float | None = None
        self._floor = 0
        self.source: str = "local"
        #: Since when new records are read (monotonic, s).
        self.listens_since: float = time.monotonic()

    def heard(self, stamp_ms: int, source: str = "traffic") -> None:
        """A record appended just now has this timestamp (ms): the broker's time is at least that."""
        ahead = stamp_ms - self._now()
        if self._ahead is None or ahead > self._ahead:
            self._ahead = ahead
        if self.source != "tick":
            self.source = source

    def at_least(self, stamp_ms: int) -> None:
        """An older record has this timestamp (ms): the broker's time is not before it."""
        self._floor = max(self._floor, stamp_ms)

    def now_ms(self) -> int:
        """The broker's time now (ms since 1970)."""
        return max(int(self._now() + (self._ahead or 0)), self._floor)

    @property
    def local_is_behind_ms(self) -> int:
        """At least this much (ms) this machine's clock is behind timestamps already seen; 0: it is not."""
        return max(0, int(self._floor - self._now()), int(self._ahead or 0))


@dataclass(slots=True)
class _Track:
    """One lease at the last sample. Times are log time (ms)."""

    epoch: int
    done: int
    moved_at: int
    granted_at: int
    #: Whether the holder was a worker: what an admin writes during its pause is no handled message.
    works: bool = False
    #: Whether the position moved between two samples; if not, `moved_at` is the first sample.
    has_moved: bool = False
    #: The last offset up to which all is done; since when; whether it moved between two samples.
    stable: int = NOTHING_DONE
    stable_at: int = 0
    stable_moved: bool = False
    #: Messages handled, counted since the first sample.
    handled: int = 0
    #: (log time, handled) of this epoch, within the window.
    samples: deque[tuple[int, int]] = field(default_factory=deque)
    #: (log time, next offset) at each change: the last one before the window of verdicts, and those within it.
    positions: deque[tuple[int, int]] = field(default_factory=deque)


class Meter:
    """Messages per second of each lease, and since when it makes no progress, from samples of the worlds."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._tracks: dict[LeaseKey, _Track] = {}

    def sample(self, world: World) -> None:
        """Record the positions of all groups in this coordination partition."""
        for key, epoch, stable, done, owner in _standings(world):
            track = self._tracks.get(key)
            if track is None:
                track = _Track(epoch, done, world.log_time, world.log_time, stable=stable, stable_at=world.log_time)
                self._tracks[key] = track
            else:
                self._follow(track, epoch, stable, done, world.log_time)
            pause = world.pause(key[0])
            pauser = None if pause is None else pause.client_id
            track.works = owner is not None and owner != pauser
            positions = track.positions
            if not positions or positions[-1][1] != stable + 1:
                positions.append((world.log_time, stable + 1))
            while len(positions) > 1 and positions[1][0] <= world.log_time - WINDOW_MS:
                positions.popleft()
            samples = track.samples
            if not samples or world.log_time > samples[-1][0]:
                samples.append((world.log_time, track.handled))
            else:
                samples[-1] = (world.log_time, track.handled)
            while samples[0][0] < world.log_time - self._window_ms and len(samples) > 1:
                samples.popleft()

    @staticmethod
    def _follow(track: _Track, epoch: int, stable: int, done: int, log_time: int) -> None:
        # The first position of a partition is its consumer's start, not work.
        began = track.done == NOTHING_DONE != stable
        if epoch != track.epoch:  # another holder has another speed
            track.epoch, track.granted_at = epoch, log_time
            track.samples.clear()
        elif done < track.done or began:
            track.samples.clear()
        elif track.works:
            track.handled += done - track.done
        if stable != track.stable:
            track.stable, track.stable_at, track.stable_moved = stable, log_time, True
        if done != track.done:
            track.done, track.moved_at, track.has_moved = done, log_time, True

    def moved_at(self, key: LeaseKey) -> int | None:
        """Log time (ms) of the position's last move, or of the first sample; None: not known."""
        track = self._tracks.get(key)
        return None if track is None else track.moved_at

    def stable_since(self, key: LeaseKey) -> tuple[int | None, bool]:
        """Log time (ms) since which the first undone offset is the same, and whether it was seen to move before that.

        (None, False): not known.
        """
        track = self._tracks.get(key)
        return (None, False) if track is None else (track.stable_at, track.stable_moved)

    def positions(self, key: LeaseKey, since: int) -> list[int]:
        """The next offsets since that log time (ms), the first one as of then; []: not known."""
        track = self._tracks.get(key)
        if track is None or track.positions[0][0] > since:
            return []
        first = max(index for index, (at, _) in enumerate(track.positions) if at <= since)
        return [position for _, position in list(track.positions)[first:]]

    def has_moved(self, key: LeaseKey) -> bool:
        """Whether the position has moved since the first sample."""
        track = self._tracks.get(key)
        return track is not None and track.has_moved

    def granted_at(self, key: LeaseKey) -> int | None:
        """Log time (ms) of the first sample with this epoch."""
        track = self._tracks.get(key)
        return None if track is None else track.granted_at

    def per_second(self, key: LeaseKey) -> float | None:
        """Speed of the present holder; None: fewer than two samples within the window."""
        track = self._tracks.get(key)
        if track is None or len(track.samples) < 2:
            return None
        (since, before), (until, after) = track.samples[0], track.samples[-1]
        return (after - before) * 1000 / (until - since)
