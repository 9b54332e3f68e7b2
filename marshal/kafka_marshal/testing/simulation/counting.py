"""Checks the states of a group that takes checkpoints (section 7): each message counted once, or not at all.

The workers of such stories count messages (:mod:`kafka_marshal.testing.simulation.in_checkpoints`). Whenever the log
completes a checkpoint, what its `states` name in the store has to hold each message that the log calls done for its key
once, and no other. Messages that an operator skipped, or has done again, count as often as the log says.

What ``on_restore`` and ``on_completed`` get is compared with the log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kafka_marshal.checkpoints import Checkpoint, Restore, RestorePiece
from kafka_marshal.testing.simulation.holdings import member
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.types import Key
from rationalizer import CommitOffsets, Group, Outcome, Rollback, key_hash
from rationalizer.groups.checkpoints import Barrier, Checkpoints, Version
from rationalizer.wire.wellformed import REACHED_AND_LEAVES, REFUSED

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation.scenario import Scenario
    from kafka_marshal.testing.simulation.scheduler import Scheduler


#: Why a piece comes that no member owned.
UNOWNED = frozenset({"joined", "rollback", "positions"})


class Callbacks:
    """Follows the log, and compares what callbacks of its members get."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        #: Checkpoint → what it sees.
        self._views: dict[int, Mapping[Key, Version]] = {}
        #: Checkpoint → processes whose answers count.
        self._parts: dict[int, set[str]] = {}
        #: (process, checkpoint): on_completed was called.
        self._completed: set[tuple[str, int]] = set()
        #: (process, partition) → keys that it has restored, under which token.
        self._restored: dict[tuple[str, Key], list[tuple[int, int, int]]] = {}
        #: (partition, token) → keys that came under it, and why.
        self._came: dict[tuple[Key, int], list[tuple[int, int, frozenset[str]]]] = {}

    # The log.

    def sees(self, checkpoint: int, view: Mapping[Key, Version]) -> None:
        """This one is the newest from now on."""
        self._views[checkpoint] = view

    def took_part(self, checkpoint: int, processes: Iterable[str]) -> None:
        """Its barrier is closed; these have answered."""
        self._parts[checkpoint] = set(processes)

    def came(self, key: Key, lo: int, hi: int, since: int, why: frozenset[str]) -> None:
        """Keys of a partition got an owner in this generation."""
        self._came.setdefault((key, since), []).append((lo, hi, why))

    # Callbacks.

    def completed(self, process: Living, checkpoint: int) -> None:
        """on_completed is called."""
        if process.name not in self._parts.get(checkpoint, ()):
            self._fail("callback", f"{process.name} hears that {checkpoint} is complete, in which it took no part")
        if (process.name, checkpoint) in self._completed:
            self._fail("callback", f"{process.name} hears twice that {checkpoint} is complete")
        self._completed.add((process.name, checkpoint))

    def restores(self, process: Living, restore: Restore, hashes: Mapping[Key, Sequence[int]]) -> None:
        """on_restore is called. hashes: the key hash of each message."""
        view = self._views.get(restore.checkpoint)
        if view is None:
            self._fail(
                "callback", f"{process.name} is to restore {restore.checkpoint}, which never was the newest (X17)"
            )
            return
        for piece in restore.pieces:
            where = f"{process.name} is to restore {piece.topic} [{piece.partition}] from {restore.checkpoint}"
            why = self._why(process, piece)
            if restore.why not in why:
                self._fail("callback", f"{where}, {restore.why}; by the log it is {' or '.join(sorted(why))} (X17)")
            if (version := view.get(piece.key)) is not None:
                self._check_version(where, piece, version, hashes.get(piece.key, ()))
        for key, version in view.items():
            if restore.positions.get(key) != version.progress.stable + 1:
                self._fail(
                    "callback", f"{process.name} gets a position of {key} that {restore.checkpoint} does not have"
                )

    def restored(self, process: Living, restore: Restore) -> None:
        """on_restore is about to return."""
        for piece in restore.pieces:
            self._restored.setdefault((process.name, piece.key), []).append((piece.lo, piece.hi, piece.epoch))

    def _why(self, process: Living, piece: RestorePiece) -> frozenset[str]:
        restored = self._restored.get((process.name, piece.key), ())
        if any(epoch >= piece.epoch and lo <= piece.hi and piece.lo <= hi for lo, hi, epoch in restored):
            return frozenset({"handed_over"})  # by itself: it is begun again with other keys
        came = self._came.get((piece.key, piece.epoch), ())
        return frozenset[str]().union(*(why for lo, hi, why in came if lo <= piece.hi and piece.lo <= hi))

    def _check_version(self, where: str, piece: RestorePiece, version: Version, hashes: Sequence[int]) -> None:
        lo, hi = piece.lo, piece.hi
        states = [(max(lo, x), min(hi, y), state or None) for x, y, state in version.states if x <= hi and lo <= y]
        if list(piece.states) != states:
            self._fail("callback", f"{where}, with the states {piece.states}; by the log they are {states} (X17)")
        for offset, hashed in enumerate(hashes):
            if not lo <= hashed <= hi:
                continue
            is_done = (
                offset < piece.position
                or any(first <= offset <= last for first, last in piece.ranges)
                or any(x <= hashed <= y and offset <= through for x, y, through in piece.done_through)
            )
            if is_done != version.progress.is_done(offset, hashed):
                self._fail("callback", f"{where} at {piece.position}, which is wrong about offset {offset} (X17)")
                return


#: No state was saved.
NOWHERE = 0


class _Part(NamedTuple):
    """Some keys of a partition, as the log shows them."""

    lo: int
    hi: int
    owner: int
    target: int
    since: int
    revoked: int


class _Handed(NamedTuple):
    """Keys that came by a hand-over, with a cut: of what was done under the token before, nothing comes again."""

    lo: int
    hi: int
    before: int


class States:
    """What the store holds, and what it has to hold."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        #: The contents of the store.
        self.files: Mapping[str, bytes] = {}
        #: Checkpoints that were completed.
        self.completed: int = 0
        #: Partition → the key hash of each message.
        self.hashes: dict[Key, list[int]] = {}
        #: (partition, id) → how often each message has to be in the states of this id.
        self._due: dict[tuple[Key, int], dict[int, int]] = {}
        #: The newest checkpoint, and what it sees.
        self.newest: int = -1
        self._seen: dict[Key, Version] = {}

    def forget(self) -> None:
        """The group takes none any more."""
        self.newest, self._seen = -1, {}

    def look(self, found: Checkpoints, barrier: Barrier | None) -> None:
        """A record was applied: perhaps another checkpoint is the newest. barrier: that was open before."""
        newest = self.newest
        for made in found.kept:  # one record may close a barrier and set positions: two of them are new
            if made.id <= newest:
                continue
            self.completed += 1
            for key, version in made.versions.items():
                if version.checkpoint > newest:
                    self._check_handed_in(key, version, barrier)
                    self._check_version(key, version)
        if found.newest != newest:
            self.newest, self._seen = found.newest, dict(found.seen)
            self._check_kept(found.all_versions())

    def _check_handed_in(self, key: Key, version: Version, barrier: Barrier | None) -> None:
        """Check the barrier's version, if the record that closed it has set positions in place of that."""
        handed_in = None if barrier is None else barrier.versions.get(key)
        if handed_in is None or handed_in in (version, self._seen.get(key)):
            return
        if any(state == handed_in.checkpoint for _, _, state in version.states):
            self._check_version(key, handed_in)

    def _check_version(self, key: Key, version: Version) -> None:
        """The states that were saved at this checkpoint hold what the log calls done, once."""
        before, checkpoint = self._seen.get(key), version.checkpoint
        self._seen[key] = version
        due = self._due.setdefault((key, checkpoint), {})
        saved = self._saved(key, checkpoint)
        for lo, hi, state in version.states:
            if state != checkpoint:
                continue
            for offset, hashed in enumerate(self.hashes.get(key, ())):
                if not lo <= hashed <= hi:
                    continue
                times = self._times_before(key, before, offset, hashed)
                was_done = before is not None and before.progress.is_done(offset, hashed)
                times += version.progress.is_done(offset, hashed) and not was_done
                if times:
                    due[offset] = times
                self._compare(key, checkpoint, offset, hashed, times, saved)

    def _times_before(self, key: Key, before: Version | None, offset: int, hashed: int) -> int:
        state = NOWHERE if before is None else next(x for lo, hi, x in before.states if lo <= hashed <= hi)
        return self._due.get((key, state), {}).get(offset, 0)

    def _compare(
        self,
        key: Key,
        checkpoint: int,
        offset: int,
        hashed: int,
        times: int,
        saved: list[tuple[int, int, dict[int, int]]],
    ) -> None:
        found = [counts.get(offset, 0) for lo, hi, counts in saved if lo <= hashed <= hi]
        where = f"{key[0]} [{key[1]}]: checkpoint {checkpoint}"
        if not found:
            self._fail("state", f"{where} names a state of offset {offset}'s key that the store does not have (X18)")
        elif found[0] != times:
            self._fail("state", f"{where} has offset {offset} {found[0]} times in its state, and should {times} times")

    def _saved(self, key: Key, checkpoint: int) -> list[tuple[int, int, dict[int, int]]]:
        """(lo, hi, counts) of the states of a partition that were saved under an id."""
        found = []
        for path, data in self.files.items():
            _, topic, partition, name = path.split("/")
            number, lo, hi = name.partition(".")[0].split("-")
            if (topic, partition) == (key[0], str(key[1])) and int(number) == checkpoint:
                counts = json.loads(data.partition(b"\n")[2])
                found.append((int(lo, 16), int(hi, 16), {int(offset): each[0] for offset, each in counts.items()}))
        return found

    def _check_kept(self, versions: Mapping[Key, Iterable[Version]]) -> None:
        """Each state that a version names is in the store."""
        parts = [path.split("/") for path in self.files]
        there = {(topic, partition, int(name.partition("-")[0])) for _, topic, partition, name in parts}
        for key, each in versions.items():
            for version in each:
                for _, _, state in version.states:
                    if state and version.checkpoint <= self.newest and (key[0], str(key[1]), state) not in there:
                        what = f"a version of checkpoint {version.checkpoint} names state {state}, and it was deleted"
                        self._fail("state", f"{key[0]} [{key[1]}]: {what} (X18)")


class CountLedger:
    """What a story's members counted, saved and restored."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler, fail: Callable[[str, str], None]) -> None:
        self._scenario = scenario
        self._scheduler = scheduler
        self._fail = fail
        self.states: States = States(fail)
        self._callbacks = Callbacks(fail)
        self._barrier: Barrier | None = None
        #: Member's process by slot.
        self._members: dict[int, str] = {}
        #: The group's pieces, as of a generation.
        self._generation = -1
        self._parts: dict[Key, list[_Part]] = {}
        self._handed: dict[tuple[Key, int], list[_Handed]] = {}
        #: Processes whose pieces went to others at once, by the record that was judged last: a reset (X7, X8). They
        #: work until they read it, in vain.
        self.deprived: set[str] = set()
        #: (process, partition) → the pieces that it has restored: token, lo, hi.
        self._restored: dict[tuple[str, Key], list[tuple[int, int, int]]] = {}
        #: (process, partition) → offsets that it works on.
        self._running: dict[tuple[str, Key], set[int]] = {}
        #: (process, partition, token) → when it was cut last, and when it began a message last.
        self._cut: dict[tuple[str, Key, int], tuple[int, float]] = {}
        self._begun: dict[tuple[str, Key, int], float] = {}

    # Messages.

    def published(self, key: Key, offset: int, message_key: bytes | None) -> None:
        """A message was written to a partition."""
        if self.is_on:
            self.states.hashes.setdefault(key, []).append(key_hash(message_key, offset))

    def hash_of(self, key: Key, offset: int) -> int:
        """The key hash of a message; 0 in other stories."""
        return self.states.hashes[key][offset] if self.is_on else 0

    def begins(
        self, process: Living, key: Key, offset: int, epoch: int, former: tuple[Living, float, int] | None
    ) -> None:
        """A worker begins to handle a message that it got under this token; former: who handled it before."""
        if not self.is_on:
            return
        self._running.setdefault((process.name, key), set()).add(offset)
        if epoch < 0:
            return  # it was lost meanwhile
        what = f"{process.name} begins {key[0]} [{key[1]}] offset {offset} under token {epoch}"
        hashed = self.states.hashes[key][offset]
        restored = self._restored.get((process.name, key), ())
        if not any(since == epoch and lo <= hashed <= hi for since, lo, hi in restored):
            self._fail("restored", f"{what}, under which it has restored nothing ({restored}) (X17)")
        self._begun[process.name, key, epoch] = self._scheduler.now
        if self._holds and (cut := self._cut.get((process.name, key, epoch))) is not None:
            sources = [member(driver) for driver in process.drivers]
            found = [each.member.group for each in sources if each is not None and each.member.group is not None]
            if any(x.checkpoints and x.checkpoints.barrier and x.checkpoints.barrier.id == cut[0] for x in found):
                self._fail("cut", f"{what}, after its cut for {cut[0]}, which is open, in a group that holds (X14)")
        if former is None:
            return
        by, _, token = former
        if by is process and token == epoch:
            self._fail("repeated", f"{what}, and has handled it under this token (X7)")
        if any(lo <= hashed <= hi and token == before for lo, hi, before in self._handed.get((key, epoch), ())):
            self._fail("repeated", f"{what}; {by.name} handled it under {token}, and handed the piece over (X6)")
        if self._is_quiet:
            self._fail("repeated", f"{what}; {by.name} handled it, and only joins, leaves and deploys happened (X16)")

    @property
    def is_settled(self) -> bool:
        """Whether each member owns just what it is the target of."""
        return all(part.owner == part.target for parts in self._parts.values() for part in parts)

    @property
    def is_on(self) -> bool:
        """Whether the group takes checkpoints."""
        return self._scenario.checkpoints is not None

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is lost in this story: members only join, leave and are deployed."""
        counting, faults = self._scenario.checkpoints, self._scenario.faults
        return counting is not None and not counting.fails and all(x.kind in ("term", "deploy", "grow") for x in faults)

    @property
    def _holds(self) -> bool:
        return self._scenario.checkpoints is not None and self._scenario.checkpoints.hold

    def ends(self, process: Living, key: Key, offset: int) -> None:
        """A worker has handled a message, or failed."""
        self._running.get((process.name, key), set()).discard(offset)

    # Callbacks.

    def cuts(self, process: Living, checkpoint: Checkpoint) -> None:
        """on_checkpoint is called."""
        for piece in checkpoint.pieces:
            self._check_idle(process, piece.key, piece.lo, piece.hi, f"is to save {checkpoint.id}")
            for epoch, lo, hi in self._restored.get((process.name, piece.key), ()):
                if (lo, hi) == (piece.lo, piece.hi):
                    self._cut[process.name, piece.key, epoch] = checkpoint.id, self._scheduler.now

    def restores(self, process: Living, restore: Restore) -> None:
        """on_restore is called."""
        if not any(fault.kind == "retention" for fault in self._scenario.faults):
            self._callbacks.restores(process, restore, self.states.hashes)
        for piece in restore.pieces:
            self._check_idle(process, piece.key, piece.lo, piece.hi, f"is to restore token {piece.epoch}")
            others = [
                each
                for each in self._restored.get((process.name, piece.key), [])
                if each[2] < piece.lo or piece.hi < each[1]
            ]
            self._restored[process.name, piece.key] = others

    def restored(self, process: Living, restore: Restore) -> None:
        """on_restore is about to return."""
        self._callbacks.restored(process, restore)
        for piece in restore.pieces:
            self._restored.setdefault((process.name, piece.key), []).append((piece.epoch, piece.lo, piece.hi))

    def completed(self, process: Living, checkpoint: int) -> None:
        """on_completed is called."""
        self._callbacks.completed(process, checkpoint)

    def _check_idle(self, process: Living, key: Key, lo: int, hi: int, what: str) -> None:
        busy = [x for x in self._running.get((process.name, key), ()) if lo <= self.states.hashes[key][x] <= hi]
        if busy:
            self._fail("cut", f"{process.name} {what} of {key[0]} [{key[1]}], with offset {busy[0]} in flight (X13)")

    # The log.

    def record(self, group: Group | None, outcome: Outcome) -> None:
        """A record of the group was accepted."""
        if not self.is_on:
            return
        self.deprived = set()
        self._record(group, outcome)
        members = {} if group is None else group.members
        self._members = {slot: member.instance_id.rpartition(".")[0] for slot, member in members.items()}

    def _record(self, group: Group | None, outcome: Outcome) -> None:
        found = None if group is None else group.checkpoints
        if group is None or found is None:
            self.states.forget()
            self._barrier = None
            self._look(group, None, outcome)
            return
        newest = found.newest
        before = self._barrier
        closed = before if newest > self.states.newest and not outcome.is_a(CommitOffsets) else None
        if before is not None and newest > self.states.newest:
            reached = [slot for slot, each in before.answers.items() if each.answer != REFUSED]
            self._callbacks.took_part(before.id, [self._members[slot] for slot in reached])
        self.states.look(found, before)
        self._callbacks.sees(newest, dict(found.seen))
        if group.generation != self._generation:
            self._look(group, None if closed is None or closed.id != newest else closed, outcome)
        self._barrier = found.barrier

    def _look(self, group: Group | None, closed: Barrier | None, outcome: Outcome) -> None:
        """The group has another generation: who has which piece now, and how it came."""
        self._generation = -1 if group is None else group.generation
        before, self._parts = self._parts, {}
        is_reset = outcome.is_a(Rollback) or self._holds
        for name, topic in () if group is None else group.pieces.items():
            for number in range(len(topic.owners)):
                key = name, number
                for piece in topic[number]:
                    part = _Part(piece.lo, piece.hi, piece.owner, piece.target, piece.since, piece.revoked)
                    self._parts.setdefault(key, []).append(part)
                    if part.since != self._generation:
                        continue
                    if closed is not None and not outcome.is_a(Rollback):
                        self._handed_over(key, part, before.get(key, ()), closed)
                    why = _why(key, part, before.get(key, ()), closed, outcome)
                    self._callbacks.came(key, part.lo, part.hi, part.since, why)
                    if is_reset:
                        others = {old.owner for old in before.get(key, ()) if old.lo <= part.hi and part.lo <= old.hi}
                        self.deprived |= {self._members.get(slot, "") for slot in others - {part.owner}}

    def _handed_over(self, key: Key, part: _Part, before: Iterable[_Part], closed: Barrier) -> None:
        version = closed.versions.get(key)
        for old in before:
            lo, hi, answer = max(old.lo, part.lo), min(old.hi, part.hi), closed.answers.get(old.owner)
            if lo > hi or version is None or answer is None or answer.answer == REFUSED:
                continue
            goes = answer.answer == REACHED_AND_LEAVES or 0 <= old.revoked <= answer.generation
            if not goes or not version.saved.has_all(lo, hi, closed.id):
                continue
            self._handed.setdefault((key, part.since), []).append(_Handed(lo, hi, old.since))
            owner = self._members.get(old.owner, "")
            cut, at = self._cut.get((owner, key, old.since), (-1, 0.0))
            if cut == closed.id and self._begun.get((owner, key, old.since), -1.0) > at:
                self._fail(
                    "cut", f"{owner} began {key[0]} [{key[1]}] after its cut for {cut}, and handed it over (X14)"
                )


def _why(key: Key, part: _Part, before: Iterable[_Part], closed: Barrier | None, outcome: Outcome) -> frozenset[str]:
    """Why these keys came to their owner (X17). closed: the barrier that the record completed."""
    if outcome.is_a(Rollback):
        return frozenset({"rollback"})
    found = set()
    for old in before:
        if old.owner < 0 or old.hi < part.lo or part.hi < old.lo:
            continue
        answer, version = (None, None) if closed is None else (closed.answers.get(old.owner), closed.versions.get(key))
        leaves = answer is not None and answer.answer == REACHED_AND_LEAVES
        goes = answer is not None and answer.answer != REFUSED and 0 <= old.revoked <= answer.generation
        is_named = version is not None and closed is not None and version.saved.has_all(old.lo, old.hi, closed.id)
        found.add("handed_over" if leaves or (goes and is_named) else "lost")
    return frozenset({"lost"} if "lost" in found else found) or UNOWNED
