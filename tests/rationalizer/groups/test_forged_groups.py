"""Groups of a snapshot to which no replay leads: each way in which they are refused (S1)."""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from msgpack import packb, unpackb

from rationalizer import Record, SnapshotError, Upgrade, World, decode, encode
from rationalizer import state as state_module
from rationalizer.groups import canonical
from rationalizer.groups.checkpoints import Checkpoints, Kept, Version, saved_nowhere
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.limits import MAX_KEY_HASH, MAX_KEY_PIECES, MAX_OLD_WEIGHT
from rationalizer.progress import Progress
from rationalizer.routing import route_group
from rationalizer.wire.codec import RejectedValueError
from rationalizer.wire.records import (
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    JoinGroup,
    LeaveGroup,
)
from rationalizer.wire.wellformed import LET_GO, PERIODIC, PINNED, START
from tests.rationalizer.group_values import EDGES, GOOD, level_of
from tests.rationalizer.log import COMPILED
from tests.rationalizer.oracle import judge, shortest
from tests.rationalizer.oracle.spelling import EVERYTHING_ODD, paths, replaced, spell

TOP = MAX_KEY_HASH
#: What is a mark in CP 0 of 2.
MARK = next(name for name in (f"m{number}" for number in range(99)) if route_group(name, 2) == 1)
HOME = next(name for name in (f"h{number}" for number in range(99)) if route_group(name, 2) == 0)


def _state() -> list[Any]:
    """A state with something in each part of a group: two sharers, revoked pieces, a deleted topic, progress."""
    world = World(0, 2)

    def append(record: Any) -> Any:
        outcome = world.apply(world.next_offset, 1_000 + world.next_offset, encode(record))
        assert outcome.accepted, outcome
        return outcome

    append(Upgrade("1", "admin", HOME, 2))
    append(ConfigureGroup("1", "admin", MARK, ()))
    append(ConfigureGroup("1", "admin", HOME, (("accept_range_fetch", ("t", "u")),)))
    ids = []
    for client, pattern, topics in (("a", "", (("t", 1), ("u", 2))), ("b", "^t", (("t", 1),)), ("c", "", (("v", 1),))):
        outcome = append(JoinGroup("1", client, HOME, "", world.next_offset, 10_000, "sticky", True, pattern, topics))
        ids.append(outcome.member)
    group = world.group(HOME)
    assert group is not None
    half = group.pieces["t"][0][0].hi
    append(
        CommitOffsets(
            "1",
            "a",
            HOME,
            ids[0],
            group.generation,
            False,
            (
                CommitEntry("t", 0, action=START, through=5),
                CommitEntry("t", 0, 0, half, through=9, metadata="m"),
                CommitEntry("t", 0, ranges=((20, 21), (30, 30))),
                CommitEntry("t", 0, half + 1, TOP, LET_GO),
            ),
        )
    )
    append(LeaveGroup("1", "c", HOME, ids[2], 0))
    outcome = append(JoinGroup("1", "d", HOME, "", world.next_offset, 10_000, "sticky", True, "", (("u", 2),)))
    found: list[Any] = unpackb(world.snapshot())
    assert World.restore(packb(found), 2).snapshot() == world.snapshot()
    return found


STATE = _state()
#: Where the groups are among their kind: HOME is before MARK.
HERE, OTHER = (7, 0), (7, 1)
GENERATION, STRATEGY, SETTINGS, TOPICS, MEMBERS, PARTITIONS = range(1, 7)
MEMBER = (*HERE, MEMBERS, 0)
PARTITION = (*HERE, PARTITIONS, 0)
PIECE = (*PARTITION, 2, 0)
PROGRESS = (*PARTITION, 3)


def _at(path: tuple[int, ...]) -> Any:
    item: Any = STATE
    for step in path:
        item = item[step]
    return item


def _with(*changes: tuple[tuple[int, ...], Any]) -> bytes:
    state = copy.deepcopy(STATE)
    for path, value in changes:
        item: Any = state
        for step in path[:-1]:
            item = item[step]
        item[path[-1]] = value
    data: bytes = packb(state)
    return data


def _without(path: tuple[int, ...]) -> bytes:
    rows = list(_at(path[:-1]))
    del rows[path[-1]]
    return _with((path[:-1], rows))


def _twice(path: tuple[int, ...]) -> bytes:
    rows = list(_at(path[:-1]))
    return _with((path[:-1], [*rows[: path[-1] + 1], rows[path[-1]], *rows[path[-1] + 1 :]]))


#: As a piece is whose owner is not its target.
REVOKED = ((*PIECE, 5), _at((*HERE, GENERATION)))
UUID = "00000000-0000-5000-8000-000000000000"

#: Fault → the state with it, and a word of the message.
FORGED: dict[str, tuple[bytes, str]] = {
    "level 1": (_with(((4,), 1)), "below level 2"),
    "groups out of order": (_with(((7,), [_at(OTHER), _at(HERE)])), "groups are not sorted"),
    "too many partitions": (_with(((*HERE, TOPICS), [["t", 1], ["u", 100_000]])), "all partitions of its topics"),
    "a part too few": (_with((HERE, _at(HERE)[:-1])), "7 parts"),
    "no name": (_with(((*HERE, 0), "")), "group_id of a group must"),
    "a generation to come": (_with(((*HERE, GENERATION), _at((2,)))), "generation"),
    "no list": (_with(((*HERE, MEMBERS), None)), "members of a group must be an array"),
    "members out of order": (_with(((*HERE, MEMBERS), _at((*HERE, MEMBERS))[::-1])), "members of .* are not sorted"),
    "two of a client": (_with(((*MEMBER, 2), "b")), "one client_id"),
    "two of an id": (_with(((*MEMBER, 1), _at((*HERE, MEMBERS, 1, 1)))), "one member_id"),
    "two of a join": (_with(((*MEMBER, 9), _at((*HERE, MEMBERS, 1, 9)))), "one joined"),
    "another strategy": (_with(((*HERE, STRATEGY), "dice")), "strategy"),
    "another strategy set": (
        _with(((4,), 5), ((*HERE, SETTINGS), [*_at((*HERE, SETTINGS)), "range"])),
        "another strategy set",
    ),
    "no strategy": (_with(((*HERE, STRATEGY), None)), "strategy"),
    "partitions out of order": (_with(((*HERE, PARTITIONS), _at((*HERE, PARTITIONS))[::-1])), "partitions of"),
    "a mark that is more": (_with(((*OTHER, SETTINGS), [True, ["t"], 1_800_000, 60_000])), "another of 2 CPs"),
    "three settings": (_with(((*HERE, SETTINGS), [True, [], 100])), "settings of .* has not its 4 parts"),
    "a setting of another type": (
        _with(((*HERE, SETTINGS), [1, [], 100, 1])),
        "accept_individual_commit",
    ),
    "shared topics out of order": (_with(((*HERE, SETTINGS), [True, ["u", "t"], 100_000, 1])), "shared topics"),
    "a member of nine": (_with((MEMBER, _at(MEMBER)[:-1])), "member of .* has not"),
    "a slot of no rebalance": (_with(((*MEMBER, 0), _at((*HERE, GENERATION)) + 1)), "no rebalance"),
    "no client": (_with(((*MEMBER, 2), "")), "client_id of a member"),
    "an odd id": (_with(((*MEMBER, 1), f"{HOME}-x")), "odd member_id"),
    "an id of another version": (_with(((*MEMBER, 1), f"{HOME}-{UUID.replace('-5', '-4')}")), "odd member_id"),
    "an id of another group": (_with(((*MEMBER, 1), f"x-{UUID}")), "odd member_id"),
    "a session too short": (_with(((*MEMBER, 4), 99)), "session_timeout_ms of a member"),
    "a share that is a number": (_with(((*MEMBER, 5), 1)), "allow_key_share of a member"),
    "topics that are none": (_with(((*MEMBER, 7), [""])), "topics of member"),
    "no topics, no pattern": (_with(((*MEMBER, 7), [])), "topics of member"),
    "topics out of order": (_with(((*MEMBER, 7), ["u", "t"])), "topics of member .* are not sorted"),
    "a beat to come": (_with(((*MEMBER, 8), _at((3,)) + 1)), "last beat"),
    "a join to come": (_with(((*MEMBER, 9), _at((2,)))), "yet to join"),
    "a join before its slot": (_with(((*MEMBER, 9), 0)), "yet to join"),
    "a topic of three": (_with(((*HERE, TOPICS, 0), ["t", 1, 1])), "topic of"),
    "a count too large": (_with(((*HERE, TOPICS, 0), ["t", 100_001])), "topics of .* are invalid"),
    "counts out of order": (_with(((*HERE, TOPICS), _at((*HERE, TOPICS))[::-1])), "topics of .* are not sorted"),
    "a topic of nobody": (_with(((*HERE, TOPICS), [*_at((*HERE, TOPICS)), ["z", 0]])), "not those that"),
    "a partition of three": (_with((PARTITION, _at(PARTITION)[:-1])), "partition of"),
    "no such partition": (_with(((*PARTITION, 1), -1)), "partition of a partition of"),
    "nothing of it": (_with(((*PARTITION, 2), []), (PROGRESS, None)), "has nothing"),
    "beyond all counts": (
        _with(((*HERE, PARTITIONS), [*_at((*HERE, PARTITIONS)), ["w", 100_000, [_at(PIECE)], None]])),
        "can't be assigned",
    ),
    "pieces that overlap": (_with(((*PARTITION, 2), [_at(PIECE), *_at((*PARTITION, 2))])), "overlap"),
    "keys of nobody": (_without((*PARTITION, 2, 0)), "do not cover"),
    "a partition left out": (_without((*HERE, PARTITIONS, 1)), "list all partitions"),
    "a piece of five": (_with((PIECE, _at(PIECE)[:-1])), "piece of"),
    "a piece turned round": (_with(((*PIECE, 1), -1)), "no range"),
    "an owner who is nobody": (_with(((*PIECE, 2), 1)), "owner who is no member"),
    "a target who is nobody": (_with(((*PIECE, 4), 1), REVOKED), "does not subscribe"),
    "no target": (_with(((*PIECE, 4), -1), REVOKED), "does not subscribe"),
    "a target of another topic": (_with(((*PIECE, 4), _at((*HERE, MEMBERS, 2, 0))), REVOKED), "does not subscribe"),
    "owned since before it joined": (_with(((*PIECE, 3), 1)), "owned since it could not be"),
    "owned since later": (_with(((*PIECE, 3), _at((*HERE, GENERATION)) + 1)), "owned since it could not be"),
    "revoked, and its owner's": (_with(((*PIECE, 5), _at((*PIECE, 3)))), "is revoked, and is not"),
    "revoked before it was owned": (
        _with(((*PIECE, 4), _at((*HERE, MEMBERS, 1, 0))), ((*PIECE, 5), _at((*PIECE, 3)))),
        "revoked when it could not be",
    ),
    "progress of three": (_with((PROGRESS, _at(PROGRESS)[:-1])), "progress of"),
    "a start below all": (_with(((*PROGRESS, 0), -2)), "initial of a progress of"),
    "metadata too long": (_with(((*PROGRESS, 3), "x" * 256)), "metadata"),
    "a hole without a key": (
        _with(((4,), 4), (PROGRESS, [*_at(PROGRESS), [[5, 5, -1, 0, 1, -1, None]]])),
        "hole without a key",
    ),
    "key pieces with gaps": (_with(((*PROGRESS, 1), _at((*PROGRESS, 1))[1:])), "gaps"),
    "ranges that touch": (_with(((*PROGRESS, 2), [[20, 21], [22, 30]])), "one form"),
    "neighbours that are one": (
        _with(((*PARTITION, 2), [[0, 9, *_at(PIECE)[2:]], [10, *_at(PIECE)[1:]], *_at((*PARTITION, 2))[1:]])),
        "canonical form",
    ),
    "the same twice": (_twice(HERE), "groups are not sorted"),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_no_log_leads_to_is_refused(name: str) -> None:
    data, word = FORGED[name]
    with pytest.raises(SnapshotError, match=word):
        World.restore(data, 2)


def _many_members() -> bytes:
    row = _at(MEMBER)
    rows = []
    for number in range(1_001):
        unique = f"{number:08x}{UUID[8:]}"
        rows.append([number, f"{HOME}-{unique}", f"c{number}", "1", 1_000, True, "", row[7], 0, number])
    return _with(((2,), 5_000), ((*HERE, GENERATION), 4_000), ((*HERE, MEMBERS), rows))


def _many_key_pieces() -> bytes:
    edges = [*range(2_000), TOP]
    pieces = [[lo, hi - 1, 5 + place % 2] for place, (lo, hi) in enumerate(pairwise([*edges, TOP + 1]))]
    return _with(((*PROGRESS, 1), pieces), ((*PROGRESS, 2), []))


def _two_groups_of_many() -> bytes:
    names = [name for name in (f"h{number}" for number in range(99)) if route_group(name, 2) == 0][:2]
    groups = []
    for name in names:
        member = [1, f"{name}-{UUID}", "a", "1", 1_000, True, "", ["t"], 0, 1]
        partitions = [["t", number, [[0, TOP, 1, 1, 1, -1]], None] for number in range(50_001)]
        groups.append([name, 1, "range", [True, [], 1_800_000, 60_000], [["t", 50_001]], [member], partitions])
    return _with(((7,), groups))


LIMITS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a member too many": (_many_members, "too many members"),
    "a piece of done_through too many": (_many_key_pieces, "2,000 pieces"),
    "a partition too many": (_two_groups_of_many, "too many partitions"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_beyond_a_limit_is_refused(name: str) -> None:
    make, word = LIMITS[name]
    with pytest.raises(SnapshotError, match=word):
        World.restore(make(), 2)


@pytest.mark.skipif(COMPILED, reason="its insides can't be replaced")
def test_each_way_to_refuse_a_group_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing: set[int] = set()

    def noting(check: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any) -> Any:
            try:
                return check(*arguments)
            except SnapshotError:
                refusing.add(sys._getframe(1).f_lineno)
                raise

        return checked

    names = ("want", "want_ascending")
    for name in names:
        monkeypatch.setattr(canonical, name, noting(getattr(state_module, name)))
    for data in [*(data for data, _ in FORGED.values()), *(make() for make, _ in LIMITS.values())]:
        with pytest.raises(SnapshotError):
            World.restore(data, 2)
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(canonical))) if isinstance(node, ast.Call)]
    first = canonical.load_groups.__code__.co_firstlineno  # those of checkpoints stand above
    checks = {node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id in names}
    assert {line for line in checks if line > first} - refusing == set()


def test_a_group_of_both_kinds_is_refused() -> None:
    world = World(0, 1)
    world.apply(0, 1, encode(ClaimingPartition("1", "a", HOME, "t", 0, 1_000)))
    state = unpackb(world.snapshot())
    state[4], state[7] = 2, [[HOME, 0, None, [True, [], 1_800_000, 60_000], [], [], []]]
    with pytest.raises(SnapshotError, match="both claimed and coordinated"):
        World.restore(packb(state), 1)


# Limits of checkpoints: the weight of older versions (X6), pieces of states (X5), and what a snapshot lists (S2).


def version(checkpoint: int, ranges: int) -> Version:
    progress = Progress()
    if ranges:
        progress.commit([(2 * number + 5, 2 * number + 5) for number in range(ranges)])
    return Version(checkpoint, None, progress, None)


def test_the_oldest_periodic_checkpoints_go_where_older_versions_weigh_too_much() -> None:
    checkpoints = Checkpoints(64, False)
    checkpoints.complete(Kept(1, 0, PINNED, {("t", 0): version(1, 0)}))
    each = version(2, 60_000).weight
    for number in range(2, 40):
        checkpoints.complete(Kept(number, 0, PERIODIC, {("t", 0): version(number, 60_000)}))
    fit = (MAX_OLD_WEIGHT - 4) // each
    assert [kept.id for kept in checkpoints.kept] == [1, *range(39 - fit, 40)]
    assert checkpoints.old_weight == 4 + fit * each
    assert checkpoints.size() == 2 * (fit + 2)


def test_what_is_dropped_or_undone_is_weighed_no_more() -> None:
    checkpoints = Checkpoints(64, False)
    for number in range(1, 6):
        kind = PINNED if number == 1 else PERIODIC
        checkpoints.complete(Kept(number, 0, kind, {("t", number % 2): version(number, number)}))
    for checkpoint in (3, 2):
        checkpoints.drop(checkpoint)
        assert checkpoints.old_weight == weight(checkpoints)
    assert checkpoints.go_back(1) == {("t", 0), ("t", 1)}
    assert (checkpoints.old_weight, weight(checkpoints)) == (0, 0)
    assert {key: found.checkpoint for key, found in checkpoints.seen.items()} == {("t", 1): 1}


def weight(checkpoints: Checkpoints) -> int:
    """Of all versions that the newest does not see, by counting."""
    seen = set(map(id, checkpoints.seen.values()))
    found = [each for several in checkpoints.all_versions().values() for each in several]
    return sum(each.weight for each in found if id(each) not in seen)


@pytest.mark.parametrize("more", [0, 1])
def test_states_have_room_for_no_more_pieces_than_done_through(more: int) -> None:
    states = saved_nowhere()
    for number in range((MAX_KEY_PIECES - 2) // 2):
        states.commit_key_range(4 * number + 1, 4 * number + 1, 7)
    assert states.piece_count == MAX_KEY_PIECES - 1
    if more:
        states.commit_key_range(2**60, 2**63 - 1, 7)
    assert states.has_room(2**59, 2**59, 9) == (states.piece_count + 2 <= MAX_KEY_PIECES)
    assert states.has_room(1, 1, 9)


# -- Records of coordinated groups with an odd value in any one place are read as by the oracle (E2) --------------


HEAD = ["1", "a", "g"]


def _outcome(value: bytes) -> tuple[str | None, str | None]:
    """The code, if it is one of reading, and the name of the type."""
    world = World(0, 1)
    world.apply(0, 0, encode(Upgrade("1", "a", "g", SUPPORTED_LEVEL)))
    outcome = world.apply(1, 0, value)
    of_reading = outcome.code in ("MALFORMED", "UNSUPPORTED_VERSION", "UNKNOWN_TYPE")
    return (outcome.code if of_reading else None), outcome.type


@pytest.mark.parametrize("kind", GOOD)
def test_e6_an_odd_thing_in_each_place(kind: int) -> None:
    good: list[Any] = [level_of(kind), kind, *HEAD, *GOOD[kind]]
    for path in paths(good):
        for odd in EVERYTHING_ODD:
            value = spell(replaced(good, path, odd))
            judged = judge(value, SUPPORTED_LEVEL, 0, 1)
            assert _outcome(value) == (judged.code, judged.type), (path, odd)


def test_e2_each_bound_of_each_field_and_one_beyond() -> None:
    for kind, fields, fits in EDGES:
        level = level_of(kind)
        value = shortest([level, kind, *HEAD, *fields])
        code, name = _outcome(value)
        assert (code is None) == fits, (kind, str(fields)[:200])
        assert name is not None
        if fits:
            record = decode(value, level)
            assert isinstance(record, Record)
            assert decode(encode(record), level) == record
        else:
            with pytest.raises(RejectedValueError):
                decode(value, level)
        with pytest.raises(RejectedValueError):
            decode(value, level - 1)
