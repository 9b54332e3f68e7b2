"""Records of section 5 with one field at each bound, and one step beyond, valid or not by E2 and section 5."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.rationalizer.oracle import shortest
from tests.rationalizer.oracle.spelling import replaced
from tests.rationalizer.oracle.world import Who
from tests.rationalizer.strategies import LARGEST, Choose

ENTRY = ["t", 0, 0, LARGEST, 0, 5, [], None]

#: The fields of one good record of each type.
GOOD: dict[int, list[Any]] = {
    16: ["", 9, 1000, "sticky", False, "^t", [["t", 2]]],
    17: ["g-1", 3],
    18: ["g-1", 3],
    19: ["g-1", 3, False, [ENTRY, ["u", 1, 7, 9, 1, None, [[3, 4], [4, 9]], "m"]]],
    20: ["g-1", [["t", 2], ["u", 0]]],
    21: [{"max_individual_commits": 5}],
    23: [0, 1_000, 3, False],
    24: ["g-1", 3, 9, 1, [ENTRY, ["u", 1, 7, 9, 0, None, [[3, 4], [4, 9]], "m"]]],
    25: [3, 0],
    27: [9, 1],
}
#: The place of the entries in those that have some.
ENTRIES = {19: 3, 24: 4}


def level_of(kind: int) -> int:
    """The level that added the type, and the version that it is written with."""
    return 2 if kind < 22 else 3


NO_BOOLS: tuple[Any, ...] = (0, 1, None, "true")
NO_INTS: tuple[Any, ...] = (None, True, "1", [])
NO_TEXTS: tuple[Any, ...] = (None, 1, True, [], "\x00", "a\x1f", "\x7f", "a\x9f")
NO_LISTS: tuple[Any, ...] = (None, 1, "x", {}, True)


def texts(least: int, most: int) -> tuple[list[Any], list[Any]]:
    """Texts of valid lengths, and others; lengths are in bytes."""
    good = ["x" * most, "é" * (most // 2), " ", *([""] if least == 0 else [])]
    return good, [*NO_TEXTS, "x" * (most + 1), "é" * (most // 2 + 1), *([""] if least else [])]


def ints(least: int, most: int) -> tuple[list[Any], list[Any]]:
    """Both ends, and one beyond each."""
    return [least, most], [*NO_INTS, least - 1, most + 1]


def many(item: Any, count: int) -> list[Any]:
    """A list of equal items."""
    return [item] * count


COUNTS = ints(0, 100_000)
OFFSETS = ints(0, LARGEST)
LISTS_OF_TOPICS: tuple[list[Any], list[Any]] = (
    [many(["t", 1], 10_000), [["t", 1], ["t", 2]], *([["t", count]] for count in COUNTS[0])],
    [
        *(*NO_LISTS, many(["t", 1], 10_001), ["t"], [["t"]], [["t", 1, 1]], [[1, "t"]], [["", 1]], [["x" * 250, 1]]),
        *([["t", count]] for count in COUNTS[1]),
    ],
)
MEMBER_ID = texts(1, 292)
#: (type, index of the field) → valid and invalid values.
FIELDS: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {
    (16, 0): texts(0, 292),
    (16, 1): OFFSETS,
    (16, 2): ints(100, 2**31 - 1),
    (16, 3): texts(1, 255),
    (16, 4): ([True, False], [*NO_BOOLS]),
    (16, 5): (["x" * 1000, "é" * 500, "", "^"], [*NO_TEXTS, "x" * 1001, "é" * 501]),
    (16, 6): ([[], *LISTS_OF_TOPICS[0]], LISTS_OF_TOPICS[1]),
    (17, 0): MEMBER_ID,
    (17, 1): OFFSETS,
    (18, 0): MEMBER_ID,
    (18, 1): OFFSETS,
    (19, 0): texts(0, 292),
    (19, 1): OFFSETS,
    (19, 2): ([True, False], [*NO_BOOLS]),
    (23, 0): OFFSETS,
    (23, 1): ints(100, 3_600_000),
    (23, 2): ints(0, 64),
    (23, 3): ([True, False], [*NO_BOOLS]),
    (24, 0): MEMBER_ID,
    (24, 1): OFFSETS,
    (24, 2): OFFSETS,
    (24, 3): ([1, 2], [*NO_INTS, -1, 3]),
    (25, 0): OFFSETS,
    (25, 1): OFFSETS,
    (27, 0): OFFSETS,
    (27, 1): ints(0, 2),
    (20, 0): MEMBER_ID,
    (20, 1): ([[], *LISTS_OF_TOPICS[0]], LISTS_OF_TOPICS[1]),
}
#: The same for what an entry of type 19 holds. "Together" is what its fields may not say at once.
IN_AN_ENTRY: dict[int, tuple[list[Any], list[Any]]] = {
    0: texts(1, 249),
    1: ints(0, 2**31 - 1),
    2: OFFSETS,
    3: OFFSETS,
    4: ([0, 1], [*NO_INTS, -1, 3]),
    5: ([None, -1, 0, LARGEST], [True, "1", -2, LARGEST + 1]),
    6: (
        [[], [[0, 0]], [[0, LARGEST]], many([1, 1], 10_000)],
        [*NO_LISTS, [[1, 0]], [[0, LARGEST + 1]], [[-1, 0]], [[0]], [[0, 1, 2]], [0, 1], many([1, 1], 10_001)],
    ),
    7: ([None, "", "x" * 255, "\x00\x9f"], [1, True, [], "x" * 256, "é" * 128]),
}
TOGETHER: tuple[list[Any], list[Any]] = (
    [
        ["t", 0, 5, 5, 0, None, [], None],
        ["t", 0, 0, LARGEST, 2, -1, [], None],
        ["t", 0, 3, 4, 1, None, [[1, 2]], "m"],
    ],
    [
        ["t", 0, 5, 4, 0, None, [], None],  # lo above hi
        ["t", 0, 0, LARGEST, 0, 5, [[7, 8]], None],  # through beside ranges
        ["t", 0, 0, LARGEST, 2, None, [], None],  # a start without through
        ["t", 0, 0, LARGEST, 2, None, [[1, 2]], None],
        ["t", 0, 1, LARGEST, 2, 5, [], None],  # a start of some keys
        ["t", 0, 0, LARGEST - 1, 2, 5, [], None],
        ["t", 0, 0, LARGEST, 0, 5, []],
        ["t", 0, 0, LARGEST, 0, 5, [], None, None],
        [],
        None,
    ],
)
SETTINGS: tuple[list[Any], list[Any]] = (
    [
        *({}, {"accept_individual_commit": False}, {"accept_individual_commit": True}),
        *({"accept_range_fetch": []}, {"accept_range_fetch": [f"t{number}" for number in range(100)]}),
        {"accept_range_fetch": ["é", "z", "a", "z"]},
        *({"max_session_timeout_ms": end} for end in (100, 2**31 - 1)),
        *({"max_individual_commits": end} for end in (1, 60_000)),
    ],
    [
        *(None, [], [["accept_individual_commit", True]], {"other": 1}, {"": 1}),
        *({"accept_individual_commit": odd} for odd in NO_BOOLS),
        *({"accept_range_fetch": odd} for odd in (*NO_LISTS, [f"t{number}" for number in range(101)], [""], [1])),
        *({"accept_range_fetch": odd} for odd in (["x" * 250], ["a\x00"])),
        *({"max_session_timeout_ms": odd} for odd in (*NO_INTS, 99, 2**31)),
        *({"max_individual_commits": odd} for odd in (*NO_INTS, 0, 60_001)),
    ],
)


def every_edge() -> list[tuple[int, list[Any], bool]]:
    """(type, fields, whether they are well formed), for every bound of every field."""
    found: list[tuple[int, list[Any], bool]] = []
    for kind, fields in GOOD.items():
        found += [(kind, fields, True), (kind, fields[:-1], False), (kind, [*fields, None], False)]
    for (kind, place), pair in FIELDS.items():
        for fits, values in zip((True, False), pair, strict=True):
            found += [(kind, replaced(GOOD[kind], (place,), value), fits) for value in values]
    for place, pair in IN_AN_ENTRY.items():
        for fits, values in zip((True, False), pair, strict=True):
            entry = replaced(ENTRY, (5,), None) if place == 6 else ENTRY
            # lo and hi in one order, whatever the bound
            entry = replaced(entry, (2,), 0) if place == 3 else entry
            for kind, at in ENTRIES.items():
                changed = [replaced(entry, (place,), value) for value in values]
                found += [(kind, replaced(GOOD[kind], (at, 1), value), fits) for value in changed]
    for kind, at in ENTRIES.items():
        for fits, values in zip((True, False), TOGETHER, strict=True):
            found += [(kind, replaced(GOOD[kind], (at, 1), value), fits) for value in values]
        found += [(kind, replaced(GOOD[kind], (at,), odd), False) for odd in (*NO_LISTS, many(ENTRY, 10_001))]
        found.append((kind, replaced(GOOD[kind], (at,), many(ENTRY, 10_000)), True))
        found.append((kind, replaced(GOOD[kind], (at,), []), kind == 24))
    refused = replaced(GOOD[24], (3,), 0)
    found += [(24, refused, False), (24, replaced(refused, (4,), []), True)]
    for fits, values in zip((True, False), SETTINGS, strict=True):
        found += [(21, [value], fits) for value in values]
    without_pattern = replaced(GOOD[16], (5,), "")
    return [*found, (16, without_pattern, True), (16, replaced(without_pattern, (6,), []), False)]


EDGES = every_edge()


@cache  # not at import: each process that collects the tests would pay for it
def small_edges() -> list[tuple[int, list[Any], bool]]:
    """Those that are quick to write and to replay: no long ones, and no joins for 100,000 partitions."""
    return [edge for edge in EDGES if len(repr(edge[1])) < 4_000 and edge[1][-1:] != [[["t", 100_000]]]]


def edge_of(choose: Choose, group: str, who: Who) -> bytes:
    """One of the small ones, of this sender."""
    client, instance = who
    kind, fields, _ = choose(small_edges())
    return shortest([level_of(kind), kind, instance, client, group, *fields])
