"""Members of coordinated groups, on a real broker: the whole API, joins, leaves and faults."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_marshal import (
    ClientReplacedError,
    ClosedError,
    ConfigurationError,
    Group,
    GroupConsumer,
    Marshal,
    MemberPiece,
    errors,
)
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.node import jobs, topics
from kafka_marshal.testing.select_broker import TEST_BOOTSTRAP, RunningKafka
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    ForgetGroup,
    LeaveGroup,
    Member,
    Outcome,
    Record,
    ReleaseGroup,
    Upgrade,
    encode,
    route_group,
)
from rationalizer.limits import MAX_KEY_HASH
from tests.client.conftest import HI, Scene, Worker, take, wait_until
from tests.modes import options_of

SESSION = 1_500

CPS = 3


class Groups(Scene):
    """A scene whose coordination topic is at level 2."""

    def __init__(self, bootstrap: str, new_topic: Callable[..., str]) -> None:
        super().__init__(bootstrap, new_topic)
        self.home = route_group(self.group, CPS)
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
        for cp in range(CPS):
            self.write(Upgrade("x", "admin", "any", 2), cp)

    def write(self, record: Record, cp: int | None = None) -> None:
        """Write a record of another process; cp None: to the group's home."""
        self._producer.produce(self.coordination, encode(record), b"", self.home if cp is None else cp)
        assert self._producer.flush(20) == 0

    def pause(self, ms: int) -> None:
        for cp in range(CPS):
            self.write(ReleaseGroup("adm-1", "adm", self.group, int(time.time() * 1000) + ms if ms else 0), cp)

    def joined(self, client_id: str, *topics: str, marshal: dict[str, Any] | None = None, **options: Any) -> Joined:
        member = self.member(client_id, **(marshal or {}))
        return Joined(
            member, member.consumer(list(topics), **options_of(options, Group, session_timeout=SESSION / 1000))
        )


class Joined:
    """A member, and its group by the log."""

    def __init__(self, marshal: Marshal, consumer: GroupConsumer) -> None:
        self.marshal = marshal
        self.consumer = consumer

    def has(self) -> list[tuple[str, int]]:
        return [piece[:2] for piece in self.consumer.pieces() if not piece.revoked]

    def member(self, client_id: str = "") -> Member | None:
        """The member in this one's replica."""
        driver = self.marshal._driver
        with driver.condition:
            group = driver.replica.worlds[route_group(self.marshal.group_id, CPS)].group(self.marshal.group_id)
            return None if group is None else group.clients.get(client_id or self.marshal.client_id)

    def take(self, count: int) -> list[tuple[int, int]]:
        return take(self.consumer, count)


@pytest.fixture(autouse=True)
def _quick_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "METADATA_INTERVAL_MS", 500.0)
    monkeypatch.setattr(topics, "SHARED_MS", 200.0)


@pytest.fixture
def groups(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Groups]:
    made = Groups(kafka_bootstrap, topic_factory)
    yield made
    made.close()


def shared_out(count: int, *members: Joined) -> bool:
    """Whether ``count`` partitions are held, each by one member, and evenly."""
    held = [len(set(member.has())) for member in members]
    return sum(held) == count and len({key for x in members for key in x.has()}) == count and max(held) - min(held) <= 1


def await_shared(count: int, *members: Joined) -> None:
    wait_until(lambda: shared_out(count, *members), 90, f"{count} partitions: {[m.has() for m in members]}")


def test_the_surface_of_a_consumer(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kafka_marshal")
    topic = groups.topic(2, 100)
    called: list[tuple[str, list[MemberPiece]]] = []
    callbacks: dict[str, Any] = {
        name: lambda _, pieces, name=name: called.append((name, pieces)) for name in ("on_assign", "on_revoke")
    }
    a = groups.joined("a", topic, **callbacks)
    consumer = a.consumer
    for message in islice(consumer, 50):
        assert message.topic() == topic
    assert consumer.state == "PART_OF_GROUP"
    assert consumer.member_id.startswith(f"{groups.group}-")
    assert consumer.generation > 0
    pieces = consumer.pieces()
    assert pieces == [MemberPiece(topic, p, 0, MAX_KEY_HASH, consumer.generation, False) for p in (0, 1)]
    wait_until(lambda: sorted(piece for _, found in called for piece in found) == pieces)
    assert {name for name, _ in called} == {"on_assign"}
    assert [x[:2] for x in consumer.assignment()] == [(topic, 0), (topic, 1)]
    # Batches, poll, and done in any order.
    batch = next(iter(consumer.batches(max_messages=20)))
    assert {batch.epoch} == {piece.epoch for piece in pieces}
    batch.done()
    found = consumer.consume(5, timeout=10)
    polled = consumer.poll(10)
    assert polled is not None
    consumer.done(polled)
    consumer.commit()
    member = a.consumer._member
    with a.marshal._driver.condition:
        ranges = [member.view.progress((topic, p)).ranges for p in (0, 1)]  # type: ignore[union-attr]
    assert (polled.offset(), polled.offset()) in ranges[polled.partition()], "done beyond a gap"
    for message in reversed(found):
        consumer.done(message)
    consumer.commit()
    done = sum(x.offset for x in consumer.committed([(topic, 0), (topic, 1)]))
    assert done == 49 + len(batch) + 6, "the message at the end of islice is not done"
    assert repr(consumer) == f"GroupConsumer([{topic}], group_id={groups.group!r}, open)"
    health = a.marshal.health()
    assert (health.ok, health.leases, health.state) == (True, 2, "PART_OF_GROUP")
    assert str(health).startswith("ok: PART_OF_GROUP 2 pieces held")
    with pytest.raises(ConfigurationError, match="one, and no claims beside it"):
        a.marshal.consumer(["other"], mode=Group())
    with pytest.raises(errors.WrongKindError, match="convert-group"):
        a.marshal.claim(topic, 0)
    consumer.close()
    assert called[-1][0] == "on_revoke"
    assert [piece.revoked for piece in called[-1][1]] == [True, True]
    assert consumer.state == "DOWN"
    assert "closed" in repr(consumer)
    with pytest.raises(ClosedError):
        consumer.poll(0)
    # A Marshal may make another consumer afterwards: a new member, which continues where the first ended.
    again = a.marshal.consumer([topic], mode=Group(session_timeout=SESSION / 1000))
    wait_until(lambda: len(again.pieces()) == 2)
    assert sum(x.offset for x in again.committed([(topic, 0), (topic, 1)])) == done
    a.marshal.close()
    lines = [line.getMessage() for line in caplog.records]
    assert any(f"a of group {groups.group}: member {groups.group}-" in line for line in lines)
    assert any(f"took up {topic} [0-1]" in line for line in lines)
    assert not any(" lease" in line or "lost" in line for line in lines), lines


def test_a_member_seeks_pauses_and_resumes(groups: Groups) -> None:
    topic = groups.topic(2, 100)
    consumer = groups.joined("a", topic).consumer
    wait_until(lambda: len(consumer.assignment()) == 2)
    consumer.pause([(topic, 0)])
    consumer.seek(topic, 1, 100)
    assert consumer.poll(0.3) is None
    consumer.resume()
    with pytest.raises(ConfigurationError, match="position is"):
        consumer.seek(topic, 1, 3)
    assert {message.partition() for message in islice(consumer, 100)} == {0}
    assert (consumer.stuck, consumer.gaps, consumer.unprocessed, consumer.ignored_done) == ([], [], [], 0)


def test_members_topics_and_partitions_come_and_go(groups: Groups) -> None:
    first, name = groups.topic(3, 20), f"later-{os.urandom(4).hex()}"
    a = groups.joined("a", f"^{first}$", f"^{name}")
    await_shared(3, a)
    b = groups.joined("b", f"^{first}$", f"^{name}")
    await_shared(3, a, b)
    probe = Probe(groups.bootstrap)
    try:
        probe.create_topic(name, 2, 1, {})
        groups.publish(name, 2, 20)
        await_shared(5, a, b)
        groups.grow(name, 5)
        groups.publish(name, 5, 20)
        await_shared(8, a, b)
        seen = Counter[tuple[str, int, int]]()
        lock = threading.Lock()

        def read(member: Joined) -> None:
            for message in member.consumer:
                with lock:
                    seen[message.topic() or "", message.partition() or 0, message.offset() or 0] += 1

        threads = [threading.Thread(target=read, args=[x], daemon=True) for x in (a, b)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(seen) == 3 * 20 + 2 * 40 + 3 * 20)
        c = groups.joined("c", f"^{first}$", f"^{name}")
        threads.append(threading.Thread(target=read, args=[c], daemon=True))
        threads[-1].start()
        await_shared(8, a, b, c)
        b.marshal.close()
        await_shared(8, a, c)
        assert set(seen.values()) == {1}, "a member finishes and commits what is in hand before it releases it"
        probe.delete_topics([name])
        await_shared(3, a, c)
        # A topic of the same name is another topic: its positions are lost until an operator sets them (P12).
        probe.create_topic(name, 1, 1, {})
        groups.publish(name, 1, 3)
        lost, *_ = wait_until(lambda: a.consumer.lost_positions + c.consumer.lost_positions)
        assert (lost.topic, lost.partition) == (name, 0)
        groups.pause(60_000)
        wait_until(lambda: a.member("a") is None and a.member("c") is None)
        entries = tuple(CommitEntry(name, p, through=-1) for p in range(5))
        groups.write(CommitOffsets("adm-1", "adm", groups.group, "", 0, False, entries))
        groups.pause(0)
        wait_until(lambda: [seen[name, 0, offset] for offset in range(3)] == [2, 2, 2])
        assert a.consumer.lost_positions == c.consumer.lost_positions == []
        for member in (a, c):
            member.marshal.stop()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
    finally:
        probe.delete_topics([name])


def test_where_a_group_begins_and_what_it_refuses(groups: Groups) -> None:
    """start=, wrong use, and the message of each rejection."""
    topic = groups.topic(2, 30)
    latest = groups.joined("a", topic, start="latest", strategy="range")
    await_shared(2, latest)
    wait_until(lambda: all(x.offset == 30 for x in latest.consumer.committed([(topic, 0), (topic, 1)])))
    groups.publish(topic, 2, 1)
    assert sorted(latest.take(2)) == [(0, 30), (1, 30)]
    other = groups.joined("b", topic, strategy="sticky")
    with pytest.raises(errors.InconsistentPartitioningStrategyError, match="Give all members the same"):
        other.consumer.poll(20)
    with pytest.raises(errors.InconsistentPartitioningStrategyError):
        next(iter(other.consumer))
    assert (other.consumer.state, other.consumer.pieces(), other.marshal.health().ok) == ("DOWN", [], False)
    assert "the log refuses it" in str(other.marshal.health())
    assert other.marshal.health().needs_restart
    began = time.monotonic()
    other.marshal.close()
    assert time.monotonic() - began < 2
    for cp in range(CPS):
        groups.write(ConfigureGroup("x", "adm", groups.group, (("max_session_timeout_ms", 60_000),)), cp)
    slow = groups.joined("c", topic, strategy="range", session_timeout=60.001)
    with pytest.raises(errors.SessionTimeoutTooHighError, match="max_session_timeout_ms"):
        slow.consumer.poll(20)
    for wrong in ({"strategy": "fair"}, {"session_timeout": 0.01}, {"allow_key_share": 1}, {"start": "first"}):
        with pytest.raises(ConfigurationError):
            slow.marshal.consumer([topic], **options_of(wrong, Group))
    with pytest.raises(ConfigurationError):
        latest.consumer.commit(timeout=-1)
    # The other kind, both ways.
    claiming = groups.member("d")
    for make in (claiming.consumer, claiming.ranges):
        with pytest.raises(errors.WrongKindError, match=r"mode=Group\(\).*convert-group"):
            make([topic])
    began = time.monotonic()
    with pytest.raises(errors.WrongKindError):
        claiming.claim(topic, 0, timeout=20)
    assert time.monotonic() - began < 5
    claimed = groups.member("e", group_id="claimed")
    lease = claimed.claim(topic, 0)
    refused = groups.joined("f", topic, marshal={"group_id": "claimed"})
    with pytest.raises(errors.WrongKindError, match=r"claimed group.*convert-group claimed --to coordinated"):
        refused.consumer.poll(20)
    lease.release()
    # Since a moment.
    dated = groups.joined("g", topic, marshal={"group_id": "dated"}, start=datetime(2020, 1, 1, tzinfo=UTC))
    assert len(dated.take(62)) == 62


def test_a_group_becomes_coordinated_under_a_claiming_consumer(groups: Groups) -> None:
    """A claiming consumer gets an error once the log rejects it, and stops claiming."""
    name = f"late-{os.urandom(4).hex()}"
    claiming = groups.member("a")
    consumer, ranges = claiming.consumer([name]), claiming.ranges([f"{name}-2"])
    claims: list[str] = []

    def applied(cp: int, offset: int, outcome: Outcome) -> None:
        if outcome.is_a(ClaimingPartition):
            claims.append(outcome.code)

    claiming._driver.listeners.append(applied)
    for cp in range(CPS):
        groups.write(ConfigureGroup("x", "adm", groups.group), cp)
    probe = Probe(groups.bootstrap)
    try:
        probe.create_topic(name, 2, 1, {})
        for _ in range(2):
            with pytest.raises(errors.WrongKindError, match=r"mode=Group\(\)"):
                consumer.poll(20)
        with pytest.raises(errors.WrongKindError):
            ranges.take(10, timeout=20)
        until = time.monotonic() + 3 * HI / 1000
        wait_until(lambda: time.monotonic() > until)
        assert len(claims) <= 2, "it claims again and again"
    finally:
        probe.delete_topics([name])


def test_what_an_operator_does_to_a_member(groups: Groups, caplog: pytest.LogCaptureFixture) -> None:
    """Evict, drain, pause, reposition, forget."""
    topic = groups.topic(2, 10)
    a, b = groups.joined("a", topic), groups.joined("b", topic)
    await_shared(2, a, b)

    # Evict: another process leaves in its name.
    def leave(whose: Joined, instance: str = "") -> None:
        member = whose.member()
        assert member is not None
        who = (instance or member.instance_id, member.client_id, groups.group)
        groups.write(LeaveGroup(*who, member.member_id, member.slot))

    in_hand = b.consumer.poll(20)
    assert in_hand is not None
    leave(b)
    await_shared(2, a)
    assert b.consumer.state == "STARTUP"
    began = time.monotonic()
    wait_until(lambda: a.member("b") is not None or time.monotonic() - began > 3 * SESSION / 1000 + 0.5)
    assert a.member("b") is None, "it joins only when what it had in hand has come back"
    b.consumer.done(in_hand)
    await_shared(2, a, b)
    assert time.monotonic() - began >= 3 * SESSION / 1000
    assert any("an operator removed this member" in line for line in caplog.messages)

    # Drain: asked to leave, it finishes messages in flight.
    in_hand = b.consumer.poll(20)
    assert in_hand is not None
    leave(b, "operator")
    wait_until(lambda: b.marshal.draining)
    b.consumer.done(in_hand)
    await_shared(2, a)
    assert b.consumer.state == "DOWN"
    b.marshal.close()
    assert any("asks 'b' to hand over" in line for line in caplog.messages)

    # Pause and reposition: progress is replaced, and the members continue from there.
    a.take(19)
    groups.pause(60_000)
    wait_until(lambda: a.member() is None and a.consumer.pieces() == [])
    assert a.consumer.poll(0.2) is None
    entries = tuple(CommitEntry(topic, p, through=7) for p in (0, 1))
    groups.write(CommitOffsets("adm-1", "adm", groups.group, "", 0, False, entries))
    groups.pause(0)
    assert sorted(a.take(4)) == [(0, 8), (0, 9), (1, 8), (1, 9)]
    a.consumer.commit()

    # Forgotten while a member can't respond: it ends and reports it.
    with a.marshal._driver.condition:  # as if its process were stopped
        groups.pause(60_000)
        until = time.monotonic() + SESSION / 1000 + 0.3
        wait_until(lambda: time.monotonic() > until)
        for cp in range(CPS):
            groups.write(ForgetGroup("adm-1", "adm", groups.group), cp)
    with pytest.raises(errors.GroupForgottenError, match="forget-group"):
        a.consumer.poll(20)
    with pytest.raises(errors.GroupForgottenError):
        a.consumer.poll(20)


def test_two_lives_of_one_client_id(groups: Groups) -> None:
    """A restart without a leave moves nothing; of two living processes the older one ends."""
    topic = groups.topic(4, 50)
    a, b = groups.joined("a", topic), groups.joined("b", topic)
    await_shared(4, a, b)
    had = {piece[:2]: piece.epoch for piece in a.consumer.pieces()}
    others = b.consumer.pieces()
    done = len(a.take(10))
    a.marshal.terminate()
    assert a.consumer.state == "DOWN"
    assert b.member("a") is not None, "the membership stays for the session"
    again = groups.joined("a", topic)
    wait_until(lambda: again.has() == sorted(had), SESSION / 1000)
    assert b.consumer.pieces() == others
    assert all(had[piece[:2]] < piece.epoch for piece in again.consumer.pieces())
    assert sum(x.offset for x in again.consumer.committed(list(had))) == done, "the last words hold what was done"
    # Two at once.
    third = groups.joined("a", topic)
    wait_until(lambda: third.has() == sorted(had))
    with pytest.raises(ClientReplacedError, match="own client_id"):
        again.consumer.poll(20)
    assert again.consumer.state == "DOWN"
    assert not again.marshal.health().ok
    # A forked child gets no messages: they belong to the parent.
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            third.consumer.poll(0.1)
            os.write(write, b"a message?")
        except errors.ForkedError:
            os.write(write, b"forked")
        finally:
            os._exit(0)
    assert os.read(read, 20) == b"forked"
    os.waitpid(child, 0)
    assert len(third.take(10)) == 10


MESSAGES = 300


def members_of(watcher: Joined) -> set[str]:
    driver = watcher.marshal._driver
    with driver.condition:
        group = driver.replica.worlds[route_group(watcher.marshal.group_id, CPS)].group(watcher.marshal.group_id)
        return set() if group is None else set(group.clients)


def handled(*workers: Worker) -> Counter[tuple[int, int]]:
    return Counter(place for worker in workers for place in worker.offsets())


def at_work(groups: Groups, folder: Path, names: str, **options: Any) -> tuple[Joined, list[Worker]]:
    """An observer, and workers that share six partitions; then all messages are published."""
    topic = groups.topic(6)
    watcher = Joined(groups.member("watcher"), None)  # type: ignore[arg-type]  # it joins nothing
    workers = [groups.worker(name, topic, folder, session=SESSION, pause_s=0.002, **options) for name in names]
    wait_until(lambda: members_of(watcher) == set(names), 180)
    groups.publish(topic, 6, MESSAGES)
    wait_until(lambda: all(len(worker.offsets()) > 30 for worker in workers), 180)
    return watcher, workers


def test_alo_processes_are_killed_stopped_and_ended(groups: Groups, tmp_path: Path) -> None:
    everything = {(partition, offset) for partition in range(6) for offset in range(MESSAGES)}
    watcher, (a, b, c) = at_work(groups, tmp_path, "abc")
    a.kill()
    died_at = time.time()
    wait_until(lambda: members_of(watcher) == {"b", "c"})
    assert time.time() - died_at < 1.3 * SESSION / 1000 + 0.5
    b.stop()
    wait_until(lambda: members_of(watcher) == {"c"})
    before = len(b.lines())
    b.go_on()
    wait_until(lambda: members_of(watcher) == {"b", "c"})
    lost = wait_until(lambda: b.offsets("lost"))
    # Messages in flight may be finished; fetched ones must not be delivered, as others have them.
    until_told = [line["what"] for line in b.lines()[before:]].index("lost")
    assert until_told <= 1, b.lines()[before:]
    assert len(lost) >= 2
    began = time.monotonic()
    assert c.terminate() == 0
    wait_until(lambda: members_of(watcher) == {"b"})
    assert time.monotonic() - began < 5
    wait_until(lambda: set(handled(a, b, c)) == everything, 180)


@pytest.mark.parametrize("how", [pytest.param("iteration", marks=pytest.mark.campaign), "batches"])
def test_amo_nothing_is_repeated_at_kill_9_and_a_restart_continues(groups: Groups, tmp_path: Path, how: str) -> None:
    options = {"delivery": "at-most-once", "batch_size": 20, "how": how}
    watcher, (a, b) = at_work(groups, tmp_path, "ab", **options)
    first = watcher.member("a")
    assert first is not None
    a.kill()
    topic = next(iter(first.topics))
    again = groups.worker("a", topic, tmp_path, session=SESSION, **options)
    lasts = {(partition, MESSAGES - 1) for partition in range(6)}
    wait_until(lambda: lasts <= set(handled(a, b, again)), 180)
    assert len(again.offsets()) > 50, "the restart took its own partitions up"
    found = handled(a, b, again)
    assert max(found.values()) == 1
    assert 6 * MESSAGES - len(found) <= 3 * 20, "at most one batch of each partition that it had"


@pytest.mark.skipif(TEST_BOOTSTRAP in os.environ, reason="somebody else's broker is not restarted")
def test_a_broker_that_is_restarted_ends_no_membership(groups: Groups, kafka_broker: RunningKafka) -> None:
    """Down for longer than the session: nothing is delivered, then all continue with what they had (G8)."""
    topic = groups.topic(4, 10)
    a, b = groups.joined("a", topic), groups.joined("b", topic)
    await_shared(4, a, b)
    had = [(x.consumer.member_id, x.consumer.pieces()) for x in (a, b)]
    a.take(5)
    kafka_broker.kill()
    try:
        wait_until(lambda: a.consumer.state == b.consumer.state == "REDISCOVER")
        assert a.consumer.poll(0.2) is None
        assert "can't prove" in str(a.marshal.health())
        with pytest.raises(errors.KafkaUnavailableError, match="Nothing is lost"):
            a.consumer.commit(timeout=0.2)
    finally:
        kafka_broker.restart()
    wait_until(lambda: a.consumer.state == b.consumer.state == "PART_OF_GROUP", 180)
    assert [(x.consumer.member_id, x.consumer.pieces()) for x in (a, b)] == had
    assert len(a.take(15)) == 15
    assert len(b.take(20)) == 20
