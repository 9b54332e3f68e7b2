"""Moves positions under a pause (C11): all leases are claimed first, then all positions are written.

::

    claim all ──▶ keep them with beats of nil ──▶ write all positions, as releases ──▶ each shown as REPOSITIONED or OK,
       │                                               │                               with the pause in force
       └─ any failure: release with nil,               └─ any failure: release the rest with nil, and write
          nothing was changed                             the complete old progress of the moved ones back

The error names what can't be moved back. A partition moves whole or not at all, since one record moves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from kafka_marshal.admin.aside import aside_of, open_again
from kafka_marshal.admin.positions import Keep, Move, moves_to, without
from kafka_marshal.admin.session import Session
from kafka_marshal.engine.claims.leases import ManualLease
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.work.copies import Aside
from kafka_marshal.errors import AdminError, MarshalError
from kafka_marshal.ports import TopicPartition
from rationalizer import Lease, codes
from rationalizer.limits import MAX_COMMIT_RANGES, NOTHING_DONE

#: How long all claims, and then all positions, may take to show in the log.
STEP_TIMEOUT_S = 15.0

#: How long releases may take to show in the log when a step has failed.
SETTLE_TIMEOUT_S = 5.0


class PauseInForce(Protocol):
    """The part of the pause that a move needs."""

    def check(self) -> None:
        """Raise AdminError unless it is in force everywhere."""

    def extend_if_short(self) -> None:
        """Extend the pause if time runs short."""

    def wait(self, met: Callable[[], object], timeout_s: float) -> bool:
        """Wait until met() is true, and extend the pause meanwhile."""


@dataclass(frozen=True, slots=True)
class _Done:
    """The progress of one lease. (No key ranges: at level 1 no record can make any.)"""

    stable: int
    granted: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, lease: Lease | None) -> _Done:
        if lease is None:
            return cls(NOTHING_DONE, NOTHING_DONE, ())
        ranges = tuple((first, last) for first, last in lease.progress.ranges)
        return cls(lease.progress.stable, lease.progress.granted, ranges)

    def with_open(self, some: Sequence[Aside]) -> _Done:
        """The same progress as it is written again: below the lowest open message first, the rest as ranges."""
        lowest = min([each.first for each in some], default=self.stable + 1)
        if lowest > self.stable or self.granted != NOTHING_DONE:
            return self
        done = [(lowest, self.stable), *self.ranges]
        for each in some:
            done = [part for span in done for part in without(span, each.first, each.last)]
        return _Done(lowest - 1, NOTHING_DONE, tuple(done))

    @property
    def first_beat(self) -> int:
        """The last_offset of the first record that writes this again: a grant must lie above it (C12)."""
        return self.stable if self.granted == NOTHING_DONE else self.granted - 1


def move_all(
    pause: PauseInForce,
    session: Session,
    targets: Mapping[TopicPartition, int],
    keeps: Mapping[TopicPartition, Keep] = MappingProxyType({}),
    lost: Mapping[TopicPartition, str] = MappingProxyType({}),
    aside: Mapping[TopicPartition, Sequence[Aside]] = MappingProxyType({}),
) -> list[Move]:
    """Set each partition's position to its offset (the next to read); returns the moves (*blocking*).

    keeps: what stays done above it. lost: partitions whose open messages were of another topic: none stays. aside:
    messages to be set aside that the partition does not have.
    Raises AdminError, which says what moved and what did not.
    """
    mover = _Mover(pause, session, targets, keeps, lost, aside)
    mover.claim()
    mover.write()
    return mover.moves


class _Mover:
    def __init__(
        self,
        pause: PauseInForce,
        session: Session,
        targets: Mapping[TopicPartition, int],
        keeps: Mapping[TopicPartition, Keep],
        lost: Mapping[TopicPartition, str],
        aside: Mapping[TopicPartition, Sequence[Aside]],
    ) -> None:
        self._keeps = keeps
        self._lost = lost
        self._aside = aside
        #: What was open before.
        self._open: dict[TopicPartition, tuple[Aside, ...]] = {}
        self.moves: list[Move] = []
        self._pause = pause
        self._session = session
        self._targets = targets
        self._leases: dict[TopicPartition, ManualLease] = {}
        self._before: dict[TopicPartition, _Done] = {}

    # First step: nothing is changed.

    def claim(self) -> None:
        """Hold all of the leases, with time left on the pause, or none."""
        try:
            self._claim(self._targets)
            with self._session.locked():
                missing = {key: lease for key, lease in self._leases.items() if not lease.is_proven}
                self._before = {key: _Done.of(self._session.lease(key)) for key in self._targets}
                self._open = {key: aside_of(self._session.progress(key)) for key in self._targets}
                self.moves = moves_to(self._targets, self._session.progress, self._lost, self._keeps)
            if missing:
                self._pause.check()  # a process under our client_id is the cause then, and is named
                named = "; ".join(f"{k[0]} [{k[1]}]: {x.loss or x.refusal or 'no answer'}" for k, x in missing.items())
                raise AdminError(f"not all partitions could be claimed ({named})")
            self.moves = [replace(move, epoch=self._leases[move.key].lease.epoch) for move in self.moves]
            self._pause.extend_if_short()
            self._pause.check()
        except BaseException as error:
            self._release_all()
            if isinstance(error, MarshalError):
                raise AdminError(f"no position was moved: {error}") from error
            raise

    def _claim(self, keys: Iterable[TopicPartition]) -> None:
        """Claim these leases, and wait until they are held or lost, or the time is up."""
        with self._session.locked() as engine:
            claimed: dict[TopicPartition, ManualLease] = {
                key: engine.take(None, engine.leases.claim, key) for key in keys
            }
            self._leases.update(claimed)
        self._pause.wait(lambda: all(x.is_proven or x.loss for x in claimed.values()), STEP_TIMEOUT_S)

    def _release_all(self) -> bool:
        """Release all held leases with nil; whether the log has shown the end of all of them."""

        def over() -> bool:
            return all(x.is_released or x.loss for x in self._leases.values())

        try:
            with self._session.locked() as engine:
                for lease in self._leases.values():
                    engine.take(None, lease.release_bare, self._session.now_ms())
            return self._session.wait_for(over, self._session.now_ms() + SETTLE_TIMEOUT_S * 1000)
        except MarshalError:
            return False  # the log is not readable any more: held leases go stale by themselves

    # Second step: positions are written.

    def write(self) -> None:
        """Release every lease with its new position, and wait until each is applied under the pause."""
        try:
            with self._session.locked() as engine:
                now = self._session.now_ms()
                lost = [key for key, lease in self._leases.items() if now >= lease.lease.hand_out_until]
                if not lost:
                    first = {x.key: x.last_offset for x in self.moves if x.kept}
                    first |= dict.fromkeys((x.key for x in self.moves if x.lost), NOTHING_DONE)
                    first |= {
                        x.key: min(x.last_offset, self._aside[x.key][0].first - 1)
                        for x in self.moves
                        if x.key in self._aside
                    }
                    answers = [engine.take(None, self._leases[key].beat, at, now) for key, at in first.items()]
            if lost:
                raise AdminError(f"leases were lost before anything was written: {_names(lost)}")
            self._pause.wait(lambda: all(answer.accepted is not None for answer in answers), STEP_TIMEOUT_S)
            self._set_aside()
            with self._session.locked() as engine:
                now = self._session.now_ms()
                for move in self.moves:
                    lease = self._leases[move.key]
                    # Ranges only after a beat that replaced everything; what the log did not show is moved back below.
                    if move.kept and _Done.of(self._session.lease(move.key)) == _Done(
                        move.last_offset, NOTHING_DONE, ()
                    ):
                        _add(engine, lease, _Done(move.last_offset, NOTHING_DONE, move.kept), now)
                    engine.take(None, lease.release, None if self._is_written(move) else move.last_offset, now)
            self._pause.wait(lambda: all(x.is_released for x in self._leases.values()), STEP_TIMEOUT_S)
            with self._session.locked():
                failed = [move for move in self.moves if not self._is_moved(move, under_pause=True)]
            if failed:
                raise AdminError(f"the log did not show these moves with the pause in force: {_list(failed)}")
        except BaseException as error:
            self._undo(error)
            raise

    def _is_written(self, move: Move) -> bool:
        """Whether the position is written before the release, since something above it comes after it."""
        return bool(move.kept) or any(each.first > move.last_offset for each in self._aside.get(move.key, ()))

    def _set_aside(self) -> None:
        """Set messages aside: below the new position before it is written, those above it afterwards."""
        for move in self.moves:
            some, lease = self._aside.get(move.key, ()), self._leases[move.key]
            below = [each for each in some if each.first <= move.last_offset]
            open_again(self._session, move.key, below, lease.lease.epoch)
            if len(below) == len(some):
                continue
            with self._session.locked() as engine:
                answer = engine.take(None, lease.beat, move.last_offset, self._session.now_ms())
            self._pause.wait(lambda answer=answer: answer.accepted is not None, STEP_TIMEOUT_S)  # type: ignore[misc]
            open_again(self._session, move.key, some[len(below) :], lease.lease.epoch)

    def _is_moved(self, move: Move, *, under_pause: bool = False) -> bool:
        """Whether the log has shown our release with the new position (and the pause in force with it)."""
        hand_in = self._leases[move.key].hand_in
        if self._is_written(move):
            wanted = _Done(move.last_offset, NOTHING_DONE, move.kept)
            is_under_pause = hand_in is not None and hand_in.pausing
            return _Done.of(self._session.lease(move.key)) == wanted and (is_under_pause or not under_pause)
        return (
            hand_in is not None
            and hand_in.last_offset == move.last_offset
            and hand_in.code in (codes.REPOSITIONED, codes.OK)
            and (hand_in.pausing or not under_pause)
        )

    # On failure in it.

    def _undo(self, cause: BaseException) -> None:
        """Restore what moved, or raise AdminError with what could not be restored."""
        settled = self._release_all()
        unknown = [] if settled else [m for m in self.moves if not self._is_over(m)]
        with self._session.driver.condition:
            moved = [m for m in self.moves if self._is_changed(m)]
        problem = self._write_back(moved) if moved else ""
        with self._session.driver.condition:
            now = {m.key: _Done.of(self._session.lease(m.key)) for m in moved}
            left = {m.key: aside_of(self._session.progress(m.key)) for m in moved}
        moved = [
            replace(m, after=now[m.key].stable + 1)
            for m in moved
            if left[m.key] != self._open[m.key]
            or now[m.key].with_open(left[m.key]) != self._before[m.key].with_open(self._open[m.key])
        ]
        if not moved and not unknown:
            if isinstance(cause, MarshalError):
                raise AdminError(
                    f"moving failed in its last step: {cause}. Every position is as it was before. Do it again"
                ) from cause
            return
        told = {m.key for m in (*moved, *unknown)}
        still = [m for m in self.moves if m.key not in told]
        raise AdminError(
            f"moving failed in its last step: {cause}. "
            + (f"Moved, and not put back ({problem}): {_list(moved)}. " if moved else "")
            + (f"Moved or not, the log has not said: {_list(unknown)}. " if unknown else "")
            + f"Not moved: {_list(still)}. Do it again to finish it",
            moved=[m.key for m in moved],
            unknown=[m.key for m in unknown],
        ) from cause

    def _is_changed(self, move: Move) -> bool:
        """Whether we have changed its progress."""
        if self._is_written(move):  # it takes several records
            return _Done.of(self._session.lease(move.key)) != self._before[move.key]
        is_other = self._before[move.key] != _Done(move.last_offset, NOTHING_DONE, ())
        return (self._is_moved(move) and is_other) or aside_of(self._session.progress(move.key)) != self._open[move.key]

    def _is_over(self, move: Move) -> bool:
        lease = self._leases[move.key]
        return lease.is_released or bool(lease.loss)

    def _write_back(self, moved: Sequence[Move]) -> str:
        """Write the complete old progress of these partitions; partition → why it was not restored."""
        try:
            self._pause.extend_if_short()
            self._pause.check()
            self._claim(move.key for move in moved)
            with self._session.locked() as engine:
                held = {m.key: self._leases[m.key] for m in moved if self._leases[m.key].is_proven}
                now = self._session.now_ms()
                before = {key: self._before[key].with_open(self._open[key]) for key in held}
                answers = [engine.take(None, lease.beat, before[key].first_beat, now) for key, lease in held.items()]
            self._pause.wait(lambda: all(answer.accepted is not None for answer in answers), STEP_TIMEOUT_S)
            with self._session.locked():
                # Only after a beat that replaced everything, or the new position would get the old ranges.
                replaced = {
                    key: lease
                    for key, lease in held.items()
                    if _Done.of(self._session.lease(key)) == _Done(before[key].first_beat, NOTHING_DONE, ())
                }
            for key, lease in replaced.items():
                open_again(self._session, key, self._open[key], lease.lease.epoch)
            with self._session.locked() as engine:
                for key, lease in replaced.items():
                    _add(engine, lease, before[key], self._session.now_ms())
            self._release_all()
            self._pause.check()
        except MarshalError as error:
            self._release_all()
            return str(error)
        return "the log did not show their old progress in time"


def _add(engine: Engine, lease: ManualLease, done: _Done, now: float) -> None:
    """Write the rest after the first beat, which replaced everything: grant, ranges."""
    if done.granted != NOTHING_DONE:
        engine.take(None, lease.grant, done.granted, now)
        if done.stable > done.granted:
            engine.take(None, lease.commit_ranges, ((done.granted + 1, done.stable),))
    for start in range(0, len(done.ranges), MAX_COMMIT_RANGES):
        engine.take(None, lease.commit_ranges, done.ranges[start : start + MAX_COMMIT_RANGES])


def _names(keys: Iterable[TopicPartition]) -> str:
    return ", ".join(f"{topic} [{partition}]" for topic, partition in keys)


def _list(moves: Sequence[Move]) -> str:
    return ", ".join(map(str, moves)) or "none"
