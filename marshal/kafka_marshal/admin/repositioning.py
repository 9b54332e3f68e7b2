"""Moves positions under a pause (C11): all leases are claimed first, then all positions are written.

::

    claim all ──▶ keep them with beats of nil ──▶ write all positions, as releases ──▶ each shown as REPOSITIONED or OK,
       │                                               │                               with the pause in force
       └─ any failure: release with nil,               └─ any failure: release the rest with nil, and write
          nothing was changed                             the complete old progress of the moved ones back

The error names what can't be moved back. A partition moves whole or not at all, since one record moves it.
Positions of a coordinated group are set in its home, by one record (G21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from kafka_marshal.admin.members import PauseKeeper
from kafka_marshal.admin.positions import Keep, Move, moves_to, without
from kafka_marshal.admin.session import Session
from kafka_marshal.engine.claims.leases import ManualLease
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.work.copies import Aside
from kafka_marshal.errors import AdminError, MarshalError
from kafka_marshal.ports import TopicPartition
from rationalizer import CommitEntry, CommitOffsets, Lease, Progress, Record, SettleOffsets, SettlingMessages, codes
from rationalizer.holes import NO_KEY
from rationalizer.limits import (
    MAX_COMMIT_ENTRIES,
    MAX_COMMIT_RANGES,
    MAX_METADATA_BYTES,
    MAX_WRITTEN_BYTES,
    NOTHING_DONE,
)

#: How long all claims, and then all positions, may take to show in the log.
STEP_TIMEOUT_S = 15.0

#: How long releases may take to show in the log when a step has failed.
SETTLE_TIMEOUT_S = 5.0

#: Entries of one record about open messages.
MOST_ENTRIES = 1_000

#: The most bytes of an entry without its topic, with room for the ids.
_ENTRY_BYTES = 64

#: Why messages that wait for their next try are set aside for a moment; it stays if we are killed in between.
_AWAITED = "it waited for its next try"


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
    pause: PauseKeeper,
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
        pause: PauseKeeper,
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
                key: engine.take(None, engine.leases.claim, key, self._session.now_ms()) for key in keys
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


# -- coordinated groups: the home sets positions by one record (G21) -------------------------------------------------


def refuse_kept(group_id: str, moves: Sequence[Move]) -> None:
    """Raise AdminError if work above a new position shall stay done: setting a position drops it."""
    if kept := [move for move in moves if move.kept]:
        raise AdminError(
            f"group {group_id!r} is coordinated, and setting its positions drops what is done above them: "
            f"{', '.join(map(str, kept[:5]))}{' …' * (len(kept) > 5)}. Nothing was changed. Without keep_done "
            "(--keep-done) these offsets come again; or wait until what lies below them is done"
        )


def set_positions(
    session: Session,
    targets: Mapping[TopicPartition, int],
    metadata: Mapping[TopicPartition, str] = MappingProxyType({}),
) -> list[Move]:
    """Set each partition's position to its offset (the next to read), under our pause.

    metadata: stored with it; of other partitions it stays.
    Raises AdminError, which says what moved and what did not; a second call finishes it.
    """
    with session.locked():
        moves = moves_to(targets, session.progress)
    done: list[Move] = []
    for chunk in _chunks(moves, _ENTRY_BYTES + (MAX_METADATA_BYTES if metadata else 0)):
        (asked,) = session.ask((session.home, _record(session, chunk, metadata)))
        outcome = asked.outcome
        under_pause = asked.pause is not None and asked.pause.client_id == session.client_id
        if outcome is not None and outcome.accepted and outcome.code != codes.PARTIAL and under_pause:
            done += [replace(move, epoch=asked.offset) for move in chunk]
            continue
        why = "the log did not show it in time" if outcome is None else outcome.code
        unknown = chunk if outcome is None else []
        raise AdminError(
            f"positions of {session.group_id!r} were not moved: {why}. "
            + (f"Moved before that: {', '.join(map(str, done))}. " if done else "Nothing was moved. " * (not unknown))
            + ("The rest may be moved or not. " if unknown else "")
            + "Do it again"
            + (" once its members have left (kafka-marshal group names them)" if why == codes.GROUP_ACTIVE else ""),
            moved=[move.key for move in done],
            unknown=[move.key for move in unknown],
        )
    return done


def set_around(
    session: Session,
    targets: Mapping[TopicPartition, int],
    some: Mapping[TopicPartition, Sequence[Aside]],
    metadata: Mapping[TopicPartition, str] = MappingProxyType({}),
    passed: Callable[[str], object] = str,
) -> None:
    """Set positions, and open messages around them, under our pause. Raises AdminError as ``set_positions`` does.

    A position that is set leaves below it what is set aside, so all of that is, first (G21). Then it is opened again.
    """
    below = {key: [each for each in found if each.first < targets[key]] for key, found in some.items()}
    if first := {key: found[0].first for key, found in below.items() if found}:
        set_positions(session, dict.fromkeys(first, 0))  # nothing is left of an earlier run
        set_positions(session, first)
        for key, found in below.items():
            open_again(session, key, [each._replace(reason=each.reason or _AWAITED) for each in found])
        passed("set aside")
    set_positions(session, targets, metadata)
    for key, wanted in some.items():
        open_again(session, key, [each for each in wanted if each.reason is None or each.first >= targets[key]])


def _record(session: Session, moves: Sequence[Move], metadata: Mapping[TopicPartition, str]) -> CommitOffsets:
    entries = tuple(
        CommitEntry(move.topic, move.partition, through=move.last_offset, metadata=metadata.get(move.key))
        for move in moves
    )
    return CommitOffsets(*session.ids, "", 0, False, entries)


def _chunks(moves: list[Move], entry_bytes: int) -> list[list[Move]]:
    """The fewest possible records: each partition moves in one record, usually all of them together."""
    size = sum(len(move.topic.encode()) + entry_bytes for move in moves)
    if len(moves) <= MAX_COMMIT_ENTRIES and size <= MAX_WRITTEN_BYTES:
        return [moves] if moves else []
    half = len(moves) // 2
    return [*_chunks(moves[:half], entry_bytes), *_chunks(moves[half:], entry_bytes)]


# -- open messages, written again (C11) ------------------------------------------------------------------------------


def aside_of(progress: Progress | None) -> tuple[Aside, ...]:
    """What is open, in a batch or not; ascending, neighbours that are equal in one."""
    found: list[Aside] = []
    for hole in [] if progress is None else progress.open:
        each = Aside(hole.first, hole.last, hole.key_hash, hole.attempts, hole.reason)
        if found and each.key_hash == NO_KEY and found[-1].last + 1 == each.first and found[-1][2:] == each[2:]:
            found[-1] = found[-1]._replace(last=each.last)
        else:
            found.append(each)
    return tuple(found)


def open_again(session: Session, key: TopicPartition, some: Sequence[Aside], epoch: int | None = None) -> None:
    """Open or park these, under our pause (*blocking*).

    epoch: of our lease; None: of a coordinated group. None of them may be done.
    Raises AdminError if the log does not show it.
    """
    for at in range(0, len(some), MOST_ENTRIES):
        part = some[at : at + MOST_ENTRIES]
        opened = tuple(
            (each.first, each.last, None if each.key_hash == NO_KEY else each.key_hash, each.attempts)
            for each in part
            if each.reason is None
        )
        parked = tuple(
            (each.first, each.key_hash, each.attempts, each.reason) for each in part if each.reason is not None
        )
        cp = session.home if epoch is None else session.cp_of(key)
        with session.locked():
            seen = session.worlds[cp].next_offset
        record: Record = SettleOffsets(*session.ids, "", 0, seen, *key, open=opened, parked=parked)
        if epoch is not None:
            record = SettlingMessages(*session.ids, *key, epoch, seen, open=opened, parked=parked)
        (asked,) = session.ask((cp, record))
        if asked.outcome is None or not asked.accepted or asked.outcome.code == codes.PARTIAL:
            why = "the log did not show it in time" if asked.outcome is None else asked.outcome.code
            raise AdminError(f"{key[0]} [{key[1]}]: open messages were not written again ({why}). Do it again")
