"""Evicting, forgetting, and ending pauses (C8, C10, C16)."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from kafka_marshal import AdminError, ConfigurationError, LeaseLostError
from kafka_marshal.errors import TopicMissingError, UpgradeRequiredError
from kafka_marshal.node.log_reader import read_range
from rationalizer import ReleaseGroup, Upgrade, decode, route_lease
from tests.admin.conftest import HI, Group, wait_until


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
