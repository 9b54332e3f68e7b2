"""The search: from a few important situations, every order of moves, to some depth."""

from __future__ import annotations

import gc
import multiprocessing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TypeVar

from rationalizer import decode
from tests.campaigns.small_scope.engine import member as members
from tests.campaigns.small_scope.engine.member import HI, LENGTH, PARTITIONS, Entry, Shape
from tests.campaigns.small_scope.engine.rules import accounted, check, check_all_told
from tests.campaigns.small_scope.engine.situation import (
    Move,
    MoveKind,
    Situation,
    Truth,
    begin,
    carry_out,
    forget,
    joined,
    moves,
)
from tests.campaigns.small_scope.records import BrokenError

T = TypeVar("T")

#: Of the situations visited, one in this number is continued without faults, to see that all is owned and done in time.
FINISHED_ONE_IN = 1_999
#: Within this number of HI.
FINISHED_WITHIN = 8


@dataclass(frozen=True, slots=True)
class Scenario:
    """The start and limits of a search."""

    name: str
    about: str
    #: Members that have shared the partitions out when the search begins, and handled a message each; those that start
    #: in that very moment.
    settled: tuple[str, ...]
    joining: tuple[str, ...]
    shape: Shape
    #: A turn reads everything, and all sent records land together.
    is_coarse: bool
    depth: int
    #: How often something may be lost or a process killed, and how often time may pass.
    faults: int = 1
    waits: int = 3


_ONCE = Shape(at_most_once=True)
_CALLBACKS = Shape(callbacks=True)

SCENARIOS = (
    Scenario("start", "two members start at once, record by record", (), ("a", "b"), Shape(), False, 7),
    Scenario("held", "two members hold one partition each, record by record", ("a", "b"), (), Shape(), False, 7),
    Scenario("join", "two members hold one partition each, a third one comes", ("a", "b"), ("c",), Shape(), True, 6),
    Scenario("handover", "one holds both, with callbacks, another one comes", ("a",), ("b",), _CALLBACKS, True, 7),
    Scenario("once", "at most once, two members hold one partition each", ("a", "b"), (), _ONCE, True, 7),
    Scenario("once start", "at most once, two members start at once", (), ("a", "b"), _ONCE, True, 8),
    Scenario("latest", "two members start at the latest message", (), ("a", "b"), Shape(start="latest"), True, 8),
)


@dataclass(slots=True)
class Found:
    """The result of one scenario."""

    scenario: Scenario
    depth: int = 0
    #: Situations visited, no two alike, by depth.
    by_depth: list[int] = field(default_factory=lambda: [1])
    #: Moves carried out, by kind.
    moves: Counter[str] = field(default_factory=Counter)
    #: (record, outcome) in the log.
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Effects of the engines: how often each was computed.
    effects: Counter[str] = field(default_factory=Counter)
    #: Situations that were continued without faults.
    finished: int = 0

    @property
    def states(self) -> int:
        """Situations visited in all."""
        return sum(self.by_depth)

    def tell(self) -> str:
        """For people."""
        deepest = ", ".join(f"{states:,}" for states in self.by_depth)
        return (
            f"{self.scenario.name:10} {self.scenario.about}: depth {self.depth}, {self.states:,} states, "
            f"{self.moves.total():,} moves, {self.finished:,} gone on from to the end\n{'':10} by depth: {deepest}"
        )


def begun(scenario: Scenario) -> Situation:
    """The situation in which a scenario's search begins."""
    situation = begin(scenario.shape, True)
    for client in scenario.settled:
        situation = _calm(joined(situation, client), 4)
    for who in range(len(scenario.settled)):
        situation = _worked(situation, who)
    for client in scenario.joining:
        situation = joined(situation, client)
    return replace(situation, is_coarse=scenario.is_coarse, faults=scenario.faults, waits=scenario.waits)


def _worked(situation: Situation, who: int) -> Situation:
    """A member's user has handled one message, and the log knows."""
    before = len(situation.handed_out)
    for _ in range(3):  # at most once, messages are claimed first
        situation = step(situation, Move(MoveKind.TAKE, who))
        if len(situation.handed_out) > before:
            break
        situation = _calm(situation, 1)
    if situation.members[who].in_hand:
        situation = step(situation, Move(MoveKind.DONE, who))
    return _calm(situation, 2)


def step(situation: Situation, move: Move) -> Situation:
    """The situation after a move, checked; the same one if nothing changes."""
    after, moved = carry_out(situation, move)
    if after is situation:
        return situation
    check(situation, after, moved)
    return accounted(situation, after, moved)


_CALM = frozenset([MoveKind.LATE, MoveKind.LAND, MoveKind.TURN, MoveKind.RETURN])
_AT_WORK = _CALM | {MoveKind.TAKE, MoveKind.DONE}
#: Far more moves than one instant ever has.
_MOVES_AT_ONCE = 500


def _calm(situation: Situation, beats: int, kinds: Collection[MoveKind] = _CALM) -> Situation:
    """This many thirds of HI without faults: what can happen does, at once."""
    situation = replace(situation, is_coarse=True, faults=0, waits=0)
    for _ in range(beats):
        for _ in range(_MOVES_AT_ONCE):
            comes = (step(situation, move) for move in moves(situation) if move.kind in kinds)
            after = next((after for after in comes if after is not situation), None)
            if after is None:
                break
            situation = after
        else:
            raise BrokenError(f"{_MOVES_AT_ONCE} moves at one instant, and no end of it: {list(moves(situation))}")
        situation = replace(situation, now=situation.now + HI // 3)
    return situation


def finish(situation: Situation) -> None:
    """Without faults and with working users, all is owned and all messages are done within a few HI."""
    after = _calm(situation, 3 * FINISHED_WITHIN, _AT_WORK)
    for partition in PARTITIONS:
        lease = after.truth.lease(partition)
        if lease is None or lease.stable < LENGTH - 1 or lease.instance not in [x.instance for x in after.members]:
            raise BrokenError(f"not owned, or not done, {FINISHED_WITHIN} HI after the last fault: {lease}")
    if after.shape.at_most_once:
        check_all_told(after)


def search(scenario: Scenario, depth: int | None = None, most: int | None = None) -> Found:
    """Visit every situation up to a depth (None: the scenario's), or at most a number; BrokenError has the moves."""
    found, last = Found(scenario), scenario.depth if depth is None else depth
    forget()
    first = begun(scenario)
    seen = {first.key()}
    frontier = [(first, b"")]
    while frontier and found.depth < last:
        found.depth += 1
        found.by_depth.append(0)
        following: list[tuple[Situation, bytes]] = []
        for situation, way in frontier:
            for after, path in _following(situation, way, found):
                if (key := after.key()) in seen:
                    continue
                seen.add(key)
                found.by_depth[-1] += 1
                if found.depth < last:
                    following.append((after, path))
                if len(seen) % FINISHED_ONE_IN == 1:
                    _told(partial(finish, after), scenario, path)
                    found.finished += 1
            if most is not None and len(seen) >= most:
                break
        if most is not None and len(seen) >= most:
            break
        frontier = following
        gc.freeze()  # so that kept objects are not scanned repeatedly
    gc.unfreeze()
    found.effects = Counter(members.reached)
    return found


def _following(situation: Situation, way: bytes, found: Found) -> Iterator[tuple[Situation, bytes]]:
    """What can come next, each with the moves that led there: of each, its place in `moves`."""
    for choice, move in enumerate(moves(situation)):
        path = way + bytes([choice])
        after = _told(partial(step, situation, move), found.scenario, path)
        found.moves[move.kind.name] += 1
        if after is not situation:
            found.outcomes.update(truth.last for truth in after.truths[len(situation.log) + 1 :])
            yield after, path


def _told(work: Callable[[], T], scenario: Scenario, path: bytes) -> T:
    """What is raised has the moves that led there."""
    try:
        return work()
    except Exception as error:
        error.add_note("\n".join(trail(scenario, path)))
        raise


def trail(scenario: Scenario, path: bytes) -> Iterator[str]:
    """The moves of a path, one a line, with what each one wrote to the log."""
    situation = begun(scenario)
    yield f"  {scenario.about}; in the log: {', '.join(map(_line, situation.log)) or 'nothing'}"
    for choice in path:
        move = next(islice(moves(situation), choice, None))
        who = situation.members[move.who].instance if move.kind not in _OF_NOBODY else ""
        after, moved = carry_out(situation, move)
        wrote = [f"{_line(entry)}: {truth.last[1]}" for entry, truth in _landed(situation, after)]
        out = [f"{moved.handed_out}"] if moved is not None and moved.handed_out is not None else []
        yield f"  {after.now:5} ms: {who:3} {move.kind.value}{''.join(f'; {x}' for x in (*wrote, *out))}"
        situation = accounted(situation, after, moved)


_OF_NOBODY = frozenset([MoveKind.LATE, MoveKind.DUE, MoveKind.TRUST, MoveKind.STALE])


def _landed(before: Situation, after: Situation) -> Iterable[tuple[Entry, Truth]]:
    return zip(after.log[len(before.log) :], after.truths[len(before.log) + 1 :], strict=True)


def _line(entry: Entry) -> str:
    record = decode(entry[2])
    return f"{entry[0]} {type(record).__name__}{(record.instance_id, *record.own_fields())}"


def explore_engines(
    depth: int | None = None, most: int | None = None, jobs: int = 1, names: Collection[str] = ()
) -> Iterator[Found]:
    """Search the scenarios, each in its own process; names: only these."""
    chosen = [scenario for scenario in SCENARIOS if not names or scenario.name in names]
    one = partial(search, depth=depth, most=most)
    if jobs == 1:
        yield from map(one, chosen)
        return
    with multiprocessing.get_context("fork").Pool(jobs, gc.freeze, maxtasksperchild=1) as pool:
        yield from pool.imap(one, chosen, chunksize=1)
