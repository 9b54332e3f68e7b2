"""Import of positions from Kafka's consumer groups and export to them, with a real consumer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from kafka_marshal import AdminError, ConfigurationError
from kafka_marshal.errors import WrongKindError
from rationalizer import CommitEntry, CommitOffsets, JoinGroup, LeaveGroup, Upgrade, route_group
from tests.admin.conftest import Group

PROTOCOLS = ["classic", "consumer"]


@pytest.fixture
def empty(group: Group) -> Iterator[Group]:
    """Three partitions of 30 messages; the log is at level 2."""
    group.fill(3, 30)
    group.append(*((cp, Upgrade("raw-1", "raw", "raw", 2)) for cp in range(3)))
    yield group


def consumer(group: Group, protocol: str, reset: str = "error") -> Consumer:
    settings: dict[str, Any] = {
        "bootstrap.servers": group.bootstrap,
        "group.id": group.group,
        "client.id": "theirs",
        "group.protocol": protocol,
        "auto.offset.reset": reset,
        "enable.auto.commit": False,
    }
    made = Consumer(settings)
    made.subscribe([group.data])
    return made


def read(kafka: Consumer, messages: int) -> list[tuple[int, int]]:
    """(partition, offset) of the next ``messages`` messages."""
    found: list[tuple[int, int]] = []
    while len(found) < messages:
        message = kafka.poll(1.0)
        if message is not None:
            assert message.error() is None, message.error()
            found.append((message.partition() or 0, message.offset() or 0))
    return found


def commit_half(group: Group, protocol: str) -> dict[int, int]:
    """A real consumer reads everything and commits part of it; partition → offset."""
    offsets = {0: 10, 1: 25, 2: 0}
    kafka = consumer(group, protocol, "earliest")
    read(kafka, 90)
    committed = [
        TopicPartition(group.data, partition, offset, f"m{partition}") for partition, offset in offsets.items()
    ]
    kafka.commit(offsets=committed, asynchronous=False)
    kafka.close()
    return offsets


def home(group: Group) -> int:
    return route_group(group.group, 3)


def stable(group: Group) -> dict[int, int]:
    found = group.worlds()[home(group)].group(group.group)
    return {} if found is None else {partition: kept.progress.stable for _, partition, kept in found.all_progress()}


def join(group: Group, client: str = "a") -> str:
    """A member, by a raw record; its member_id."""
    ids = (f"{client}-1", client, group.group)
    group.append((home(group), JoinGroup(*ids, "", 0, 30_000, "sticky", False, "", ((group.data, 3),))))
    found = group.worlds()[home(group)].group(group.group)
    assert found is not None
    return found.clients[client].member_id


def commit(group: Group, member_id: str, *entries: CommitEntry, client: str = "a") -> None:
    found = group.worlds()[home(group)].group(group.group)
    assert found is not None
    ids = (f"{client}-1", client, group.group)
    group.append((home(group), CommitOffsets(*ids, member_id, found.generation, False, entries)))


def end(group: Group, member_id: str, client: str = "a") -> None:
    found = group.worlds()[home(group)].group(group.group)
    assert found is not None
    group.append((home(group), LeaveGroup(f"{client}-1", client, group.group, member_id, found.generation)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_consumer_committed_is_where_a_coordinated_group_begins(empty: Group, protocol: str) -> None:
    offsets = commit_half(empty, protocol)
    admin = empty.admin()
    planned = admin.import_group(empty.group, dry_run=True)
    assert stable(empty) == {}
    moves = admin.import_group(empty.group)
    assert [(move.partition, move.before, move.after) for move in moves] == [(0, None, 10), (1, None, 25), (2, None, 0)]
    assert moves == planned
    assert stable(empty) == {partition: offset - 1 for partition, offset in offsets.items()}
    worlds = empty.worlds()
    assert all(world.group(empty.group) is not None for world in worlds.values()), "it is marked everywhere (G2)"
    found = worlds[home(empty)].group(empty.group)
    assert found is not None
    assert [kept.metadata for _, _, kept in found.all_progress()] == ["m0", "m1", "m2"]
    assert admin.pauses(empty.group) == []
    assert all(move.before == move.after for move in admin.import_group(empty.group)), "once more changes nothing"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_consumer_continues_where_a_coordinated_group_was(empty: Group, protocol: str) -> None:
    member = join(empty)
    entries = [CommitEntry(empty.data, 0, through=9), CommitEntry(empty.data, 1, through=28, metadata="mine")]
    commit(empty, member, *entries, CommitEntry(empty.data, 2, through=19))
    commit(empty, member, CommitEntry(empty.data, 2, ranges=((22, 24),)))
    with pytest.raises(AdminError, match=r"may be at work: after 1 s .a. are not silent"):
        empty.admin().export_group(empty.group, timeout=1)
    end(empty, member)
    moves = empty.admin().export_group(empty.group)
    assert [(x.partition, x.before, x.after, x.done_ahead) for x in moves] == [
        (0, None, 10, 0),
        (1, None, 29, 0),
        (2, None, 20, 3),
    ]
    assert empty.cluster.kafka_group(empty.group, 10).committed == {
        (empty.data, 0): (10, ""),
        (empty.data, 1): (29, "mine"),
        (empty.data, 2): (20, ""),
    }
    kafka = consumer(empty, protocol)
    assert sorted(read(kafka, 31)) == [
        *((0, offset) for offset in range(10, 30)),
        (1, 29),
        *((2, offset) for offset in range(20, 30)),
    ]
    kafka.close()


def test_a_claimed_group_can_be_exported_too(group: Group) -> None:
    group.fill(3, 30)
    group.lay({0: (9, -1, []), 1: (9, 9, [(12, 14)])})
    moves = group.admin().export_group(group.group)
    assert [(x.partition, x.after, x.done_ahead) for x in moves] == [(0, 10, 0), (1, 10, 3)]
    assert group.cluster.kafka_group(group.group, 10).committed == {
        (group.data, 0): (10, ""),
        (group.data, 1): (10, ""),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_changed_while_the_kafka_group_has_members(empty: Group, protocol: str) -> None:
    member = join(empty)
    commit(empty, member, CommitEntry(empty.data, 0, through=20))
    end(empty, member)
    kafka = consumer(empty, protocol, "earliest")
    read(kafka, 1)
    kafka.commit(offsets=[TopicPartition(empty.data, 0, 3)], asynchronous=False)
    for call in (empty.admin().import_group, empty.admin().export_group):
        with pytest.raises(AdminError, match="has members: theirs"):
            call(empty.group, force=True)
    assert stable(empty) == {0: 20}
    assert empty.cluster.kafka_group(empty.group, 10).committed == {(empty.data, 0): (3, "")}
    kafka.close()


def test_positions_are_replaced_only_by_force(empty: Group) -> None:
    empty.cluster.commit_for_group(empty.group, {(empty.data, 0): (3, "")}, 10)
    member = join(empty)
    commit(empty, member, CommitEntry(empty.data, 0, through=20))
    with pytest.raises(AdminError, match=r"may be at work: after 1 s .a. are not silent"):
        empty.admin().import_group(empty.group, force=True, timeout=1)
    end(empty, member)
    with pytest.raises(AdminError, match=r"has positions already.*21 → 3"):
        empty.admin().import_group(empty.group)
    assert stable(empty) == {0: 20}
    empty.admin().import_group(empty.group, force=True)
    assert stable(empty) == {0: 2}
    empty.cluster.commit_for_group(empty.group, {(empty.data, 0): (7, "")}, 10)
    with pytest.raises(AdminError, match=r"committed more than is done here.*7 → 3"):
        empty.admin().export_group(empty.group)
    assert empty.cluster.kafka_group(empty.group, 10).committed == {(empty.data, 0): (7, "")}
    empty.admin().export_group(empty.group, force=True)
    assert empty.cluster.kafka_group(empty.group, 10).committed == {(empty.data, 0): (3, "")}


def test_what_can_not_be_imported(empty: Group, group: Group) -> None:
    with pytest.raises(AdminError, match="no committed offsets"):
        empty.admin().import_group(empty.group)
    with pytest.raises(AdminError, match="has no positions here"):
        empty.admin().export_group(empty.group)
    empty.cluster.commit_for_group(empty.group, {(empty.data, 0): (3, "")}, 10)
    empty.lay({0: (9, -1, [])})
    with pytest.raises(WrongKindError, match="convert-group"):
        empty.admin().import_group(empty.group)
    with pytest.raises(ConfigurationError):
        empty.admin().import_group("")


def test_positions_of_a_topic_that_is_gone_are_left_out(empty: Group) -> None:
    member = join(empty)
    commit(empty, member, CommitEntry(empty.data, 0, through=20), CommitEntry(empty.data, 1, through=99))
    end(empty, member)
    moves = empty.admin().export_group(empty.group)
    assert [bool(move.lost) for move in moves] == [False, True]
    assert empty.cluster.kafka_group(empty.group, 10).committed == {(empty.data, 0): (21, "")}
