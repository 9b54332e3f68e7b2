"""Topics shared by key, on virtual time: K1, K4, K5, P8, G4, G5, G22."""

from __future__ import annotations

from collections import Counter

import pytest

from kafka_marshal.engine.effects import Call, Callback
from kafka_marshal.engine.settings import GroupOptions
from kafka_marshal.engine.work.assignment import Stage, stable_of
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.sinks.claims import checked
from kafka_marshal.types import SharedEpoch
from rationalizer import CommitOffsets, ConfigureGroup, key_hash, route_group
from rationalizer.limits import MAX_KEY_HASH
from tests.engine.groups.test_members import SESSION, group_of, handled, net_of, read_all, source, works_on
from tests.engine.harness import Member, Net

T0 = ("t", 0)


def shared(partitions: int = 1, end: int = 0) -> Net:
    net = net_of(partitions, end)
    net.write(ConfigureGroup("x", "admin", "g", (("accept_range_fetch", ("t",)),)), route_group("g", net.cps))
    return net


def join(net: Net, client_id: str, *, share: bool = True, at_most_once: bool = False) -> Member:
    member = net.member(client_id)
    member.consumer("t", group=GroupOptions("sticky", SESSION, share), at_most_once=at_most_once)
    return member


def spans(*members: Member) -> list[tuple[int, int]]:
    """Key ranges of partition 0 that they work on."""
    found = []
    for member in members:
        assignment = member.consumers[0].assignments.get(T0)
        if assignment is not None and assignment.stage is Stage.ACTIVE and assignment.lease.hand_out_until > 0:
            found.append(source(member).pieces[T0].span)
    return sorted(found)


def cover_all(*members: Member) -> bool:
    found = spans(*members)
    at = 0
    for lo, hi in found:
        if lo != at:
            return False
        at = hi + 1
    return len(found) == len(members) and at == MAX_KEY_HASH + 1


def test_k1_three_share_one_partition_each_with_its_keys_and_every_message_is_handled_once() -> None:
    net = shared(end=200)
    members = [join(net, name) for name in "abc"]
    net.run_until(lambda: cover_all(*members))
    read_all(net, *members)
    assert handled(*members) == Counter((0, o) for o in range(200))
    for member in members:
        lo, hi = source(member).pieces[T0].span
        assert all(lo <= key_hash(None, message.offset()) <= hi for message in member.handled[-5:])
    progress = group_of(net).progress["t"][0].progress
    assert progress.stable == 199
    assert [entry.ranges for record in net.records(CommitOffsets) for entry in record.entries if entry.ranges] == []  # type: ignore[attr-defined]


def test_k5_one_more_and_one_less_lose_nothing_and_repeat_nothing() -> None:
    net = shared(end=100)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: cover_all(first, second))
    for member in (first, second):
        member.work()
    third = join(net, "c")
    for _ in range(40):
        net.run(100)
        for member in (first, second, third):
            member.work(3)
    net.run_until(lambda: cover_all(first, second, third))
    net.topic("t", 1, 300)
    net.data[T0].end = 300
    for _ in range(10):
        net.run(100)
        for member in (first, second, third):
            member.work(7)
    second.close()
    net.run_until(lambda: source(second).has_left)
    read_all(net, first, third)
    assert handled(first, second, third) == Counter((0, o) for o in range(300))


def test_k5_a_dead_sharer_s_keys_are_repeated_from_what_it_had_committed_for_them() -> None:
    net = shared(end=300)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: cover_all(first, second))
    for _ in range(30):
        net.run(100)
        first.work(5)
        second.work(5)
    assert not cover_all(first)
    second.kill()
    net.run_until(lambda: cover_all(first))
    read_all(net, first)
    seen = handled(first, second)
    assert set(seen) == {(0, o) for o in range(300)}
    twice = [o for (_, o), count in seen.items() if count > 1]
    own = {message.offset() for message in second.handled}
    assert set(twice) <= own


def test_p8_a_late_copy_of_a_commit_for_some_keys_says_nothing_of_all_of_them() -> None:
    """The member has more keys since. Their message was lost if it lay below that commit."""
    net = shared(end=300)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: cover_all(first, second))
    for _ in range(30):
        net.run(100)
        first.work(50)
    second.kill()
    late = net.records(CommitOffsets, "a")[-1]
    assert isinstance(late, CommitOffsets) and late.entries[0].lo > 0 and late.entries[0].through is not None
    for _ in range(200):
        net.run(50)
        net.write(late, route_group("g", net.cps))
    assert cover_all(first)
    for _ in range(3):
        read_all(net, first)
    assert set(handled(first)) == {(0, o) for o in range(300)}


def test_g22_at_most_once_no_key_is_handled_twice_when_a_sharer_dies() -> None:
    net = shared(end=200)
    first, second = join(net, "a", at_most_once=True), join(net, "b", at_most_once=True)
    net.run_until(lambda: cover_all(first, second))
    for _ in range(10):
        net.run(50)
        first.work_granted()
        second.work_granted()
    second.kill()
    for _ in range(200):
        net.run(50)
        first.work_granted()
    assert cover_all(first)
    assert set(handled(first, second).values()) == {1}


def test_k1_who_did_not_opt_in_gets_whole_partitions() -> None:
    net = shared(partitions=2, end=50)
    sharers, alone = [join(net, name) for name in "abc"], join(net, "z", share=False)
    net.run_until(lambda: len(works_on(alone)) == 1 and cover_all(*sharers))
    assert source(alone).pieces["t", next(iter(works_on(alone)))].span == (0, MAX_KEY_HASH)
    read_all(net, *sharers, alone)
    assert handled(*sharers, alone) == Counter((p, o) for p in range(2) for o in range(50))


def token(member: Member) -> SharedEpoch | int:
    return member.consumers[0].assignments[T0].epoch


def test_g5_a_share_has_a_token_of_its_own_with_which_no_last_offset_is_stored() -> None:
    net = shared(end=10)
    members = [join(net, name) for name in "ab"]
    net.run_until(lambda: cover_all(*members))
    assert all(isinstance(token(member), SharedEpoch) for member in members)
    with pytest.raises(ConfigurationError, match="shared by key"):
        checked("g", [("t", 0, token(members[0]), 5)], "coordinated")


def test_g5_a_share_that_grew_has_a_token_for_each_of_its_parts() -> None:
    """The keys that were its own all the time keep their token: it is theirs, too, when the share shrinks again."""
    net = shared(end=10)
    first = join(net, "a")
    net.run_until(lambda: cover_all(first))
    assert not isinstance(token(first), SharedEpoch), "one token for all keys"
    second = join(net, "b")
    net.run_until(lambda: cover_all(first, second))
    before = token(first)
    assert isinstance(before, SharedEpoch)
    assert before.parts == ((before.lo, before.hi, before),)
    second.kill()
    net.run_until(lambda: cover_all(first))
    grown = token(first)
    assert isinstance(grown, SharedEpoch)
    assert (grown.lo, grown.hi) == (0, MAX_KEY_HASH)
    assert sorted(grown.parts) == sorted([*before.parts, *(part for part in grown.parts if part[2] == grown)])
    assert grown > before and len(grown.parts) == 2
    third = join(net, "c")
    net.run_until(lambda: cover_all(first, third))
    assert token(first) == before, "as before the share grew"


def test_what_a_share_calls_stable_is_done_for_all_keys() -> None:
    """Sinks take it for done: it must not pass what another member has not done yet."""
    net = shared(end=100)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: cover_all(first, second))
    read_all(net, first)
    stable = stable_of(first.consumers[0].assignments[T0])
    done = {message.offset() for message in first.handled}
    assert len(done) > 20 and stable < min(set(range(100)) - done)
    read_all(net, first, second)
    net.run_until(lambda: stable_of(first.consumers[0].assignments[T0]) == 99)


def test_a_callback_of_a_share_with_other_keys_says_nothing_of_the_one_that_has_its_token_now() -> None:
    """Checkpoints begin a share again with fewer keys under the same token, while on_revoke of the larger one runs."""
    net = shared(end=10)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: cover_all(first, second))
    consumer = first.consumers[0]
    assignment = consumer.assignments[T0]
    consumer.callbacks_running += 1
    larger = assignment.piece._replace(lo=0, hi=MAX_KEY_HASH)
    call = Call(consumer.number, Callback.REVOKE, (larger,))
    first.engine.take(None, first.engine.called, call, first.clock())
    assert (assignment.callbacks_running, consumer.callbacks_running) == (0, 0)
