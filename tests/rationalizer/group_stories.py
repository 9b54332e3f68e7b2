"""Logs of levels 2 and 3 that chance never generates: at a limit of section 5, or too long."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tests.rationalizer.group_values import EDGES, level_of, small_edges
from tests.rationalizer.oracle import OracleWorld, shortest
from tests.rationalizer.oracle.groups import member_id_of
from tests.rationalizer.oracle.world import Who
from tests.rationalizer.strategies import LARGEST, Entry

#: A log in CP 0 of 1, and the code of its last records, in order.
Story = tuple[list[Entry], list[str]]
SESSION = 1_800_000


class Pen:
    """Writes a log with a record per millisecond, after an Upgrade."""

    def __init__(self, level: int = 2) -> None:
        self.log: list[Entry] = []
        self.waited = 0
        self.append(33, ("admin", "1"), "any", level)

    def append(self, kind: int, who: Who, group: str, *fields: object) -> int:
        """Append one record, of the version that knows its type; returns its offset."""
        client, instance = who
        offset = len(self.log)
        version = level_of(kind) if 16 <= kind <= 31 else 1
        self.log.append(
            (offset, 1_000 + self.waited + offset, shortest([version, kind, instance, client, group, *fields]))
        )
        return offset

    def join(self, who: Who, topics: list[list[Any]], group: str = "g", strategy: str = "range", **more: Any) -> str:
        """Append a first join; returns the member's id."""
        share, pattern = more.get("share", False), more.get("pattern", "")
        seen, session = more.get("seen", len(self.log)), more.get("session", SESSION)
        offset = self.append(16, who, group, "", seen, session, strategy, share, pattern, topics)
        return member_id_of(group, 0, offset)

    def commit(self, who: Who, member_id: str, entries: list[list[Any]], group: str = "g") -> None:
        """A commit in the generation of the first join of the log."""
        self.append(19, who, group, member_id, 1, False, entries)


A, A2, B, ADMIN = ("a", "1"), ("a", "2"), ("b", "1"), ("admin", "1")
T2 = [["t", 2]]


def heard_and_unheard() -> Story:
    """G8, G9: which members a record of another member removes."""
    pen, codes = Pen(), []
    # A member's record removes other overdue members; a Tick and a rejected record do not.
    a, b = pen.join(A, T2, "g1", session=100), pen.join(B, T2, "g1")
    pen.waited += 200
    pen.append(32, B, "g1")
    pen.append(17, B, "g1", b, LARGEST)
    pen.append(17, B, "g1", b, 2)
    pen.append(17, A, "g1", a, 2)
    codes += ["OK", "OK", "OK", "ILLEGAL_GENERATION", "ILLEGAL_GENERATION", "UNKNOWN_CONSUMER"]
    # An overdue member that is heard first stays.
    a = pen.join(A, T2, "g2", session=100)
    pen.join(B, T2, "g2")
    pen.waited += 200
    pen.append(17, A, "g2", a, len(pen.log) - 1)
    codes += ["OK", "OK", "OK"]
    # All are overdue, and one of them is heard: none goes, all stay.
    a, b = pen.join(A, T2, "g3", session=100), pen.join(B, T2, "g3", session=100)
    pen.waited += 200
    pen.join(A, T2, "g3", "sticky", session=100)
    pen.append(20, A, "g3", a, T2)
    pen.waited += 90
    pen.append(17, B, "g3", b, len(pen.log) - 3)
    codes += ["OK", "OK", "INCONSISTENT_PARTITIONING_STRATEGY", "OK", "OK"]
    # All are overdue, and a new member joins: all are removed, and their strategy with them.
    pen.join(A, T2, "g4", session=100)
    pen.waited += 200
    pen.join(B, T2, "g4", "sticky")
    codes += ["OK", "OK"]
    # The same join again, beside one that is overdue: a rebalance, though it asks for none.
    pen.join(A, T2, "g5", session=100)
    pen.join(B, T2, "g5")
    pen.waited += 200
    pen.join(B, T2, "g5")
    pen.join(B, T2, "g5", "roundrobin")
    codes += ["OK", "OK", "ALREADY_MEMBER", "OK"]
    # A member that is gone hinders no other strategy; leaving and reporting bury, too.
    for kind, fields in ((16, []), (18, [0]), (20, [T2])):
        pen.join(A, T2, f"h{kind}", session=100)
        b = pen.join(B, T2, f"h{kind}")
        pen.waited += 200
        if kind == 16:
            pen.join(B, T2, f"h{kind}", "sticky")
        else:
            pen.append(kind, B, f"h{kind}", b, *fields)
        codes += ["OK", "OK", "OK"]
    return pen.log, codes


def starts_and_restarts() -> Story:
    """G11, G14: a restart keeps what it has, under a new token; the late join of a dead instance ends no member."""
    pen = Pen()
    old, b = pen.join(A, T2), pen.join(B, T2)
    late = len(pen.log)
    pen.append(19, A, "g", old, 2, False, [["t", 1, 0, LARGEST, 1, 7, [], None]])
    new = pen.join(A2, T2)  # keeps partition 0
    pen.join(A, T2, seen=late)
    pen.append(17, A, "g", old, 4)
    pen.append(19, A2, "g", new, 3, False, [["t", 0, 0, LARGEST, 0, 7, [], None]])
    pen.append(19, A2, "g", new, 4, False, [["t", 0, 0, LARGEST, 2, 6, [], None], ["t", 0, 0, LARGEST, 2, 6, [], None]])
    pen.append(19, B, "g", b, 3, False, [["t", 1, 0, LARGEST, 0, 9, [], None]])
    # What a replaced member would have had to release goes at once.
    alone = pen.join(A, T2, "g2")
    pen.join(B, T2, "g2")
    pen.join(A2, T2, "g2")
    pen.append(17, A, "g2", alone, 0)
    codes = ["OK", "OK", "OK", "OK", "REPLACED", "UNKNOWN_CONSUMER", "PARTIAL", "PARTIAL", "OK"]
    return pen.log, [*codes, "OK", "OK", "OK", "UNKNOWN_CONSUMER"]


def orders_taken_back() -> Story:
    """G18: what was sent by an older order releases nothing."""
    pen = Pen()
    a = pen.join(A, T2, strategy="sticky")
    b = pen.join(B, T2, strategy="sticky")  # partition 1 is revoked at 2
    let_go = ["t", 1, 0, LARGEST, 1, 7, [], None]
    pen.append(18, B, "g", b, 2)  # taken back
    pen.append(19, A, "g", a, 2, False, [let_go])
    pen.join(B, T2, strategy="sticky")  # revoked once more
    pen.append(19, A, "g", a, 3, False, [let_go, ["t", 1, 0, LARGEST, 0, 8, [], None]])
    pen.append(19, A, "g", a, 5, False, [["t", 1, 0, 5, 1, 8, [], None], [*let_go[:5], 9, [], None], let_go])
    return pen.log, ["OK", "OK", "OK", "OK", "OK", "PARTIAL", "PARTIAL"]


def the_pausing_client() -> Story:
    """G21, C10, C16: what an admin may do, and when."""
    pen = Pen()
    a = pen.join(A, T2, session=100)

    def reposition(who: Who, *places: list[Any]) -> None:
        pen.append(
            19, who, "g", "", LARGEST, True, [[*place, 0, LARGEST, 0, *rest, [], None] for place, *rest in places]
        )

    first, second = ["t", 0], ["t", 9]
    reposition(ADMIN, [first, 5])
    pen.append(
        19, A, "g", a, 1, False, [["t", 0, 0, LARGEST, 2, 5, [], None], ["t", 0, 0, LARGEST, 0, None, [[9, 9]], "m"]]
    )
    pen.append(5, ADMIN, "g", 100_000)
    reposition(ADMIN, [first, 5])
    reposition(A, [first, 5])
    pen.append(8, ADMIN, "g")
    pen.append(21, A, "g", {})
    pen.append(16, A, "g", a, 1, 100, "range", False, "", T2)
    pen.append(17, A, "g", a, 1)
    pen.waited += 200
    reposition(ADMIN, [first, 5], [first, 5], [first, None], [second, -1])
    pen.append(19, A, "g", a, 1, False, [["t", 0, 0, LARGEST, 1, 5, [], None]])
    reposition(("admin", "2"), [first, 3])
    pen.append(8, ADMIN, "g")
    reposition(ADMIN, [first, 3])
    pen.append(5, ADMIN, "g", 0)
    reposition(ADMIN, [first, 3])
    pen.append(8, ADMIN, "g")
    codes = ["OK", "UNKNOWN_CONSUMER", "OK", "OK", "GROUP_ACTIVE", "UNKNOWN_CONSUMER", "GROUP_ACTIVE", *["PAUSED"] * 3]
    codes += ["OK", "UNKNOWN_CONSUMER", "OK", "OK", "UNKNOWN_CONSUMER", "OK", "UNKNOWN_CONSUMER", "OK"]
    return pen.log, codes


def group_full() -> Story:
    """G11: 1,000 others are too many; a member that joins again has 999."""
    pen = Pen()
    for number in range(1_000):
        pen.join((f"c{number}", "1"), [["t", 1]])
    pen.join(("late", "1"), [["t", 1]])
    pen.join(("c5", "1"), [["t", 1]])
    pen.join(("c5", "2"), [["t", 1]])
    return pen.log, ["OK", "GROUP_FULL", "ALREADY_MEMBER", "OK"]


def too_many_partitions() -> Story:
    """G11: 100,000 in all groups together; a missing topic counts as one, in each of its groups."""
    pen = Pen()
    a, b = ("a", "1"), ("b", "1")
    member_id = pen.join(a, [["t", 100_000]])
    pen.join(a, [["t", 100_000]])
    pen.join(b, [["u", 0]], group="h")
    pen.append(18, a, "g", member_id, 1)
    pen.join(b, [["u", 0]], group="h")
    return pen.log, ["OK", "ALREADY_MEMBER", "TOO_MANY_PARTITIONS", "OK", "OK"]


def pieces_of_done_through() -> Story:
    """G15: 2,000 pieces; an entry that leaves more, and more than before it, is rejected."""
    pen = Pen()
    who = ("a", "1")
    member_id = pen.join(who, [["t", 1]])

    def entry(low: int, high: int, through: int) -> list[Any]:
        return ["t", 0, low, high, 0, through, [], None]

    pen.commit(who, member_id, [entry(4 * number + 1, 4 * number + 1, 7) for number in range(999)])  # 1,999 pieces
    pen.append(17, who, "g", member_id, 1)
    pen.commit(who, member_id, [entry(5_000, 5_000, 7)])  # two more
    pen.commit(who, member_id, [entry(5_000, LARGEST, 7)])  # one more
    pen.commit(who, member_id, [entry(6_000, LARGEST, 8)])
    pen.commit(who, member_id, [entry(0, LARGEST, 9), entry(6_000, LARGEST, 10)])
    return pen.log, ["OK", "OK", "PARTIAL", "OK", "PARTIAL", "OK"]


def intervals() -> Story:
    """G15: 60,000 by the default setting; an entry that leaves no more of them than before is accepted."""
    pen = Pen()
    who = ("a", "1")
    member_id = pen.join(who, [["t", 1]])

    def entry(*ranges: list[int]) -> list[Any]:
        return ["t", 0, 0, LARGEST, 0, None, list(ranges), None]

    for number in range(6):
        firsts = range(20_000 * number + 2, 20_000 * number + 20_002, 2)
        pen.commit(who, member_id, [entry(*([first, first] for first in firsts))])
    pen.commit(who, member_id, [entry([LARGEST, LARGEST])])
    pen.append(21, who, "g", {"max_individual_commits": 3})
    pen.commit(who, member_id, [entry([LARGEST, LARGEST])])
    pen.commit(who, member_id, [entry([3, 3], [1_000_000, 1_000_000])])  # as many as before
    pen.commit(who, member_id, [entry([5, 5])])
    pen.commit(who, member_id, [entry([0, 119_900])])
    return pen.log, ["OK", "PARTIAL", "OK", "PARTIAL", "OK", "OK", "OK"]


def the_longest_ids() -> Story:
    """E2: a member_id may have 292 bytes, since a group may have 255."""
    pen = Pen()
    group, who = "é" * 127 + "x", ("c" * 255, "i" * 255)
    member_id = pen.join(who, [["t" * 249, 2]], group)
    pen.append(17, who, group, member_id, 1)
    pen.append(17, who, group, member_id + "x", 1)
    pen.append(18, who, group, member_id, 1)
    return pen.log, ["OK", "OK", "MALFORMED", "OK"]


def every_bound() -> Story:
    """Section 5's fields at each bound and beyond: well-formed records are accepted, or rejected for another reason."""
    return _bounds([edge for edge in EDGES if edge in small_edges() or edge[1][-1] == [["t", 100_000]]])


def every_large_bound() -> Story:
    """The same of long lists."""
    return _bounds([edge for edge in EDGES if edge not in small_edges() and edge[1][-1] != [["t", 100_000]]])


def _bounds(edges: list[tuple[int, list[Any], bool]]) -> Story:
    pen = Pen(level=3)
    pen.join(("other", "1"), [["other", 1]], strategy="sticky")
    for kind, fields, _ in edges:
        if kind == 21:
            pen.append(kind, ("a", "1"), "settings", *fields)
        else:
            pen.append(kind, ("a", "1"), "g", *fields)
    pen.append(32, ("a", "1"), "g")
    return pen.log, ["OK"]


def a_crowd_and_its_partitions() -> Story:
    """Sharing by key under each strategy, with some members that did not opt in; then half of all leave."""
    pen = Pen()
    for group, strategy in (("g1", "range"), ("g2", "roundrobin"), ("g3", "sticky")):
        pen.append(21, ("admin", "1"), group, {"accept_range_fetch": ["t", "é"]})
        ids = {}
        for number in range(60):
            who = (f"c{number}", "1")
            topics = [["t", 7], ["u", 11]] if number % 3 else [["t", 7], ["é", 1]]
            ids[who] = pen.join(who, topics, group, strategy, share=number % 5 > 0)
        for who, member_id in list(ids.items())[::2]:
            pen.append(18, who, group, member_id, 1)
        pen.append(21, ("admin", "1"), group, {"accept_individual_commit": False})
    return pen.log, ["OK"]


STORIES: dict[str, Callable[[], Story]] = {
    story.__name__: story
    for story in (
        heard_and_unheard,
        starts_and_restarts,
        orders_taken_back,
        the_pausing_client,
        group_full,
        too_many_partitions,
        pieces_of_done_through,
        intervals,
        the_longest_ids,
        every_bound,
        every_large_bound,
        a_crowd_and_its_partitions,
    )
}
#: Stories that take the oracle some seconds.
SLOW = ("pieces_of_done_through", "intervals", "every_large_bound", "too_many_partitions", "group_full")


@cache
def told(name: str) -> tuple[Story, OracleWorld]:
    """A story, and the oracle's world after it; played once, since the oracle takes its time."""
    story = STORIES[name]()
    world = OracleWorld(0, 1)
    for entry in story[0]:
        world.apply(*entry)
    return story, world
