"""Offsets of a group that are due to be committed to the Kafka group of the same name, on virtual time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kafka_marshal.engine.groups.mirror import (
    LONGEST_RETRY_MS,
    MIRROR_MS,
    REFRESH_MS,
    SETTLE_MS,
    Mirror,
    Position,
)
from kafka_marshal.engine.work.topic_mark import counts_in, mark_of
from rationalizer import CommitEntry, CommitOffsets, ForgetGroup, Progress, route_group
from tests.engine.groups.test_members import SESSION, group_of, join, net_of, read_all, source, works_on
from tests.engine.groups.test_sharing import cover_all, shared
from tests.engine.groups.test_sharing import join as join_shared
from tests.engine.harness import Member, Net


class Mirrored:
    """A member with a mirror, and Kafka's committed offsets."""

    def __init__(self, member: Member, kafka: dict[int, int]) -> None:
        self.member = member
        self.mirror = Mirror(source(member).member)
        self.kafka = kafka

    def due(self) -> dict[int, int]:
        """Offsets that are due, by partition."""
        return {key[1]: offset for key, (offset, _) in self.mirror.due(self.member.clock()).items()}

    def turn(self) -> dict[int, int]:
        due = self.mirror.due(self.member.clock())
        self.mirror.committed(due, self.member.clock())
        found = {key[1]: offset for key, (offset, _) in due.items()}
        self.kafka.update(found)
        return found


def mirrored(net: Net, *names: str) -> list[Mirrored]:
    kafka: dict[int, int] = {}
    members = [join(net, name) for name in names]
    count = len(net.data)
    net.run_until(lambda: sum(len(works_on(member)) for member in members) == count)
    return [Mirrored(member, kafka) for member in members]


def wait(net: Net, ms: float) -> None:
    """Let time pass while members run."""
    net.run(ms, step=max(20.0, ms / 500) if ms < SESSION * 100 else SESSION / 4)


def test_what_is_done_is_due_once_and_nothing_that_is_not() -> None:
    net = net_of(2, end=20)
    (a,) = mirrored(net, "a")
    assert a.turn() == {0: 0, 1: 0}, "lag is shown from the beginning"
    assert a.due() == {}
    a.member.fetch(10)
    run = a.member.take(10)
    assert run is not None
    number = run.assignment.key[1]
    for message in run.messages[:3] + run.messages[4:]:
        a.member.done(message)
    net.run(SESSION)
    kept = group_of(net).kept("t", number)
    assert kept is not None and kept.progress.ranges == [(4, run.messages[-1].offset())]
    assert a.turn() == {number: 3}, "below the message in the middle that is in hand"
    a.member.done(run.messages[3])
    assert a.due() == {}, "the log does not show it yet"
    net.run(SESSION)
    assert a.turn() == {number: len(run.messages)}
    assert a.due() == {}


def test_a_position_that_stands_still_is_committed_again_and_a_new_one_once_more() -> None:
    net = net_of(1)
    (a,) = mirrored(net, "a")
    assert a.turn() == {0: 0}
    wait(net, SETTLE_MS - 1_000)
    assert a.due() == {}
    wait(net, 1_100)
    assert a.turn() == {0: 0}, "a request of an earlier owner may have come in between"
    mirror, now = a.mirror, a.member.clock()
    mirror._member.proof.valid_until = now + 2 * REFRESH_MS  # a day of beats
    assert mirror.due(now + REFRESH_MS - 1) == {}
    assert mirror.due(now + REFRESH_MS) == {("t", 0): (0, "")}


def test_the_owner_commits_and_the_one_before_it_does_not() -> None:
    net = net_of(4, end=40)
    a, *_ = mirrored(net, "a")
    a.turn()
    a.member.work()
    net.run(SESSION)
    assert set(a.turn()) == {0, 1, 2, 3}
    b = Mirrored(join(net, "b"), a.kafka)
    net.run_until(lambda: len(works_on(a.member)) == len(works_on(b.member)) == 2)
    read_all(net, a.member, b.member)
    of_a, of_b = a.turn(), b.turn()
    assert set(of_a) == works_on(a.member)
    assert set(of_b) == works_on(b.member)
    assert a.kafka == dict.fromkeys(range(4), 40)


def test_the_last_member_commits_what_it_has_released() -> None:
    net = net_of(2, end=20)
    a, b = mirrored(net, "a", "b")
    a.turn(), b.turn()
    read_all(net, a.member, b.member)
    a.member.close()
    net.run_until(lambda: source(a.member).has_left and works_on(b.member) == {0, 1})
    assert a.due() == {}, "it has a new owner, whose positions may be further"
    assert b.turn() == {0: 20, 1: 20}
    for log in net.data.values():
        log.end = 25
    b.member.work()
    b.member.close()
    net.run_until(lambda: source(b.member).has_left)
    assert b.turn() == {0: 25, 1: 25}
    assert b.due() == {}
    assert a.due() == {}


def test_in_doubt_nothing_is_due() -> None:
    """After SIGSTOP its replica is old, and other members are ahead."""
    net = net_of(1, end=5)
    (a,) = mirrored(net, "a")
    a.member.work()
    a.member.paused = True
    b = Mirrored(join(net, "b"), a.kafka)
    net.run_until(lambda: works_on(b.member) == {0})
    b.member.work()
    net.run(SESSION)
    assert b.turn() == {0: 5}
    assert a.mirror.due(a.member.clock()) == {}
    a.member.paused = False
    net.run(SESSION)
    assert a.due() == {}


def test_of_a_partition_that_is_shared_by_key_one_member_commits_the_whole_ones_stable() -> None:
    net = shared(end=40)
    members = [join_shared(net, name) for name in "abc"]
    net.run_until(lambda: cover_all(*members))
    all_of = [Mirrored(member, {}) for member in members]
    lowest = [x for x in all_of if source(x.member).pieces["t", 0].span[0] == 0]
    assert [x.due() for x in all_of if x not in lowest] == [{}, {}]
    assert lowest[0].turn() == {0: 0}
    lowest[0].member.work()
    net.run(SESSION)
    kept = group_of(net).kept("t", 0)
    assert kept is not None and max(done for _, _, done in kept.progress.done_through) > kept.progress.stable
    assert lowest[0].due() in ({}, {0: kept.progress.stable + 1}), "others have not done their keys"
    read_all(net, *members)
    assert [x.due() for x in all_of if x not in lowest] == [{}, {}]
    assert lowest[0].turn() == {0: 40}


def test_a_reposition_takes_it_back_and_a_forgotten_group_has_nothing() -> None:
    net = net_of(1, end=20)
    (a,) = mirrored(net, "a")
    read_all(net, a.member)
    assert a.turn() == {0: 20}
    net.pause(60_000)
    net.run_until(lambda: source(a.member).has_left)
    home = route_group("g", net.cps)
    net.write(CommitOffsets("i", "admin", "g", "", 0, False, (CommitEntry("t", 0, through=4, metadata="mine"),)), home)
    net.run(100)
    assert a.due() == {0: 5}
    assert a.mirror.due(a.member.clock())["t", 0] == (5, "mine"), "with what is kept beside it"
    net.write(ForgetGroup("i", "admin", "g"), home)
    net.run(100)
    assert a.due() == {}


def test_failures_are_retried_less_and_less_often_and_leave_a_doubt() -> None:
    net = net_of(1, end=5)
    (a,) = mirrored(net, "a")
    a.turn()
    now = a.member.clock()
    wanted: dict[tuple[str, int], Position] = {("t", 0): (3, "")}
    waits = []
    for _ in range(8):
        a.mirror.failed(wanted, now)
        waits.append(a.mirror.next_at - now)
    assert waits[0] == 2 * MIRROR_MS
    assert all(x <= y for x, y in pairwise(waits)) and waits[-1] == LONGEST_RETRY_MS
    assert a.mirror.is_failing, waits
    a.mirror._member.proof.valid_until = now + REFRESH_MS
    late = now + 10 * MIRROR_MS
    a.mirror.failed(wanted, late)
    a.mirror.committed({("t", 0): (0, "")}, late + 1)
    assert a.mirror.next_at == late + 1 + MIRROR_MS
    assert a.mirror.due(late + SETTLE_MS - 1) == {}
    assert a.mirror.due(late + SETTLE_MS) == {("t", 0): (0, "")}, "the request that failed may have arrived after it"


@pytest.mark.parametrize(
    ("topic_id", "stable", "marked", "counts"),
    [
        ("one", 4, "one", True),
        ("two", 4, "one", False),
        ("one", 4, "", False),  # unknown yet: it may be another one
        ("two", -1, "", True),
        ("", 4, "one", True),  # a broker without topic ids
    ],
)
def test_p12_a_position_counts_in_its_own_topic_only(topic_id: str, stable: int, marked: str, counts: bool) -> None:
    progress = Progress()
    progress.through(stable)
    if marked:
        mark = mark_of(marked)
        assert mark is not None
        progress.commit([(mark, mark)])
    assert counts_in(topic_id, progress) is counts


def test_what_does_not_count_is_left_out() -> None:
    net = net_of(2)
    (a,) = mirrored(net, "a")
    found = a.mirror.due(a.member.clock(), [("t", 0), ("t", 1)], lambda key, _: key[1] == 1)
    assert found == {("t", 1): (0, "")}


def test_what_was_ours_for_a_moment_only_is_committed_at_the_end() -> None:
    net = net_of(2, end=5)
    (a,) = mirrored(net, "a")
    a.mirror.note_owned()
    read_all(net, a.member)
    a.member.close()
    net.run_until(lambda: source(a.member).has_left)
    assert a.turn() == {0: 5, 1: 5}
