"""`Admin` and a coordinated group, on a real broker; its members are raw records (G2, G19-G21)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from kafka_marshal import Admin, AdminError, ConfigurationError, GroupPausedError, LeaseLostError
from kafka_marshal.admin import Target, repositioning
from kafka_marshal.errors import TopicMissingError, UpgradeRequiredError, WrongKindError
from kafka_marshal.node.log_reader import read_range
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    Record,
    ReleaseGroup,
    Settings,
    Upgrade,
    decode,
    encode,
    route_lease,
)
from rationalizer.groups.group import Group as CoordinatedGroup
from tests.admin.conftest import HI, Group
from tests.client.conftest import wait_until
from tests.fleet import Fleet, let_go, started

LONG = 600_000
CPS = 3


@pytest.fixture
def fleet(group: Group) -> Fleet:
    """The scene's group, coordinated and still without members."""

    def append(record: Record, cp: int) -> int:
        offsets: list[int | None] = []
        appender = group.cluster.appender(group.coordination, delivery_timeout_ms=10_000)
        appender.append(cp, encode(record), lambda ack: offsets.append(ack.offset))
        assert appender.flush(10) == 0
        appender.close()
        assert offsets[0] is not None
        return offsets[0]

    return Fleet(group.group, CPS, append)


def state(group: Group, fleet: Fleet) -> CoordinatedGroup:
    found = group.worlds()[fleet.home].group(group.group)
    assert found is not None
    return found


def two(group: Group, fleet: Fleet) -> int:
    """a owns 0 and 1 of the data topic, b 2; the generation."""
    fleet.configure()
    fleet.join("a", {group.data: 3}, session=LONG)
    generation = fleet.join("b", {group.data: 3}, session=LONG)
    fleet.commit("a", generation, *started(group.data, 0, 1, 2), let_go(group.data, 2, 9))
    return generation


def test_g2_g19_configuring_makes_a_group_and_keeps_what_is_not_named(group: Group) -> None:
    admin = group.admin()
    assert admin.configure_group(group.group, max_session_timeout_ms=5_000) == Settings(max_session_timeout_ms=5_000)
    found = admin.configure_group(group.group, accept_range_fetch=["b", "a"], accept_individual_commit=False)
    assert found == Settings(False, ("a", "b"), 5_000, 60_000)
    assert {cp for cp, world in group.worlds().items() if world.group(group.group)} == set(range(CPS)), "marked in all"
    assert admin.configure_group(group.group) == found


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_sesion_timeout_ms": 1_000}, "did you mean 'max_session_timeout_ms'"),
        ({"color": 1}, "there are accept_individual_commit"),
        ({"max_session_timeout_ms": 99}, "100 … 2"),
        ({"accept_individual_commit": 1}, "a boolean"),
        ({"accept_range_fetch": "orders"}, "an array"),
    ],
)
def test_settings_that_can_not_be(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        Admin("127.0.0.1:1").configure_group("g", **settings)


def test_g1_a_claimed_group_is_refused_with_the_way_out(group: Group, fleet: Fleet) -> None:
    group.fill(3, 5)
    cp = route_lease(group.data, 0, CPS)
    group.append((cp, ClaimingPartition("i", "c", group.group, group.data, 0, 60_000)))
    with pytest.raises(WrongKindError, match=f"kafka-marshal convert-group {group.group} --to coordinated"):
        group.admin().configure_group(group.group, max_individual_commits=5)
    assert [world.group(group.group) for world in group.worlds().values()] == [None] * CPS, "nothing was marked"


def test_a_paused_group_is_not_configured(group: Group, fleet: Fleet) -> None:
    fleet.configure()
    with (
        group.admin("other").pause(group.group),
        pytest.raises(GroupPausedError, match="its settings can't be changed") as caught,
    ):
        group.admin().configure_group(group.group, max_individual_commits=5)
    assert caught.value.client_id == "other"


def test_g20_evicting_a_member(group: Group, fleet: Fleet) -> None:
    group.fill(3, 20)
    generation = two(group, fleet)
    admin = group.admin()
    with pytest.raises(AdminError, match="within half its session"):
        admin.evict(group.group, "b")
    with pytest.raises(AdminError, match="--member CLIENT"):
        admin.evict(group.group, group.data, 2, force=True)
    with pytest.raises(AdminError, match="is no member of group"):
        admin.evict(group.group, "c")
    (was,) = admin.evict(group.group, "b", force=True)
    assert (was.client_id, was.partition, was.epoch, was.stable, was.kind) == ("b", 2, generation, 9, "coordinated")
    assert list(state(group, fleet).clients) == ["a"]
    held = admin.held_by("a")
    assert [info.partition for info in held] == [0, 1, 2]
    assert held == admin.progress(group.group)


def test_a_silent_member_is_evicted_without_force(group: Group, fleet: Fleet) -> None:
    group.fill(3, 5)
    fleet.configure()
    fleet.join("a", {group.data: 3}, session=200)
    assert len(wait_until(lambda: evicted(group.admin(), group.group, "a"))) == 3
    assert state(group, fleet).clients == {}


def evicted(admin: Admin, group: str, client: str) -> list[object]:
    try:
        return list(admin.evict(group, client))
    except AdminError:
        return []


def test_drain_is_a_request_that_changes_nothing_by_itself(group: Group, fleet: Fleet) -> None:
    group.fill(3, 5)
    generation = two(group, fleet)
    asked = group.admin().drain(group.group, "a")
    assert [info.partition for info in asked] == [0, 1]
    assert list(state(group, fleet).clients) == ["a", "b"]
    with pytest.raises(AdminError, match="owns 2 partitions still") as caught:
        group.admin().drain(group.group, "a", timeout=0.2)
    assert caught.value.in_hand == ((group.data, 0), (group.data, 1))
    done: list[int] = []
    asked_before = requests(group, fleet)
    waiting = threading.Thread(
        target=lambda: done.append(len(group.admin().drain(group.group, "a", timeout=20))), daemon=True
    )
    waiting.start()
    wait_until(lambda: requests(group, fleet) > asked_before)
    fleet.leave("a", generation)
    waiting.join(20)
    assert done == [2]
    with pytest.raises(AdminError, match="is no member"):
        group.admin().drain(group.group, "a")


def requests(group: Group, fleet: Fleet) -> int:
    """Number of members that were asked to leave, by the replicas' count."""
    return group.worlds()[fleet.home].rejected.get("UNKNOWN_CONSUMER", 0)


def test_g21_positions_are_moved_when_every_member_has_left(group: Group, fleet: Fleet) -> None:
    group.fill(3, 20)
    generation = two(group, fleet)
    fleet.commit("a", generation, CommitEntry(group.data, 0, ranges=((4, 5),)))
    admin, other = group.admin(), group.topic(1, 5)
    positions: dict[tuple[str, int], Target] = {(group.data, 0): "latest", (group.data, 2): 3}
    plan = admin.plan(group.group, positions)
    assert [(move.before, move.after, move.done_ahead) for move in plan] == [(0, 20, 0), (10, 3, 0)]
    assert [move.done_ahead for move in admin.plan(group.group, {(group.data, 0): 2})] == [2]
    with pytest.raises(AdminError, match="drops what is done above them"):
        admin.plan(group.group, {(group.data, 0): 2}, keep_done=True)
    with admin.pause(group.group) as pause:
        with pytest.raises(AdminError, match="have not let go") as caught:
            pause.wait_released(0.2)
        assert caught.value.in_hand == tuple((group.data, partition) for partition in range(3))
        with pytest.raises(AdminError, match="still at work"):
            pause.reposition(positions)
        fleet.leave("a", generation)
        with pytest.raises(AdminError, match="still at work"):  # the owner of another partition is a member, too
            pause.reposition({(other, 0): 0})
        fleet.leave("b", generation)
        assert pause.wait_released(20) == []
        assert pause.signs_of_life.keys() == {"a", "b"}
        assert {move.epoch for move in pause.reposition(positions, dry_run=True)} == {None}
        moves = pause.reposition(positions)
        assert [(move.before, move.after) for move in moves] == [(0, 20), (10, 3)]
    found = {info.partition: (info.stable, info.ranges) for info in admin.progress(group.group)}
    assert found == {0: (19, ()), 1: (None, ()), 2: (2, ())}
    later = fleet.join("c", {group.data: 3}, session=LONG)
    assert list(state(group, fleet).clients) == ["c"], "it goes on"
    assert all(generation < (move.epoch or 0) < later for move in moves), "between all tokens before and after"


def test_dead_members_are_waited_for_until_their_sessions_are_over(group: Group, fleet: Fleet) -> None:
    group.fill(3, 20)
    fleet.configure()
    generation = fleet.join("a", {group.data: 3}, session=800)
    fleet.commit("a", generation, *started(group.data, 0, 1, 2, through=4))
    with group.admin().pause(group.group) as pause:
        left = pause.wait_released(20)
        assert [(each.partition, each.client_id, each.state, each.stable) for each in left] == [
            (partition, "a", "stale", 4) for partition in range(3)
        ]
        assert len(pause.reposition({(group.data, 0): 0})) == 1
    assert state(group, fleet).clients == {}


def test_many_positions_go_in_as_few_records_as_they_fit(
    group: Group, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    group.fill(3, 20)
    generation = two(group, fleet)
    fleet.leave("a", generation)
    fleet.leave("b", generation)
    monkeypatch.setattr(repositioning, "MAX_COMMIT_ENTRIES", 1)
    before = group.worlds()[fleet.home].accepted.get("REPOSITIONED", 0)
    with group.admin().pause(group.group) as pause:
        assert len(pause.reposition({(group.data, partition): 5 for partition in range(3)})) == 3
    assert before == 0
    assert {info.stable for info in group.admin().progress(group.group)} == {4}


def test_c16_a_group_is_forgotten_at_home_and_everywhere(group: Group, fleet: Fleet) -> None:
    group.fill(3, 5)
    generation = two(group, fleet)
    with pytest.raises(AdminError, match=r"may be at work: after 0\.2 s 'a', 'b' .* Nothing was forgotten") as caught:
        group.admin().forget(group.group, 0.2)
    assert caught.value.in_hand == tuple((group.data, number) for number in range(3))
    assert len(state(group, fleet).clients) == 2
    fleet.leave("a", generation)
    fleet.leave("b", generation)
    assert group.admin().forget(group.group, 20) == 3
    assert [world.group(group.group) for world in group.worlds().values()] == [None] * CPS
    assert [world.pauses() for world in group.worlds().values()] == [[]] * CPS


def test_a_members_name_is_not_used_to_pause(group: Group, fleet: Fleet) -> None:
    fleet.configure()
    fleet.join("a", {"t": 1}, session=LONG)
    with pytest.raises(ConfigurationError, match="it joins for t"):
        group.admin("a").pause(group.group).start()


def test_resume_ends_the_pause_of_a_dead_admin(group: Group, fleet: Fleet) -> None:
    fleet.configure()
    group.append(*((cp, ReleaseGroup("x", "dead", group.group, 2**60)) for cp in range(CPS)))
    assert {each.client_id for each in group.admin().resume(group.group)} == {"dead"}
    fleet.join("a", {"t": 1}, session=LONG)
    assert list(state(group, fleet).clients) == ["a"]


# -- Evicting, forgetting, and ending pauses (C8, C10, C16) -------------------------------------------------------


def test_a_dead_holder_is_evicted_once_it_is_not_fresh(group: Group, tmp_path: Path) -> None:
    topic = group.fill(1, 50)
    worker = group.worker("dead", topic, tmp_path, pause_s=0.02)
    wait_until(lambda: len(worker.offsets()) >= 5)
    admin = group.admin()
    with pytest.raises(AdminError, match=rf"\[0\]: 'dead' beat less than {HI} ms ago.*Nothing was changed"):
        admin.evict(group.group, topic, 0)
    worker.kill()
    killed_at = time.monotonic()
    wait_until(lambda: time.monotonic() - killed_at > HI / 1000 + 0.1)
    # No record was written since: only the admin's query of the broker's clock shows that the holder is silent.
    assert admin.evict(group.group, topic, 0).client_id == "dead"
    (lease,) = admin.progress(group.group)
    assert lease.client_id is None
    heir = group.start("heir")
    wait_until(lambda: heir.seen and heir.seen[-1] == (0, 49))
    assert heir.seen[0] == (0, 0 if lease.stable is None else lease.stable + 1)


def test_a_living_holder_is_evicted_by_force_and_knows_it(group: Group) -> None:
    topic = group.fill(1, 0)
    lease = group.member("alive").claim(topic, 0)
    lease.heartbeat(7)
    was = group.admin().evict(group.group, topic, 0, force=True)
    assert (was.client_id, was.epoch, was.stable, was.freshness) == ("alive", lease.epoch, 7, "fresh")
    wait_until(lambda: not lease.valid)
    with pytest.raises(LeaseLostError):
        lease.require()
    (now,) = group.admin().progress(group.group)
    assert (now.client_id, now.epoch, now.stable) == (None, lease.epoch, 7)


def test_c18_a_worker_that_hangs_is_evicted_from_all_it_holds_and_stays_away(group: Group) -> None:
    topic = group.fill(3, 5)
    hung, heir = group.member("hung"), group.member("heir")
    with hung.consumer([topic]) as consumer:
        message = consumer.poll(10.0)  # … and its handler hangs
        wait_until(lambda: len(consumer.assignment()) == 3)
        released = group.admin().evict(group.group, "hung", force=True)
        assert [(lease.client_id, lease.partition) for lease in released] == [("hung", 0), ("hung", 1), ("hung", 2)]
        with heir.consumer([topic]) as other:
            got: set[tuple[int | None, int | None]] = set()
            while len(got) < 15:
                if (again := other.poll(10.0)) is not None:
                    got.add((again.partition(), again.offset()))
                    other.done(again)
            assert consumer.assignment() == []
            assert message is not None
            consumer.done(message)
            assert consumer.ignored_done == 1
            wait_until(consumer.assignment)  # it rejoins and gets its share


def test_c19_a_worker_hands_over_and_nothing_is_repeated(group: Group) -> None:
    topic = group.fill(2, 5)
    leaving, heir = group.member("leaving"), group.member("heir")
    with leaving.consumer([topic]) as consumer:
        wait_until(lambda: len(consumer.assignment()) == 2)
        message = consumer.poll(10.0)
        assert message is not None
        with pytest.raises(AdminError, match=r"holds [12] of 2 partitions still after 0.5 s"):
            group.admin().drain(group.group, "leaving", timeout=0.5)
        assert leaving.draining
        assert not leaving.health().ok and "hand over" in str(leaving.health())
        consumer.done(message)
        assert (
            len(group.admin().drain(group.group, "leaving", timeout=10.0)) in (1, 2) if consumer.assignment() else True
        )
        wait_until(lambda: not consumer.assignment())
        with heir.consumer([topic]) as other:
            rest = [other.poll(10.0) for _ in range(9)]
        assert (message.partition(), message.offset()) not in {
            (m.partition(), m.offset()) for m in rest if m is not None
        }
    with pytest.raises(AdminError, match="holds nothing in group"):
        group.admin().drain(group.group, "leaving")


def test_a_free_lease_can_not_be_evicted(group: Group) -> None:
    topic = group.fill(1, 0)
    admin = group.admin()
    with pytest.raises(AdminError, match=r"nobody of group .* ever held it"):
        admin.evict(group.group, topic, 0)
    group.member("a").claim(topic, 0).release(3)
    with pytest.raises(AdminError, match="is free already"):
        admin.evict(group.group, topic, 0)
    with pytest.raises(ConfigurationError, match="no \\(topic, partition\\)"):
        admin.evict(group.group, "x\x1b[2J", 0)


def pauses_written(group: Group) -> int:
    """Number of records that pause the group or end its pause."""
    ends = {cp: (0, world.next_offset) for cp, world in group.worlds().items()}
    entries = [entry for _, found in read_range(group.cluster, group.coordination, ends, 10.0) for entry in found]
    return sum(isinstance(decode(value or b"", 2), ReleaseGroup) for _, _, value in entries)


def test_a_group_that_is_gone_is_forgotten(group: Group) -> None:
    topic = group.fill(2, 10)
    group.start("a")
    group.at_rest(group.everything())
    group.threads[0].end()
    held = group.member("dead", heartbeat_interval=0.4)
    held.claim(topic, 0)
    held.terminate()
    admin = group.admin()
    assert admin.forget(group.group) == 2
    assert admin.progress(group.group) == []
    assert admin.pauses(group.group) == []
    assert admin.forget(group.group) == 0
    # It starts over, and its epochs keep growing.
    group.start("b")
    group.at_rest(group.everything(2))


def test_a_living_group_is_not_forgotten_and_continues(group: Group) -> None:
    group.fill(2, 10)
    member = group.start("a")
    group.at_rest(group.everything())
    with pytest.raises(AdminError, match=r"is alive: 'a' beat meanwhile\. Nothing was forgotten, nobody was paused"):
        group.admin().forget(group.group)
    assert pauses_written(group) == 0
    group.publish(group.data, 2, 5)
    group.messages = 15
    group.at_rest(group.everything())
    assert not member.lost
    assert group.admin().forget(group.group, force=True) == 2
    # Forced: it starts over at its start=.
    group.at_rest(group.everything(2))


def test_a_group_that_is_at_work_for_too_long_is_not_forgotten(group: Group) -> None:
    topic = group.fill(1, 0)
    lease = group.member("slow", heartbeat_interval=60.0).claim(topic, 0)
    with pytest.raises(AdminError, match=r"may be at work: after 0\.3 s 'slow' .* Nothing was forgotten") as caught:
        group.admin().forget(group.group, timeout=0.3)
    assert pauses_written(group) == 0
    assert caught.value.in_hand == ((topic, 0),)
    assert group.admin().pauses(group.group) == []
    lease.heartbeat(1)


def test_only_a_pause_that_is_there_is_ended_and_only_that_clients(group: Group) -> None:
    group.fill(1, 0)
    admin = group.admin()
    assert admin.resume(group.group) == []
    with group.admin("ops").pause(group.group) as pause:
        with pytest.raises(AdminError, match=r"not paused by 'me', but by 'ops'\. Nothing was changed"):
            admin.resume(group.group, "me")
        assert [(x.partition, x.client_id) for x in admin.resume(group.group, "ops")] == [(n, "ops") for n in range(3)]
        # The admin was alive after all: it gets an error and changes nothing.
        with pytest.raises(AdminError, match="has run out, or was ended, in partition"):
            pause.reposition({(group.data, 0): "latest"})
    assert admin.progress(group.group) == []


def test_pauses_show_their_end(group: Group) -> None:
    with group.admin("ops").pause(group.group, expires_in=100):
        for paused in group.admin().pauses(group.group):
            assert 99_000 < paused.expires - paused.log_time <= 100_000


def test_a_position_beyond_the_log_is_mended_without_a_restart(group: Group) -> None:
    """P11: the member delivers nothing and reports it; the remedy that it names works."""
    topic = group.fill(1, 10)
    member = group.start("a", position_lost="raise")
    group.at_rest(group.everything())
    admin = group.admin()
    with admin.pause(group.group) as pause:
        pause.wait_released(10)
        with pytest.raises(AdminError, match=r"offset 500 is outside the log, which holds 0 to 9.*Nothing was changed"):
            pause.reposition({(topic, 0): 500})
        pause.reposition({(topic, 0): 500}, force=True)
    wait_until(lambda: member.errors)
    assert "release-group" in str(member.errors[0])
    with admin.pause(group.group) as pause:
        pause.wait_released(10)
        pause.reposition({(topic, 0): 6})
    group.at_rest(group.everything() + Counter({(0, offset): 1 for offset in range(6, 10)}))


def test_a_log_that_was_raised_is_left_alone_where_it_was(group: Group) -> None:
    """E4: one coordination partition can't be followed; the others can."""
    topic = group.fill(20, 0)
    stopped = route_lease(topic, 0, 3)
    other = next(partition for partition in range(20) if route_lease(topic, partition, 3) != stopped)
    for partition in (0, other):
        group.member(heartbeat_interval=30.0).claim(topic, partition)
    group.append((stopped, Upgrade("i", "c", group.group, 99)))
    with pytest.raises(AdminError, match=rf"partition {stopped} .* level 99.*not paused by this admin anywhere"):
        group.admin().pause(group.group).start()
    with pytest.raises(UpgradeRequiredError, match=r"level 99.*Nothing was sent"):
        group.admin().evict(group.group, topic, 0, force=True)
    assert group.admin().evict(group.group, topic, other, force=True).partition == other


def test_without_a_coordination_topic_nothing_is_done(group: Group) -> None:
    admin = group.admin(topic="__not-there")
    for call in (lambda: admin.pause("g").start(), lambda: admin.evict("g", "t", 0), lambda: admin.pauses("g")):
        with pytest.raises(TopicMissingError, match="kafka-marshal init"):
            call()
