"""Logs of groups that take checkpoints, at the limits of section 7 and where two of its rules meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.rationalizer.group_stories import A2, ADMIN, T2, A, B, Pen, Story
from tests.rationalizer.oracle.world import Who
from tests.rationalizer.strategies import LARGEST

MARK = 2**62


class CheckpointPen(Pen):
    """Writes a log of a group that takes checkpoints from its second record on."""

    def __init__(self, hold: bool = False, keep: int = 2) -> None:
        super().__init__(level=3)
        self.append(21, ADMIN, "g", {})
        self.newest = self.begin(0, keep, hold)
        #: Of the last record that may have begun a generation.
        self.generation = 0

    def begin(self, after: int, keep: int = 2, hold: bool = False, timeout_ms: int = 1_000) -> int:
        """Type 23; returns its offset."""
        return self.append(23, ADMIN, "g", after, timeout_ms, keep, hold)

    def answer(self, who: Who, member_id: str, barrier: int, *entries: list[Any], what: int = 1) -> int:
        """Type 24, in the generation of the pen."""
        return self.append(24, who, "g", member_id, self.generation, barrier, what, list(entries))

    def member(self, who: Who, topics: list[list[Any]] = T2, **more: Any) -> str:
        """A member that has joined, and the generation of that."""
        member_id = self.join(who, topics, strategy="sticky", **more)
        self.generation = len(self.log) - 1
        return member_id

    def starts(self, who: Who, member_id: str, *places: tuple[str, int], offset: int = 9) -> None:
        """Type 19: action 2."""
        entries: list[list[Any]] = [[*place, 0, LARGEST, 2, offset, [], None] for place in places]
        self.append(19, who, "g", member_id, self.generation, False, entries)

    def sets(self, *entries: list[Any]) -> None:
        """Type 19 of the pausing client."""
        self.append(19, ADMIN, "g", "", 0, False, list(entries))

    def checkpoint(self, who: Who, member_id: str, *entries: list[Any], keep: int = 2) -> int:
        """A barrier with one owner, and its answer."""
        self.newest = self.begin(self.newest, keep)
        self.answer(who, member_id, self.newest, *entries)
        return self.newest


def cut(topic: str, number: int, through: int | None = None, **more: Any) -> list[Any]:
    """An entry of an answer."""
    low, high = more.get("lo", 0), more.get("hi", LARGEST)
    return [topic, number, low, high, 0, through, more.get("ranges", []), more.get("m")]


def sixteen_pins() -> Story:
    """X9: 16 of kind 2, the first among them; pinning a pinned one again is no error."""
    pen = CheckpointPen(keep=64)
    a = pen.member(A)
    pen.starts(A, a, ("t", 0), ("t", 1))
    codes = []
    for number in range(15):
        pinned = pen.checkpoint(A, a, cut("t", 0, 10 + number), keep=64)
        pen.append(27, ADMIN, "g", pinned, 1)
    last = pen.checkpoint(A, a, cut("t", 0, 50), keep=64)
    pen.append(27, ADMIN, "g", last, 1)
    pen.append(27, ADMIN, "g", pinned, 1)
    pen.append(27, ADMIN, "g", pinned, 0)
    pen.append(27, ADMIN, "g", last, 1)
    codes += ["TOO_MANY_CHECKPOINTS", "OK", "OK", "OK"]
    return pen.log, codes


def the_newest_are_kept() -> Story:
    """X6: 64, then fewer; a `keep` that a barrier named counts when the next is complete, passing or not."""
    pen = CheckpointPen(keep=64)
    a = pen.member(A)
    pen.starts(A, a, ("t", 0), ("t", 1))
    first = pen.newest
    for number in range(70):
        pen.checkpoint(A, a, cut("t", number % 2, 10 + number), keep=64)
    ended = pen.begin(pen.newest, keep=3)
    pen.answer(A, a, ended, what=0)
    pen.append(25, ADMIN, "g", pen.generation, first + 1)  # none of its
    pen.checkpoint(A, a, cut("t", 0, 100), keep=0)
    pen.append(27, ADMIN, "g", pen.newest, 0)
    pen.append(25, ADMIN, "g", pen.generation, first)
    return pen.log, ["UNKNOWN_CHECKPOINT", "OK", "OK", "NEWEST_CHECKPOINT", "OK"]


def pieces_of_states() -> Story:
    """X5: 2,000 pieces of `states`; an entry that leaves more, and more than before it, is rejected."""
    pen = CheckpointPen()
    a = pen.member(A)
    pen.starts(A, a, ("t", 0), ("t", 1))
    parts = [cut("t", 0, None, lo=4 * number + 1, hi=4 * number + 1) for number in range(999)]  # 1,999 pieces
    pen.checkpoint(A, a, *parts)
    barrier = pen.begin(pen.newest)
    pen.answer(A, a, barrier, cut("t", 0, None, lo=5_000, hi=5_000))  # two more
    pen.answer(A, a, barrier, cut("t", 0, None, lo=5_000))  # one more
    pen.newest = barrier
    barrier = pen.begin(pen.newest)
    pen.answer(A, a, barrier, cut("t", 0, 11, lo=3_900, hi=3_990))  # fewer
    return pen.log, ["OK", "OK", "PARTIAL", "OK", "OK", "OK"]


def what_older_ones_weigh() -> Story:
    """X6 (2): versions that the newest does not see weigh 1,000,000 at most; kind 1 goes before kind 2."""
    pen = CheckpointPen(keep=64)
    a = pen.member(A)
    pen.starts(A, a, ("t", 0), ("t", 1))
    for number in range(6):
        firsts = range(20_000 * number + 12, 20_000 * number + 20_012, 2)
        pen.checkpoint(A, a, cut("t", 0, None, ranges=[[first, first] for first in firsts]), keep=64)
    pinned = pen.newest
    pen.append(27, ADMIN, "g", pinned, 1)
    for number in range(18):
        pen.checkpoint(A, a, cut("t", 0, None, m=str(number)), keep=64)
    pen.append(25, ADMIN, "g", pen.generation, pinned - 2)
    pen.append(25, ADMIN, "g", pen.generation, pinned)
    return pen.log, ["UNKNOWN_CHECKPOINT", "OK"]


def the_last_millisecond() -> Story:
    """X3: a barrier is over a millisecond after its time, and the next record with a sender closes it."""
    pen = CheckpointPen()
    a, b = pen.member(A), pen.member(B)
    pen.starts(A, a, ("t", 0), ("t", 1))
    barrier = pen.begin(pen.newest, timeout_ms=100)
    pen.answer(A, a, barrier, cut("t", 0, 20), cut("t", 1, 21))
    pen.newest, pen.generation = barrier, len(pen.log) - 1
    codes = ["OK"]
    for after_ms in (100, 101):
        opened = pen.begin(pen.newest, timeout_ms=100)
        pen.answer(B, b, opened, cut("t", 1, 30 + after_ms))
        pen.waited += after_ms - 3
        pen.append(17, A, "g", a, pen.generation)
        pen.answer(A, a, opened, cut("t", 0, 30 + after_ms))
        codes += ["OK", "OK", "OK", "OK" if after_ms == 100 else "NO_SUCH_BARRIER"]
        pen.newest = opened
    # A Tick, a Rollback that is rejected, and records of unknown members close none.
    opened = pen.begin(pen.newest, timeout_ms=100)
    pen.waited += 200
    pen.append(32, A, "g")
    pen.append(25, ADMIN, "g", 0, 0)
    pen.append(17, A, "g", a + "0", pen.generation)
    pen.begin(pen.newest)
    pen.append(17, B, "g", b, pen.generation)
    codes += ["OK", "OK", "ILLEGAL_GENERATION", "UNKNOWN_CONSUMER", "BARRIER_OPEN", "OK"]
    return pen.log, codes


def who_leaves_at_a_barrier() -> Story:
    """X6 (4), X3: after answer 2 a member is removed with the barrier, by any closing, and stays if it ends."""
    pen = CheckpointPen()
    a, b = pen.member(A), pen.member(B)
    pen.starts(A, a, ("t", 0), ("t", 1))
    barrier = pen.begin(pen.newest, keep=0, timeout_ms=100)
    pen.answer(A, a, barrier, cut("t", 0, 20), cut("t", 1, 21), what=2)
    pen.newest, pen.generation = barrier, len(pen.log) - 1
    pen.append(17, A, "g", a, pen.generation)
    codes = ["OK", "OK", "UNKNOWN_CONSUMER"]
    a = pen.member(A)
    opened = pen.begin(pen.newest, keep=0)
    pen.answer(B, b, opened, cut("t", 0, 30), cut("t", 1, 31))
    pen.newest, pen.generation = opened, len(pen.log) - 1
    opened = pen.begin(pen.newest, keep=0, timeout_ms=100)
    pen.answer(B, b, opened, cut("t", 0, 40), what=2)
    pen.waited += 200
    # Records of the one that left have no sender now; its join is a newcomer's.
    pen.append(18, B, "g", b, pen.generation)
    pen.append(17, B, "g", b, pen.generation)
    pen.member(B)
    codes += ["OK", "OK", "OK", "OK", "OK", "UNKNOWN_CONSUMER", "UNKNOWN_CONSUMER", "OK"]
    pen.append(17, A, "g", a, pen.generation)
    return pen.log, [*codes, "OK"]


def a_loss_in_a_hold_group() -> Story:
    """X7: all goes back when an owner leaves, is replaced or dies; not when it left at a barrier, nor one without."""
    pen = CheckpointPen(hold=True)
    a, b = pen.member(A), pen.member(B)
    pen.starts(A, a, ("t", 0), ("t", 1))
    opened = pen.begin(pen.newest)
    pen.answer(A, a, opened, cut("t", 0, 20), cut("t", 1, 21))
    pen.newest, pen.generation = opened, len(pen.log) - 1
    c = pen.member(("c", "1"))  # there is nothing for it
    pen.append(18, ("c", "1"), "g", c, pen.generation)
    pen.generation = len(pen.log) - 1
    a = pen.member(A2)  # replaced: a reset
    opened = pen.begin(pen.newest)
    pen.answer(B, b, opened, cut("t", 1, 30))
    pen.append(18, B, "g", b, pen.generation)  # lost: the barrier ends, and a reset
    pen.generation = len(pen.log) - 1
    pen.answer(A2, a, opened, cut("t", 0, 30))
    b = pen.member(B)
    opened = pen.begin(pen.newest)
    pen.answer(A2, a, opened, cut("t", 0, 30), cut("t", 1, 31), what=2)
    return pen.log, ["OK", "OK", "OK", "NO_SUCH_BARRIER", "OK", "OK", "OK"]


def positions_beyond_a_mark() -> Story:
    """X10: checkpoints that see more than a position go; marks do not count; one that says nothing writes none."""
    pen = CheckpointPen(keep=9)
    a = pen.member(A)
    pen.starts(A, a, ("t", 0), ("t", 1))
    pen.checkpoint(A, a, cut("t", 0, 20), keep=9)
    second = pen.checkpoint(A, a, cut("t", 0, None, ranges=[[MARK, MARK + 1]]), cut("t", 1, 40), keep=9)
    third = pen.checkpoint(A, a, cut("t", 0, 30), keep=9)
    pen.append(18, A, "g", a, pen.generation)
    pen.append(5, ADMIN, "g", 1_000_000)
    pen.sets(cut("t", 0))
    pen.sets(cut("t", 0, 25), cut("t", 1, None, m="by hand"))
    pen.append(25, ADMIN, "g", pen.generation, third)
    pen.append(25, ADMIN, "g", len(pen.log) - 5, third)
    pen.append(25, ADMIN, "g", len(pen.log) - 6, second)
    pen.sets(cut("t", 0, MARK - 1), cut("new", 7, -1))
    pen.append(27, ADMIN, "g", len(pen.log) - 1, 2)
    codes = ["OK", "OK", "OK", "OK", "ILLEGAL_GENERATION", "UNKNOWN_CHECKPOINT", "OK", "OK", "OK"]
    return pen.log, codes


def what_is_let_go_has_no_owner() -> Story:
    """X6, G17: the target of a piece that is released left with it: the lowest of equals has it, not its last owner."""
    pen, c = CheckpointPen(), ("c", "1")
    a = pen.member(A, [["t", 1]])
    b = pen.member(B, [["t", 2], ["u", 1]])
    pen.starts(A, a, ("t", 0))
    pen.starts(B, b, ("t", 1), ("u", 0))
    third = pen.member(c)
    opened = pen.begin(pen.newest)
    pen.answer(c, third, opened, what=2)
    pen.answer(A, a, opened)
    pen.answer(B, b, opened, cut("t", 1, 20))
    pen.append(17, A, "g", a, len(pen.log) - 1)
    return pen.log, ["OK", "OK", "OK", "OK", "OK"]


def the_pausing_client_closes() -> Story:
    """X3, G21: positions that are set where all are overdue find the barrier closed, with what was answered."""
    pen = CheckpointPen()
    a = pen.member(A, session=100)
    b = pen.member(B, session=100)
    pen.starts(A, a, ("t", 0), ("t", 1))
    opened = pen.begin(pen.newest, timeout_ms=3_600_000)
    pen.answer(A, a, opened, cut("t", 0, 20), cut("t", 1, 21))
    pen.newest, pen.generation = opened, len(pen.log) - 1
    opened = pen.begin(pen.newest, timeout_ms=3_600_000)
    pen.answer(B, b, opened, cut("t", 1, 30))
    pen.append(5, ADMIN, "g", 1_000_000)
    pen.sets(cut("t", 0, 5))
    pen.waited += 200
    pen.append(32, ADMIN, "g")
    pen.sets(cut("t", 0))
    pen.sets(cut("t", 0, 25))
    return pen.log, ["OK", "OK", "OK", "GROUP_ACTIVE", "OK", "OK", "OK"]


def an_idle_member_answers() -> Story:
    """X3: an answer goes with its member, when that is replaced, leaves or dies, and closes nothing if it owns none."""
    pen = CheckpointPen()
    a = pen.member(A)
    pen.starts(A, a, ("t", 0), ("t", 1))
    b, c, d = pen.member(B), pen.member(("c", "1")), pen.member(("d", "1"), session=100)
    opened = pen.begin(pen.newest, timeout_ms=3_600_000)
    for who, member_id in ((B, b), (("c", "1"), c), (("d", "1"), d)):
        pen.answer(who, member_id, opened)
    pen.append(18, ("c", "1"), "g", c, pen.generation)
    pen.generation = len(pen.log) - 1
    b = pen.member(("b", "2"))
    pen.answer(("b", "2"), b, opened, what=0)
    pen.waited += 200
    pen.append(17, A, "g", a, pen.generation)
    pen.answer(A, a, opened, cut("t", 0, 20))
    return pen.log, ["OK"] * 6 + ["OK", "ILLEGAL_GENERATION", "OK"]


def who_refused_gets_a_piece() -> Story:
    """X6: what an idle member refused counts once it owns something, but closes nothing by itself."""
    pen = CheckpointPen(hold=True)
    a, b = pen.member(A, [["t", 1]]), pen.member(B, [["t", 1]])
    pen.starts(A, a, ("t", 0))
    opened = pen.begin(pen.newest)
    pen.answer(B, b, opened, what=0)
    pen.join(A, T2, strategy="sticky")
    pen.append(32, ADMIN, "g")
    pen.generation = len(pen.log) - 2
    pen.answer(A, a, opened, cut("t", 0, 20))
    pen.answer(A, a, opened)
    return pen.log, ["OK", "OK", "OK", "OK", "OK", "NO_SUCH_BARRIER"]


CHECKPOINT_STORIES: dict[str, Callable[[], Story]] = {
    story.__name__: story
    for story in (
        sixteen_pins,
        the_newest_are_kept,
        pieces_of_states,
        what_older_ones_weigh,
        the_last_millisecond,
        who_leaves_at_a_barrier,
        a_loss_in_a_hold_group,
        positions_beyond_a_mark,
        what_is_let_go_has_no_owner,
        the_pausing_client_closes,
        an_idle_member_answers,
        who_refused_gets_a_piece,
    )
}
#: Those that take the oracle many seconds: for thorough runs. Logs with small limits meet the same rules.
LONG = ("pieces_of_states", "what_older_ones_weigh")
