"""Writes the records of coordinated groups as rows of the tables, and checks them against the log (section 5)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from kafka_marshal.pipeline.audit.hole_observer import HoleObserver, SettlingSender, progress_of
from kafka_marshal.pipeline.audit.invariants import NO_OWNER, Breach, Notes, WatchedLease
from kafka_marshal.pipeline.audit.watched_group import (
    ANSWER,
    BEGIN,
    COMMIT,
    CONFIGURE,
    JOIN,
    KEEP,
    ROLLBACK,
    SETTLE,
    Done,
    EndedPiece,
    GroupChange,
    PieceSpan,
    PieceSpans,
    WatchedCheckpoints,
    WatchedGroup,
    assignment_row,
    is_release,
)
from rationalizer import Group, Outcome, Piece, World, codes
from rationalizer.done_through import KeyPiece
from rationalizer.groups.assignors import NOBODY
from rationalizer.groups.group import pieces_of
from rationalizer.history import BEFORE
from rationalizer.levels import FIRST_LEVEL, REDO_LEVEL
from rationalizer.limits import MAX_KEY_HASH, NOTHING_DONE
from rationalizer.wire.wellformed import RETIRE, START

GROUP_TYPES: Final = frozenset({*range(JOIN, CONFIGURE + 1), BEGIN, ANSWER, ROLLBACK, KEEP})


class GroupObserver:
    """Follows all coordinated groups of one CP."""

    def __init__(self, notes: Notes, holes: HoleObserver) -> None:
        self._world = world = notes.world
        self._notes = notes
        self._holes = holes
        self._groups = {group.group_id: WatchedGroup.of(group) for group in world.groups()}
        self.spans: PieceSpans = PieceSpans()
        #: Ended spans that began, or may have a predecessor that began, before this replay.
        self.ended: list[EndedPiece] = []
        for group in world.groups():
            self.spans.begin(group.group_id)
            for place in group.partitions():
                holes.begin((group.group_id, *place), progress_of(group, *place), {})
            for (topic, partition), pieces in self._groups[group.group_id].pieces.items():
                self.spans.adopt((group.group_id, topic, partition), pieces, _names(self._world, group.group_id))

    def knows(self, group_id: str) -> bool:
        """Whether the group is a coordinated one."""
        return group_id in self._groups

    def record(self, kind: int, message: Any, outcome: Outcome, is_claimed: bool) -> None:
        """A record of `GROUP_TYPES` that reached its group."""
        at, group_id = self._notes.at, message.group_id
        group, watched = self._world.group(group_id), self._groups.get(group_id)
        if kind == SETTLE:
            self._holes.name(message)
        if not outcome.accepted:
            self._holes.compare_group(group, message)
            if watched is not None and (group is None or group.generation != watched.generation):
                self._about_group(Breach.GENERATION, group_id, "a record that was rejected began a generation")
                self._resume(group_id, group)
            return
        if is_claimed:
            self._about_group(Breach.TWO_KINDS, group_id, f"{outcome.type} was accepted, and the group has leases")
        if watched is None:
            watched = self._groups[group_id] = WatchedGroup(group_id, at[0])
        early = _left_before(watched, group, message, outcome, at[1])
        event = watched.take(kind, message, *at, outcome.member)
        event.gone.update(early)
        if group is None or event.stale:
            self._about_group(Breach.STALE_GENERATION, group_id, event.stale or "the state does not know the group")
            self._resume(group_id, group)
            return
        entries = outcome.entries or ()
        self._follow_checkpoints(watched, group, event, message, outcome)
        if kind == SETTLE:
            place = (message.topic, message.partition)
            done = watched.done.get(place)
            by = _settler(watched, event, message, self._notes.pauser(group_id))
            stable = NOTHING_DONE if done is None else done.stable
            self._holes.settle((group_id, *place), by, message, entries, stable)
            self._settled(watched, group, message)
        if kind == COMMIT:
            self._take_entries(watched, event, message, entries)
        if group.generation != watched.generation:
            self._rebalanced(watched, group, event, message)
        else:
            self._kept_generation(watched, group, event)
            for place in {(entry[0], entry[1]) for entry in message.entries} if kind == COMMIT else ():
                self._compare(watched, group, event, *place)
        if kind == COMMIT:
            self._compare_progress(watched, group, message, entries)
        self._holes.compare_group(group, message)

    def forget(self, group_id: str) -> None:
        """C16."""
        at = self._notes.at
        watched = self._groups.pop(group_id, None)
        if watched is None:
            return
        alive = [each.client for each in watched.members.values() if not each.is_overdue(at[1])]
        if alive:
            self._about_group(Breach.MEMBERS, group_id, f"the group was forgotten while {', '.join(alive)} lived")
        self._end(self.spans.forget(group_id, at))

    def finish(self) -> None:
        """The replay ends here: check once more what no record concerned."""
        for group_id, watched in self._groups.items():
            group = self._world.group(group_id)
            if group is None:
                self._about_group(Breach.MEMBERS, group_id, "the state does not know the group any more")
                continue
            self._compare_all(watched, group, GroupChange(""))
            for topic, partition in list(watched.done):
                self._compare_done(watched, group, topic, partition, None)
            for place in group.partitions():
                self._holes.compare((group_id, *place), progress_of(group, *place), whole=True)

    # -- record by record ------------------------------------------------------------------------------

    def _take_entries(self, watched: WatchedGroup, event: GroupChange, message: Any, entries: Sequence[str]) -> None:
        """G14: each entry that was accepted must be its sender's to write."""
        instance, client, group_id = message.instance_id, message.client_id, message.group_id
        for entry, code in zip(message.entries, entries, strict=True):
            topic, partition, lo, hi, action, *_ = entry
            if code not in codes.ACCEPTED or event.slot is None:
                continue
            if action == START:
                allowed = watched.owns_any(event.slot, topic, partition, event.generation)
            else:
                allowed = watched.owns(event.slot, topic, partition, lo, hi, event.generation)
            if not allowed:
                self._notes.report(
                    Breach.STALE_GENERATION,
                    (group_id, topic, partition),
                    f"a commit of {client}/{instance}, generation {event.generation}, took effect for keys that it did "
                    "not own in that generation",
                    _owner(watched, topic, partition, lo),
                )
            if is_release(entry, code):
                event.released.setdefault((topic, partition), []).append((lo, hi))

    def _rebalanced(self, watched: WatchedGroup, group: Group, event: GroupChange, message: Any) -> None:
        """G16."""
        offset, log_time = self._notes.at
        if group.generation != offset or group.generation <= watched.generation:
            self._about_group(
                Breach.GENERATION,
                group.group_id,
                f"after generation {watched.generation} came {group.generation}, by the record at {offset}",
            )
        watched.generation = group.generation
        self._compare_members(watched, group)
        moved, revoked = self._compare_all(watched, group, event)
        began = group.group_id, group.generation, log_time, event.reason, message.client_id, event.died
        self._notes.rows["generations"].append((*began, len(group.members), moved, revoked))

    def _kept_generation(self, watched: WatchedGroup, group: Group, event: GroupChange) -> None:
        if event.gone:
            names = ", ".join(word for word, _ in event.gone.values())
            self._about_group(Breach.GENERATION, group.group_id, f"members are gone ({names}), and no generation began")
        if event.gone or len(group.members) != len(watched.members):
            self._compare_members(watched, group)

    def _compare_members(self, watched: WatchedGroup, group: Group) -> None:
        why = watched.differing(group)
        if why:
            self._about_group(Breach.MEMBERS, group.group_id, why)
            watched.adopt_members(group)

    def _resume(self, group_id: str, group: Group | None) -> None:
        """Continue from the state, so that one fault is reported once."""
        if group is None:
            self._groups.pop(group_id, None)
            self._end(self.spans.forget(group_id, self._notes.at))
            return
        made = self._groups[group_id].made if group_id in self._groups else -1
        watched = self._groups[group_id] = WatchedGroup.of(group)
        watched.made = made
        for topic, partition in {*watched.pieces, *(place[1:] for place in self.spans.now if place[0] == group_id)}:
            place = (group_id, topic, partition)
            pieces = watched.pieces.get((topic, partition), ())
            ended, _ = self.spans.change(
                place, pieces, self._notes.at, _names(self._world, group_id), lambda _: ("taken", self._notes.at[1])
            )
            self._end(ended)

    # -- owners ----------------------------------------------------------------------------------------

    def _compare_all(self, watched: WatchedGroup, group: Group, event: GroupChange) -> tuple[int, int]:
        """Compare all pieces with those before: how many changed owner, and how many this record revoked."""
        moved = revoked = 0
        for topic, partition in sorted({*watched.pieces, *group.partitions()}):
            more = self._compare(watched, group, event, topic, partition)
            moved, revoked = moved + more[0], revoked + more[1]
        return moved, revoked

    def _compare(
        self, watched: WatchedGroup, group: Group, event: GroupChange, topic: str, partition: int
    ) -> tuple[int, int]:
        """Compare the pieces of a partition with those before; as `_compare_all`."""
        at = (topic, partition)
        place = (group.group_id, *at)
        before, pieces = watched.pieces.get(at, ()), tuple(pieces_of(group, *at))
        if pieces == before:
            return 0, 0
        found = _Faults()
        disjoint = self._check_state(pieces, group, found)

        def how(span: PieceSpan) -> tuple[str, int]:
            if span.slot in event.gone:
                return event.gone[span.slot]
            if watched.released(event, place, span):
                return "let go", self._notes.at[1]
            if watched.handed_over(event, place, span):
                return "handed over", self._notes.at[1]
            if event.reset:
                return "put back", self._notes.at[1]
            found.add(
                Breach.TWO_OWNERS_OF_A_KEY,
                span,
                "keys were taken from a living owner that had not released them",
            )
            return "taken", self._notes.at[1]

        ended, begun = self.spans.change(place, disjoint, self._notes.at, _names(self._world, group.group_id), how)
        for old, new in begun:
            least = max(watched.made - 1, -1 if old is None else old.token)
            if not least < new.token <= group.generation:
                found.add(
                    Breach.FENCE,
                    old or new,
                    f"{new.client}/{new.instance} owns keys under the token {new.token}, not above {least}",
                )
        for kind, (span, why) in found.all.items():
            owner = (span.client or None, span.instance or None, span.token)
            self._notes.report(kind, place, why, owner if span.owned else NO_OWNER)
        self._end(ended)
        if pieces:
            watched.pieces[at] = pieces
        else:
            watched.pieces.pop(at, None)
        moved = sum(old is not None and old.owned and old.slot != new.slot for old, new in begun)
        return moved, sum(piece.revoked == group.generation == self._notes.at[0] for piece in pieces)

    def _check_state(self, pieces: Sequence[Piece], group: Group, found: _Faults) -> list[Piece]:
        """Check the state by itself; returns the pieces without those that overlap another."""
        disjoint: list[Piece] = []
        for piece in pieces:
            span = PieceSpan(
                *piece[:3], *_names(self._world, group.group_id)(piece.owner), piece.since, BEFORE, BEFORE, None
            )
            if piece.owner not in group.members or piece.target not in {NOBODY, *group.members}:
                found.add(
                    Breach.NO_MEMBER,
                    span,
                    f"slot {piece.owner}, to be {piece.target}'s, and one of them is no member",
                )
            if disjoint and piece.lo <= disjoint[-1].hi:
                found.add(Breach.TWO_OWNERS_OF_A_KEY, span, f"pieces overlap: {disjoint[-1]} and {piece}")
                continue
            disjoint.append(piece)
        return disjoint

    def _end(self, ended: Sequence[EndedPiece]) -> None:
        for each in ended:
            if each.span.since == BEFORE or each.span.looks_back:
                self.ended.append(each)
            else:
                self._notes.rows["assignments"].append(assignment_row(each.place, each.span, each))

    # -- checkpoints (section 7) -----------------------------------------------------------------------

    def _follow_checkpoints(
        self, watched: WatchedGroup, group: Group, event: GroupChange, message: Any, outcome: Outcome
    ) -> None:
        """Before owners and members are compared: what the record did to checkpoints, and with them to progress."""
        own, state, kind = watched.checkpoints, group.checkpoints, message.type
        if own is None or state is None:
            if state is not None and kind != BEGIN:
                self._about_group(Breach.CHECKPOINT, group.group_id, f"a {outcome.type} began its first checkpoint")
            watched.checkpoints = None if state is None else WatchedCheckpoints.of(group)
            if state is not None:
                self._holes.take_checkpoints(group.group_id)
            return
        if kind == ANSWER and outcome.code == codes.OK and message.barrier == own.barrier and event.slot is not None:
            own.note(event.slot, message)
        leavers: set[int] = set()
        if own.barrier >= 0 and (state.barrier is None or state.barrier.id != own.barrier):
            if any(kept.id == own.barrier for kept in state.kept):
                leavers = self._completed(watched, group, event, message)
            own.close()
        owners = {piece.owner for pieces in watched.pieces.values() for piece in pieces}
        event.reset = own.hold and bool(owners & (event.gone.keys() - leavers))
        if kind == BEGIN and state.barrier is not None:
            own.barrier = state.barrier.id
        elif kind == BEGIN or (kind == COMMIT and state.newest == self._notes.at[0]):
            keys = {(entry[0], entry[1]) for entry in message.entries} if kind == COMMIT else ()
            _made(own, group, state.newest, keys)
        elif kind == COMMIT:
            for entry, code in zip(message.entries, outcome.entries or (), strict=False):
                if entry[4] == START and code in codes.ACCEPTED:
                    own.initial[entry[0], entry[1]] = entry[5]
        elif kind == KEEP and message.action == RETIRE:
            own.drop(message.checkpoint)
        elif kind == ROLLBACK:
            event.reset = True
            self._went_back(watched, own, group, message)

    def _completed(self, watched: WatchedGroup, group: Group, event: GroupChange, message: Any) -> set[int]:
        """The open barrier is complete by this record; returns the slots that leave with it (X6)."""
        own = watched.checkpoints
        assert own is not None
        owners = [piece.owner for pieces in watched.pieces.values() for piece in pieces]
        if why := own.why_not_complete(owners):
            self._about_group(Breach.CHECKPOINT, group.group_id, f"checkpoint {own.barrier} is complete, and {why}")
        event.completed = replace(own, answers=dict(own.answers))
        event.gone.update(watched.leave_at_checkpoint(self._notes.at[1]))
        leavers = {slot for slot in own.leavers() if event.gone.get(slot) == ("left", self._notes.at[1])}
        if leavers and message.type != JOIN:
            event.reason = "left"
        if not leavers and not event.died and event.reason == "died":
            event.reason = "handed over"
        sets = {(entry[0], entry[1]) for entry in message.entries} if message.type == COMMIT else set()
        keys: set[tuple[str, int]] = set()
        for answered in own.answers.values():
            keys |= answered.keys.keys()
            if answered.message is not None:
                self._hand_in(watched, group, answered.message, sets)
            else:  # noted before this replay: the state says what it was
                for key in sorted(answered.keys.keys() - sets):
                    self._hand_in_before(watched, group, answered.sender, key)
        for key in keys:
            watched.adopt_progress(group, *key)
        _made(own, group, own.barrier, keys)
        return leavers

    def _hand_in(self, watched: WatchedGroup, group: Group, message: Any, sets: set[tuple[str, int]]) -> None:
        """The entries of an answer count now. sets: partitions whose position the same record sets."""
        touched = {}
        for topic, partition, lo, hi, _, through, ranges, _ in message.entries:
            at = (topic, partition)
            done = touched[at] = watched.done_of(at)
            token = _owner(watched, topic, partition, lo)[2]
            if ranges:
                self._holes.write_done(done, _by(message, token), "range", done.commit(ranges))
            elif through is not None and lo == 0 and hi == MAX_KEY_HASH and at not in watched.keyed:
                self._holes.write_done(done, _by(message, token), "done", done.through(through))
        for at in touched.keys() - sets:
            self._compare_done(watched, group, *at, message)

    def _hand_in_before(
        self, watched: WatchedGroup, group: Group, sender: tuple[str, str], key: tuple[str, int]
    ) -> None:
        kept = group.kept(*key)
        if kept is None or kept.progress.pieces is not None or key in watched.keyed:
            return
        done = watched.done_of(key)
        token = _owner(watched, *key, 0)[2]
        if kept.progress.stable > done.stable:
            self._holes.write_done(done, (*sender, token), "done", done.through(kept.progress.stable))
        if kept.progress.ranges:
            self._holes.write_done(done, (*sender, token), "range", done.commit(tuple(kept.progress.ranges)))

    def _went_back(self, watched: WatchedGroup, own: WatchedCheckpoints, group: Group, message: Any) -> None:
        """X8: what is done is what the checkpoint had."""
        target = message.checkpoint or own.newest
        if target not in own.deltas:
            self._about_group(Breach.CHECKPOINT, group.group_id, f"it went back to {target}, which it does not keep")
            watched.checkpoints = WatchedCheckpoints.of(group)
            return
        for key, done in sorted(own.go_back(target).items()):
            found = Done.in_state(group, key)
            if found != done:
                why = f"after going back to checkpoint {target} the state has {found}, and the checkpoint had {done}"
                self._notes.report(Breach.CHECKPOINT, (group.group_id, *key), why)
            watched.adopt_progress(group, *key)
            if key in watched.done:
                self._holes.write_position(watched.done[key], _by(message), "rolled back")

    # -- progress --------------------------------------------------------------------------------------

    def _compare_progress(self, watched: WatchedGroup, group: Group, message: Any, entries: Sequence[str]) -> None:
        """G14, G21: apply what was accepted, and compare the state with it."""
        client, member_id = message.client_id, message.member_id
        touched = {}
        for entry, code in zip(message.entries, entries, strict=True):
            topic, partition, lo, hi, _, through, ranges, _ = entry
            if code not in codes.ACCEPTED or (through is None and not ranges):
                continue
            at = (topic, partition)
            done = touched[at] = watched.done_of(at)
            token = _owner(watched, topic, partition, lo)[2]
            if through is None:
                self._holes.write_done(done, _by(message, token), "range", done.commit(ranges))
            elif not member_id:
                self._reposition(done, client, through)
                if code == codes.REPOSITIONED:
                    level = self._world.level if group.checkpoints is None else FIRST_LEVEL
                    self._holes.reposition(done.key, through, level)
                watched.keyed.pop(at, None)
                self._holes.write_position(done, _by(message), "repositioned")
            elif lo == 0 and hi == MAX_KEY_HASH and at not in watched.keyed:
                self._holes.write_done(done, _by(message, token), "done", done.through(through))
        for at in touched:
            self._compare_done(watched, group, *at, message)

    def _settled(self, watched: WatchedGroup, group: Group, message: Any) -> None:
        """What the present settle made done; the state says what it does to the progress."""
        place = (message.topic, message.partition)
        kept = group.kept(*place)
        if kept is None:
            return
        done = watched.done_of(place)
        if kept.progress.stable < done.stable:
            return
        for what, run in self._holes.made_done(done, kept.progress, "shared"):
            self._holes.write_done(done, _by(message), what, [run])
        watched.adopt_progress(group, *place)

    def _reposition(self, done: WatchedLease, client: str, through: int) -> None:
        if through < done.stable and self._notes.pauser(done.key[0]) != client:
            why = f"{client} set the position from {done.stable} back to {through} without having the group paused"
            self._notes.report(Breach.PROGRESS_BACK, done.key, why)
        done.reposition(through)

    def _compare_done(self, watched: WatchedGroup, group: Group, topic: str, partition: int, message: Any) -> None:
        """Compare the state's progress with the one before. message: the record that made more of it done, by key."""
        at = (topic, partition)
        done, kept = watched.done[at], group.kept(topic, partition)
        keyed = watched.keyed.get(at, [(0, MAX_KEY_HASH, done.stable)])
        owner = _owner(watched, topic, partition, 0)
        if kept is None:
            why = f"the state knows no progress; stable was {done.stable}"
            self._notes.report(Breach.PROGRESS_BACK, done.key, why, owner)
        else:
            progress = kept.progress
            if progress.stable < done.stable or _is_less(progress.done_through, keyed):
                why = f"stable is {progress.stable}, and was {done.stable}; by key: {_text(progress.done_through)}"
                self._notes.report(Breach.PROGRESS_BACK, done.key, f"{why}, and was {_text(keyed)}", owner)
            elif any(not all(map(progress.has_passed, ends)) for ends in done.ranges.pairs()):
                why = "offsets that were done out of order are so no more"
                self._notes.report(Breach.PROGRESS_BACK, done.key, why, owner)
            elif progress.stable > done.stable and message is not None:
                self._holes.write_done(done, _by(message), "shared", done.through(progress.stable))
        watched.adopt_progress(group, topic, partition)

    def _about_group(self, kind: Breach, group_id: str, detail: str) -> None:
        self._notes.report(kind, (group_id, None, None), detail)


def _names(world: World, group_id: str) -> Callable[[int], tuple[str, str]]:
    """(client, instance) of a slot, by the state."""
    group = world.group(group_id)

    def names(slot: int) -> tuple[str, str]:
        member = None if group is None else group.members.get(slot)
        return ("", "") if member is None else (member.client_id, member.instance_id)

    return names


def _by(message: Any, token: int | None = None) -> tuple[str, str, int | None]:
    """(client, instance, token) of a record."""
    return message.client_id, message.instance_id, token


def _settler(watched: WatchedGroup, event: GroupChange, message: Any, pauser: str | None) -> SettlingSender:
    """Who settles (H4): a member has the keys of the pieces that it owned before, in a generation that it knew."""
    names = (message.client_id, message.instance_id)
    if event.slot is None:
        makes = pauser == message.client_id and not watched.members
        return SettlingSender(*names, makes=makes, is_operator=True, redoes=message.version >= REDO_LEVEL)
    pieces = watched.pieces.get((message.topic, message.partition), ())
    mine = [each for each in pieces if each.owner == event.slot and each.since <= event.generation]
    return SettlingSender(*names, keys=[(each.lo, each.hi) for each in mine], makes=True)


def _owner(watched: WatchedGroup, topic: str, partition: int, key: int) -> tuple[Any, Any, Any]:
    """The owner of a key before this record."""
    for piece in watched.touched(topic, partition, key, key):
        if (member := watched.members.get(piece.owner)) is not None:
            return member.client, member.instance, piece.since
    return NO_OWNER


def _left_before(
    watched: WatchedGroup, group: Group | None, message: Any, outcome: Outcome, log_time: int
) -> dict[int, tuple[str, int]]:
    """Members that left at a barrier that was closed before the record was judged (X3): not by its own answer."""
    own, state = watched.checkpoints, None if group is None else group.checkpoints
    if own is None or state is None or own.barrier < 0 or state.find(own.barrier) is None:
        return {}
    is_its_answer = message.type == ANSWER and outcome.code == codes.OK and message.barrier == own.barrier
    return {} if is_its_answer else watched.leave_at_checkpoint(log_time)


def _made(own: WatchedCheckpoints, group: Group, checkpoint: int, keys: Iterable[tuple[str, int]]) -> None:
    """A checkpoint is complete: it has what the state has of these partitions."""
    assert group.checkpoints is not None
    kept = [each.id for each in group.checkpoints.kept]
    own.complete(checkpoint, {key: Done.in_state(group, key) for key in keys}, kept)


class _Faults:
    """The faults of one partition: each kind once, for any number of its keys."""

    def __init__(self) -> None:
        self.all: dict[Breach, tuple[PieceSpan, str]] = {}

    def add(self, kind: Breach, span: PieceSpan, why: str) -> None:
        """Add a fault of these keys."""
        self.all.setdefault(kind, (span, why))


def _is_less(now: Sequence[KeyPiece], before: Sequence[KeyPiece]) -> bool:
    """Whether something that was done for a key no longer is; both cover all keys."""
    place = 0
    for lo, hi, done in before:
        while now[place][1] < lo:
            place += 1
        for first, _, there in itertools.islice(now, place, None):
            if first > hi:
                break
            if there < done:
                return True
    return False


def _text(pieces: Sequence[KeyPiece]) -> str:
    return ", ".join(f"{done} for {lo} … {hi}" for lo, hi, done in pieces[:4])
