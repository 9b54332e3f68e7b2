"""Q51: a Marshal that is only a coordinated group's member reads its home CP; uses that need more read all."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_marshal import Admin, Group, HeldError, Marshal, errors
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.engine.effects import Effect
from kafka_marshal.node import jobs
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.replica import Begin, Listener, Replica
from kafka_marshal.ports import TailBatch
from kafka_marshal.testing.select_broker import TEST_BOOTSTRAP, RunningKafka
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import ClaimingPartition, GroupHeartbeat, Heartbeat, Record, Upgrade, World, encode, route_lease
from tests.client.conftest import take, wait_until
from tests.client.test_group import CPS, SESSION, Groups, Joined, await_shared
from tests.stored_snapshot import encode_snapshot

T = "nowhere"


class Crowd(Groups):
    """Other groups write to all CPs except the group's home."""

    def __init__(self, bootstrap: str, new_topic: Callable[..., str]) -> None:
        super().__init__(bootstrap, new_topic)
        self.others = [cp for cp in range(CPS) if cp != self.home]
        self._crowd = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
        self._claimed = 0

    def partition(self, cp: int, count: int = 1) -> int:
        """The count-th partition of T whose lease belongs to this CP."""
        found = [p for p in range(100 * CPS) if route_lease(T, p, CPS) == cp]
        return found[count - 1]

    def crowd(self, records: int) -> None:
        """Write ``records`` records of another group to each other CP: claims and rejected heartbeats."""
        for cp in self.others:
            for number in range(records):
                partition = self.partition(cp, 1 + (self._claimed + number) % 50)
                ids = (f"x-{self._claimed}", "x", "crowd")
                record: Record = ClaimingPartition(*ids, T, partition, 600_000)
                if number % 2:
                    record = Heartbeat(*ids, T, partition, number, number)
                self._crowd.produce(self.coordination, encode(record), b"", cp)
        self._claimed += 10
        assert self._crowd.flush(30) == 0

    def truth(self, begin: Begin = Begin.HISTORY) -> Mapping[int, World]:
        replica = Replica(self.cluster, self.coordination, 10, begin)
        try:
            replica.catch_up(10)
        finally:
            replica.close()
        return replica.worlds

    def alone(self, client_id: str, *topics: str, **options: Any) -> Joined:
        """A member that has joined and reads only the home."""
        made = self.joined(client_id, *topics, **options)
        wait_until(lambda: made.has() and reads(made.marshal) == [self.home])
        return made

    def knows(self, marshal: Marshal) -> bool:
        """Whether a Marshal's replica equals one that reads everything from the start (without concurrent writes)."""
        truth, driver = self.truth(), marshal._driver
        with driver.condition:
            worlds = driver.replica.worlds
            return all(cp in worlds and worlds[cp].digest() == truth[cp].digest() for cp in self.others)

    def other(self, client_id: str) -> Marshal:
        """A Marshal of another group."""
        return self.member(client_id, group_id=f"{self.group}-2")


@pytest.fixture
def crowd(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Crowd]:
    made = Crowd(kafka_bootstrap, topic_factory)
    yield made
    made.close()


def reads(marshal: Marshal) -> list[int]:
    """The CPs that are read."""
    with marshal._driver.condition:
        return sorted(marshal._driver.replica.worlds)


def assigned(marshal: Marshal) -> list[int]:
    """The CPs that its log consumer fetches, by librdkafka."""
    reading = marshal._driver.replica.tail.tail._reading  # type: ignore[attr-defined]
    found: list[int] = []
    reading.use(lambda: found.extend(place.partition for place in reading.consumer.assignment()))
    return sorted(found)


def counted(marshal: Marshal) -> Counter[int]:
    """Counts, by CP, the records that its replica applies from now on."""
    found, replica = Counter[int](), marshal._driver.replica
    apply = replica.apply

    def counting(batch: TailBatch, applied: Listener | None = None, *, history: bool = False) -> None:
        found.update({cp: len(entries) for cp, entries in batch.records.items()})
        apply(batch, applied, history=history)

    replica.apply = counting  # type: ignore[method-assign]
    return found


def test_a_member_reads_nothing_of_others(crowd: Crowd) -> None:
    topic = crowd.topic(4, 50)
    a = crowd.alone("a", topic)
    assert assigned(a.marshal) == [crowd.home]
    counts = counted(a.marshal)
    crowd.crowd(500)
    b = crowd.joined("b", topic)  # the group has a generation: it reads nothing else
    await_shared(4, a, b)
    wait_until(lambda: reads(b.marshal) == [crowd.home])
    a.take(20)
    a.consumer.commit()
    assert counts.keys() == {crowd.home}
    assert counts[crowd.home] < 100
    assert a.marshal.health().ok
    # Of the partitions that it has: which, and of which it took, is not said.
    wait_until(lambda: max(each.offset for each in b.consumer.committed([(topic, n) for n in range(4)])) > 0)
    # Calls of the consumer need no more; a marshal without a consumer reads all.
    assert reads(a.marshal) == reads(b.marshal) == [crowd.home]
    watcher = crowd.other("watcher")
    assert reads(watcher) == list(range(CPS))
    # It ends, and its lease expires as usual.
    b.marshal.terminate()
    await_shared(4, a)
    a.consumer.close()
    assert reads(a.marshal) == [crowd.home]


def test_the_view_of_the_world_is_complete(crowd: Crowd) -> None:
    topic = crowd.topic(2, 10)
    a = crowd.alone("a", topic)
    crowd.crowd(3_000)
    newest = max(crowd.truth()[cp].log_time for cp in crowd.others)
    epochs = {(piece.partition, piece.epoch) for piece in a.consumer.pieces()}
    assert {(x.partition, x.epoch) for x in a.marshal.world.leases()} == epochs
    assert crowd.knows(a.marshal)
    assert a.marshal.world.log_time >= newest
    # From then on it follows all CPs, and its membership continues.
    assert assigned(a.marshal) == list(range(CPS))
    counts = counted(a.marshal)
    crowd.crowd(200)
    wait_until(lambda: all(counts[cp] == 200 for cp in crowd.others))
    wait_until(lambda: crowd.knows(a.marshal))
    assert reads(a.marshal) == list(range(CPS)), "for good"
    assert {(piece.partition, piece.epoch) for piece in a.consumer.pieces()} == epochs
    a.take(20)


@pytest.mark.parametrize("how", ["lease", "log_time", "wait_for", "claim", "consumer", "ranges"])
def test_whatever_else_is_used_wants_all(crowd: Crowd, how: str) -> None:
    a = crowd.alone("a", crowd.topic(1, 10))
    crowd.crowd(20)
    elsewhere = crowd.partition(crowd.others[0])
    match how:
        case "lease":
            assert a.marshal.world.lease(T, elsewhere) is None, "the group's, not the crowd's"
        case "log_time":
            assert a.marshal.world.log_time > 0
        case "wait_for":
            assert a.marshal.world.wait_for(lambda view: len(view.leases()) == 1, 10)
        case "claim":
            with pytest.raises(errors.WrongKindError):
                a.marshal.claim(T, elsewhere)
        case _:
            with pytest.raises(errors.WrongKindError):
                getattr(a.marshal, how)(["other"])
    assert crowd.knows(a.marshal)
    assert a.has()


def test_what_is_done_is_known_of_partitions_whose_leases_would_be_elsewhere(crowd: Crowd) -> None:
    topic = crowd.topic(8, 2)
    every = [(topic, number) for number in range(8)]
    assert {route_lease(topic, number, CPS) for number in range(8)} - {crowd.home}
    a = crowd.alone("a", topic)
    a.take(16)
    wait_until(lambda: [each.offset for each in a.consumer.committed(every)] == [2] * 8)
    assert [each.offset for each in a.consumer.committed(every, ranges=True)] == [2] * 8
    assert reads(a.marshal) == [crowd.home], "the group's home has all of it"


def test_a_callback_may_read_the_world(crowd: Crowd) -> None:
    topic, found, go_on = crowd.topic(1, 10), list[int](), threading.Event()

    def look(consumer: Any, pieces: Any) -> None:
        assert go_on.wait(20)
        found.append(len(a.marshal.world.leases()))

    a = crowd.joined("a", topic, on_assign=look)
    wait_until(lambda: reads(a.marshal) == [crowd.home])
    go_on.set()
    wait_until(lambda: found == [1])
    assert crowd.knows(a.marshal)


def test_a_level_elsewhere_that_is_not_known_is_reported_when_it_is_read(crowd: Crowd) -> None:
    """E4: the member does not need that CP; calls that do raise."""
    a = crowd.alone("a", crowd.topic(1, 20))
    crowd.write(Upgrade("x", "admin", "any", 99), crowd.others[0])
    crowd.crowd(10)
    a.take(10)
    assert a.marshal.health().ok
    assert a.marshal.world.lease(T, crowd.partition(crowd.others[1])) is None
    assert "protocol level 99" in wait_until(lambda: str(a.marshal.health()) if not a.marshal.health().ok else "")
    wait_until(lambda: a.consumer._engine.errors)
    with pytest.raises(errors.UpgradeRequiredError):
        a.consumer.poll(10)
    assert len(a.take(10)) == 10


def test_many_threads_ask_at_once(crowd: Crowd) -> None:
    a = crowd.alone("a", crowd.topic(1, 10))
    crowd.crowd(500)
    newest = max(world.log_time for world in crowd.truth().values())
    told: list[str] = []

    class Recorder:
        def take(self, consumer: int | None, function: Callable[..., Any], of: tuple[Any, ...]) -> Any:
            told.append(function.__name__)
            return function(*of)

        def effects(self, effects: list[Effect]) -> None:
            pass

    a.marshal._driver.engine.recorder = Recorder()
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(a.marshal.world.log_time)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert min(found) >= newest
    assert told.count("caught_up") == 1, "it was read once for all of them"


def test_others_write_while_it_is_read(crowd: Crowd) -> None:
    """No record is missed between what is read beside the replica and where the replica continues."""
    topic, stop = crowd.topic(4, 10), threading.Event()
    members = [crowd.alone(name, topic) for name in "abc"]
    writes = 0

    def write() -> None:
        nonlocal writes
        while not stop.is_set():
            crowd.crowd(50)
            writes += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for member in members:
            before = writes
            wait_until(lambda before=before: writes >= before + 3)  # type: ignore[misc]
            newest = max(world.log_time for world in crowd.truth().values())
            assert member.marshal.world.log_time >= newest
        before = writes
        wait_until(lambda: writes >= before + 10)
    finally:
        stop.set()
        writer.join()
    for member in members:
        wait_until(lambda member=member: crowd.knows(member.marshal))  # type: ignore[misc]
        assert member.has()


def test_claims_after_the_group_is_gone(crowd: Crowd) -> None:
    """The same Marshal: its group is forgotten, and others claim in CPs that it does not read."""
    topic = crowd.topic(1, 10)
    a = crowd.alone("a", topic)
    wait_until(lambda: a.consumer.committed([(topic, 0)])[0].offset >= 0)  # else there is nothing to forget
    a.consumer.close()
    with Admin(crowd.bootstrap, topic=crowd.coordination) as admin:
        assert admin.forget(crowd.group) == 1
    b = crowd.member("b")
    elsewhere, free = (crowd.partition(crowd.others[0], count) for count in (1, 2))
    lease = b.claim(T, elsewhere)
    assert reads(a.marshal) == [crowd.home]
    with pytest.raises(HeldError) as refused:
        a.marshal.claim(T, elsewhere, timeout=0)
    assert refused.value.holder == "b"
    assert a.marshal.claim(T, free).valid
    assert [x.partition for x in a.marshal.world.leases()] == sorted([elsewhere, free])
    lease.release()
    assert a.marshal.claim(T, elsewhere).valid
    consumer = a.marshal.consumer([topic])
    assert len(take(consumer, 10)) == 10
    with pytest.raises(errors.WrongKindError):
        b.consumer([topic], mode=Group()).poll(10)


@pytest.mark.parametrize("is_claimed", [False, True])
def test_a_group_that_is_forgotten_is_looked_for_everywhere(crowd: Crowd, is_claimed: bool) -> None:
    """G2: without a generation at home, all CPs are read again, and no member joins beside a lease."""
    topic = crowd.topic(1, 30)
    a = crowd.alone("a", topic)
    a.take(5)
    a.consumer.close()
    with Admin(crowd.bootstrap, topic=crowd.coordination) as admin:
        assert admin.forget(crowd.group) == 1
    wait_until(lambda: a.member() is None)
    if is_claimed:
        crowd.write(ClaimingPartition("x-1", "x", crowd.group, T, crowd.partition(crowd.others[1]), 600_000), 0)
        partition = crowd.partition(crowd.others[1])
        crowd.write(ClaimingPartition("x-1", "x", crowd.group, T, partition, 600_000), crowd.others[1])
    assert reads(a.marshal) == [crowd.home]
    consumer = a.marshal.consumer([topic], mode=Group(session_timeout=SESSION / 1000))
    if is_claimed:
        with pytest.raises(errors.WrongKindError, match="leases of it in the log"):
            consumer.poll(20)
        assert crowd.truth()[crowd.home].group(crowd.group) is None, "nothing is marked"
        return
    assert len(take(consumer, 30)) == 30
    assert all(world.group(crowd.group) is not None for world in crowd.truth().values()), "marked everywhere"
    wait_until(lambda: reads(a.marshal) == [crowd.home])


def test_a_group_that_is_forgotten_while_its_member_waits(crowd: Crowd) -> None:
    """It left for a pause; the group forgotten meanwhile starts over, marked everywhere (G2)."""
    topic = crowd.topic(1, 30)
    a = crowd.alone("a", topic)
    a.take(5)
    joined = a.consumer.generation
    with Admin(crowd.bootstrap, topic=crowd.coordination) as admin:
        assert admin.forget(crowd.group, force=True) == 1
    wait_until(lambda: a.has() and a.consumer.generation > joined, 90)
    assert len(a.take(30)) == 30
    assert all(world.group(crowd.group) is not None for world in crowd.truth().values())
    wait_until(lambda: reads(a.marshal) == [crowd.home])


def snapshot_at_the_end(crowd: Crowd) -> dict[int, int]:
    """Store a snapshot of all other CPs; returns their next offsets."""
    truth = crowd.truth()
    appender = crowd.cluster.appender(snapshots_topic(crowd.coordination), delivery_timeout_ms=10_000)
    for cp in crowd.others:
        for value in encode_snapshot(truth[cp]):
            appender.append(cp, value)
    assert appender.flush(10) == 0
    appender.close()
    return {cp: truth[cp].next_offset for cp in crowd.others}


def test_old_log_is_removed_meanwhile(crowd: Crowd) -> None:
    """The place where it stopped reading is deleted: it starts from snapshots (S3)."""
    a = crowd.alone("a", crowd.topic(1, 10))
    crowd.crowd(300)
    ends = snapshot_at_the_end(crowd)
    crowd.crowd(100)
    snapshot_at_the_end(crowd)
    crowd.crowd(50)
    expected = {cp: world.digest() for cp, world in crowd.truth().items() if cp != crowd.home}
    crowd.cluster.delete_records({(crowd.coordination, cp): end for cp, end in ends.items()}, 10)
    wait_until(lambda: a.marshal.health().ok)
    assert a.marshal.world.log_time > 0
    driver = a.marshal._driver
    with driver.condition:
        assert {cp: driver.replica.worlds[cp].digest() for cp in crowd.others} == expected
        assert {driver.replica.starts[cp].begun_at for cp in crowd.others} == set(ends.values())
    crowd.crowd(50)
    counts = counted(a.marshal)
    wait_until(lambda: driver.replica.worlds[crowd.others[0]].digest() != expected[crowd.others[0]])
    assert counts.keys() <= set(range(CPS))
    assert a.has()


def test_what_cant_be_known_is_refused_and_the_member_works_on(crowd: Crowd) -> None:
    """Records are deleted without a later snapshot: claims and queries raise, repeatedly."""
    a = crowd.alone("a", crowd.topic(1, 30))
    crowd.crowd(30)
    crowd.cluster.delete_records({(crowd.coordination, cp): 20 for cp in crowd.others}, 10)
    for use in (lambda: a.marshal.world.leases(), lambda: a.marshal.world.lease(T, 1), lambda: a.marshal.claim(T, 1)):
        with pytest.raises(errors.LogCutError):
            use()
    assert a.marshal.health().ok
    assert len(a.take(30)) == 30
    assert reads(a.marshal) == [crowd.home]
    a.marshal.close()
    with pytest.raises(errors.ClosedError):
        a.marshal.world.leases()


def test_a_topic_that_is_recreated_meanwhile_is_not_taken_for_the_old_one(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = crowd.alone("a", crowd.topic(1, 10))
    crowd.crowd(30)
    monkeypatch.setattr(a.marshal._driver.upkeep.topics, "is_due", lambda now: False)  # no poll notices
    probe = Probe(crowd.bootstrap)
    probe.delete_topics([crowd.coordination, snapshots_topic(crowd.coordination)])
    wait_until(lambda: not crowd.cluster.topic_info([crowd.coordination], 10))
    create_topic(crowd.cluster, crowd.coordination, CPS, 10)
    with pytest.raises(errors.TopicChangedError):
        a.marshal.world.leases()


@pytest.mark.skipif(TEST_BOOTSTRAP in os.environ, reason="somebody else's broker is not restarted")
def test_a_broker_that_is_away_and_comes_back(crowd: Crowd, kafka_broker: RunningKafka) -> None:
    a = crowd.alone("a", crowd.topic(1, 20), marshal={"timeout": 1.0})
    crowd.crowd(100)
    kafka_broker.kill()
    try:
        with pytest.raises(errors.KafkaUnavailableError):
            a.marshal.world.leases()
    finally:
        kafka_broker.restart()
    wait_until(lambda: a.consumer.state == "PART_OF_GROUP" and a.has(), 180)
    assert reads(a.marshal) == assigned(a.marshal) == [crowd.home], "the reader goes on with what it had"
    counts = counted(a.marshal)
    crowd.crowd(100)
    assert len(a.take(20)) == 20
    assert counts.keys() <= {crowd.home}
    wait_until(lambda: crowd.truth())
    assert len(a.marshal.world.leases()) == 1
    assert crowd.knows(a.marshal)


def test_a_member_that_reads_on_is_not_held_up_by_a_look_into_all(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second replica may take long: heartbeats are sent, messages are delivered, and close ends it."""
    a = crowd.alone("a", crowd.topic(1, 200))
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Replica):
        def read(self, timeout_s: float) -> TailBatch:
            begun.set()
            go_on.wait(timeout_s)
            return super().read(timeout_s) if go_on.is_set() else TailBatch({}, {}, ())

    monkeypatch.setattr(jobs, "Replica", Slow)
    beats = Counter[str]()
    a.marshal._driver.listeners.append(lambda cp, offset, outcome: beats.update([outcome.type or ""]))
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(len(a.marshal.world.leases()))
        except errors.MarshalError as error:
            answers.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert begun.wait(20)
    wait_until(lambda: beats[GroupHeartbeat.__name__] + beats["CommitOffsets"] >= 5)
    assert len(a.take(50)) == 50
    assert a.consumer.state == "PART_OF_GROUP"
    assert not answers
    a.marshal.close()
    asking.join(20)
    assert isinstance(answers[0], errors.ClosedError)
    go_on.set()


def test_a_member_with_a_watchdog_leaves_by_it(crowd: Crowd) -> None:
    topic = crowd.topic(2, 20)
    a = crowd.alone("a", topic, marshal={"watchdog": True})
    b = crowd.alone("b", topic)
    await_shared(2, a, b)
    watchdog = a.marshal.watchdog
    assert watchdog is not None
    wait_until(lambda: watchdog.last_will.leases and not watchdog.last_will.untold)
    assert {cp for cp, _ in watchdog.last_will.leases.values()} == {crowd.home}
