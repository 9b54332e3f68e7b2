"""Shared reads (U13): members join, leave, fall behind and go back; each gets what a single reader would.

The contract of readers is tests/contract/test_data_reader.py: also of one that has a twin in its process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from threading import Event, Thread

import pytest

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.adapters.memory.readers import MemoryDataReader
from kafka_marshal.client import shared_reads
from kafka_marshal.client.shared_reads import AHEAD, Pool, SharedReader, shared_reader
from kafka_marshal.ports import DataFault, DataReader, FaultKind, Message
from kafka_marshal.runtime import THREADS
from tests.client.conftest import wait_until

TOPIC = "t"
Key = tuple[str, int]


class Place:
    """A cluster in memory with one topic, and members of a process that read it."""

    def __init__(self, partitions: int = 1, max_bytes: int = 2**20) -> None:
        self.cluster = MemoryCluster()
        self.cluster.broker.create_topic(TOPIC, partitions)
        self.max_bytes = max_bytes
        self.opened: list[DataReader] = []

    def make(self) -> DataReader:
        self.opened.append(self.cluster.data_reader("g", {}))
        return self.opened[-1]

    def reader(self) -> Taker:
        return Taker(shared_reader(self, THREADS, self.make, self.max_bytes))

    def produce(self, count: int, partition: int = 0, size: int = 1) -> None:
        for _ in range(count):
            self.cluster.broker.produce(TOPIC, partition, b"x" * size)

    def source(self) -> MemoryDataReader:
        """The reader of all."""
        found = shared_reads._POOLS[self].source
        assert isinstance(found, MemoryDataReader)
        return found

    @property
    def kept_bytes(self) -> int:
        """Of this place alone: what another test of the process has left does not count."""
        pool = shared_reads._POOLS.get(self)
        return 0 if pool is None else pool.size


class Taker:
    """A member, and what it was given of each partition since that was assigned."""

    def __init__(self, reader: SharedReader) -> None:
        self.reader = reader
        self.got: dict[Key, list[int]] = {}
        self.begun: dict[Key, int] = {}
        self.ends: dict[Key, int] = {}
        self.faults: list[DataFault] = []
        self.values: list[bytes | str | None] = []

    def assign(self, position: int, partition: int = 0) -> None:
        key = (TOPIC, partition)
        self.begun[key], self.got[key] = position, []
        self.ends.pop(key, None)
        self.reader.assign({key: position})

    def unassign(self, partition: int = 0) -> None:
        self.reader.unassign([(TOPIC, partition)])
        del self.begun[TOPIC, partition]

    def read(self, most: int = 10_000, timeout_s: float = 0.0) -> list[Message]:
        messages, faults = self.reader.read(most, timeout_s)
        for each in messages:
            self.got[each.topic() or "", each.partition() or 0].append(each.offset() or 0)
            self.values.append(each.value())
        for key, end in self.reader.take_ends().items():
            assert key in self.begun
            assert all(offset < end for offset in self.got[key])
            self.ends[key] = end
        self.faults += faults
        return messages

    def at(self, partition: int = 0) -> int:
        """How far it was read."""
        key = (TOPIC, partition)
        return max([self.begun[key], self.ends.get(key, 0), *(offset + 1 for offset in self.got[key])])

    def reach(self, end: int, partition: int = 0) -> None:
        def look() -> bool:
            self.read(timeout_s=0.05)
            return self.at(partition) >= end

        wait_until(look)

    def read_until_a_fault(self) -> None:
        wait_until(lambda: bool(self.read(timeout_s=0.01)) or bool(self.faults))

    def is_fed(self) -> bool:
        return any(part.feed is not None for part in self.reader.parts.values())


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    assert made.kept_bytes == 0
    assert made not in shared_reads._POOLS


def test_one_that_is_alone_reads_by_itself_and_two_read_once(place: Place) -> None:
    place.produce(100)
    one = place.reader()
    one.assign(0)
    one.reach(100)
    assert not one.is_fed() and len(place.opened) == 1
    two = place.reader()
    two.assign(100)
    one.read()
    assert one.is_fed() and two.is_fed()
    place.produce(100)
    one.reach(200)
    assert place.kept_bytes > 0
    two.reach(200)
    assert place.kept_bytes == 0
    assert one.got[TOPIC, 0] == list(range(200)) and two.got[TOPIC, 0] == list(range(100, 200))
    assert all(isinstance(each, MemoryDataReader) and not each._positions for each in place.opened[:2])
    assert (one.reader.hits, one.reader.misses, two.reader.hits, two.reader.misses) == (0, 100, 100, 0)
    two.reader.close()
    place.produce(10)
    one.reach(210)
    one.reader.close()


def test_who_falls_behind_what_is_kept_reads_alone_and_comes_back(place: Place) -> None:
    place.max_bytes = 100_000
    fast, slow = place.reader(), place.reader()
    fast.assign(0)
    slow.assign(0)
    for _ in range(20):
        place.produce(100, size=100)
        fast.reach(fast.at() + 100)
        assert place.kept_bytes <= 100_000
    assert fast.is_fed() and not slow.is_fed()
    slow.reach(2_000)
    assert slow.got[TOPIC, 0] == list(range(2_000))
    assert slow.reader.misses >= 1_500
    place.produce(1)
    fast.reach(2_001)
    slow.reach(2_001)
    slow.read()
    assert slow.is_fed()
    place.produce(1)
    fast.reach(2_002)
    slow.reach(2_002)
    assert slow.got[TOPIC, 0] == list(range(2_002))
    fast.reader.close()
    slow.reader.close()


def test_one_that_begins_a_little_later_meets_one_that_is_as_fast() -> None:
    place = Place(max_bytes=10 * 2**20)
    place.produce(20_000)
    one, two = place.reader(), place.reader()
    one.assign(0)
    while one.at() < 5_000:
        one.read(500, 1.0)
    two.assign(0)
    while one.at() < 20_000:
        one.read(500, 1.0)
        two.read(500, 1.0)
    assert one.is_fed() and two.is_fed(), "kept for it, until it had read alone what was before"
    two.reach(20_000)
    assert two.reader.hits >= 14_000 and place.kept_bytes == 0
    assert one.got[TOPIC, 0] == two.got[TOPIC, 0] == list(range(20_000))
    one.reader.close()
    two.reader.close()


def test_a_limit_below_what_one_read_brings_stops_no_member(place: Place) -> None:
    place.max_bytes = 1_000
    one, two = place.reader(), place.reader()
    one.assign(0)
    two.assign(0)
    for end in range(100, 1_000, 100):
        place.produce(100, size=100)
        one.reach(end)
        two.reach(end)
    assert one.got == two.got == {(TOPIC, 0): list(range(900))}
    one.reader.close()
    two.reader.close()


def test_one_that_does_not_read_at_all_keeps_nothing_in_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler hangs: what others have had must not be referenced for ever."""
    monkeypatch.setattr(shared_reads, "SILENT_S", 0.05)
    one, hung = place.reader(), place.reader()
    one.assign(0)
    hung.assign(0)
    place.produce(10)
    one.reach(10)
    assert hung.is_fed()
    end = 10
    while hung.is_fed():
        time.sleep(0.01)
        place.produce(1)
        one.reach(end := end + 1)
    assert place.kept_bytes == 0
    hung.reach(end)
    assert hung.got[TOPIC, 0] == list(range(end))
    one.reader.close()
    hung.reader.close()


def test_a_feed_is_read_no_further_than_its_fastest_member_needs(place: Place) -> None:
    one, two = place.reader(), place.reader()
    one.assign(0)
    two.assign(0)
    place.produce(5 * AHEAD)
    one.read(10, timeout_s=1.0)
    two.read(10, timeout_s=1.0)
    for _ in range(20):
        one.read(1)
        two.read(1)
    (feed,) = shared_reads._POOLS[place].feeds.values()
    assert feed.next <= AHEAD + 2 * shared_reads.READ_SIZE
    one.reach(5 * AHEAD)
    two.reach(5 * AHEAD)
    assert one.got == two.got == {(TOPIC, 0): list(range(5 * AHEAD))}
    one.reader.close()
    two.reader.close()


def test_pause_and_going_back_leave_the_other_as_it_is(place: Place) -> None:
    one, two = place.reader(), place.reader()
    one.assign(0)
    two.assign(0)
    place.produce(50)
    one.reach(50)
    two.reach(50)
    one.reader.pause([(TOPIC, 0)])
    place.produce(50)
    two.reach(100)
    assert not one.read(timeout_s=0.05)
    one.reader.resume([(TOPIC, 0)])
    one.reach(100)
    two.assign(20)
    two.reach(100)
    place.produce(50)
    one.reach(150)
    two.reach(150)
    assert one.got[TOPIC, 0] == list(range(150)) and two.got[TOPIC, 0] == list(range(20, 150))
    one.reader.close()
    place.produce(5)
    two.reach(155)
    two.reader.close()


def test_a_reader_that_is_deaf_is_left_by_each_that_notices(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reads, "DEAF_S", 0.02)
    one, two = place.reader(), place.reader()
    one.assign(0)
    two.assign(0)
    place.produce(10)
    one.reach(10)
    two.reach(10)
    place.source()._resting.add((TOPIC, 0))  # it delivers nothing more, without a word
    place.produce(10)
    assert not one.read(timeout_s=0.05) and not two.read(timeout_s=0.05)
    one.assign(10)  # as the monitor of a member's fetches does
    one.reach(20)
    assert not one.is_fed()
    assert not two.read(timeout_s=0.05)
    two.assign(10)
    two.reach(20)
    place.produce(10)
    one.reach(30)
    two.reach(30)
    assert not (one.is_fed() or two.is_fed()), "it is not tried again soon"
    assert one.got[TOPIC, 0] == two.got[TOPIC, 0] == list(range(10, 30))
    one.reader.close()
    two.reader.close()


def test_what_is_below_the_start_of_the_log_and_a_recreated_topic_are_told_to_each(place: Place) -> None:
    one, two = place.reader(), place.reader()
    place.produce(10)
    one.assign(0)
    two.assign(0)
    one.reach(10)
    place.produce(10)
    one.reach(20)
    place.cluster.broker.delete_records(TOPIC, 0, 15)
    assert two.is_fed()
    two.reach(20)
    assert two.got[TOPIC, 0] == list(range(20)), "it was kept"
    one.assign(3)
    two.assign(3)
    for taker in (one, two):
        taker.read_until_a_fault()
        assert [fault.kind for fault in taker.faults] == [FaultKind.OUT_OF_RANGE]
        taker.assign(15)
        taker.reach(20)
        taker.faults.clear()
    one.assign(20)
    two.assign(20)
    for _ in range(3):
        one.read(timeout_s=0.01)
        two.read(timeout_s=0.01)
    place.cluster.broker.delete_topic(TOPIC)
    place.cluster.broker.create_topic(TOPIC, 1)
    place.cluster.broker.produce(TOPIC, 0, b"new")
    for taker in (one, two):
        taker.read_until_a_fault()
        assert [fault.kind for fault in taker.faults] == [FaultKind.RECREATED]
        assert b"new" not in taker.values
    for taker in (one, two):
        taker.assign(0)
        taker.reach(1)
        assert taker.values[-1] == b"new"
        taker.reader.close()


def test_a_member_that_waits_gets_what_another_reads_at_once_and_a_close_ends_its_wait(place: Place) -> None:
    one, two = place.reader(), place.reader()
    one.assign(0)
    two.assign(0)
    one.read()
    two.read()
    ended = Event()

    def wait() -> None:
        two.reach(1)
        two.read(timeout_s=20.0)
        ended.set()

    def read() -> None:
        while not ended.is_set():
            one.read(timeout_s=0.2)

    threads = [Thread(target=wait), Thread(target=read)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    place.produce(1)
    wait_until(lambda: two.got[TOPIC, 0] == [0])
    place.produce(1)
    assert ended.wait(5.0) and time.monotonic() - began < 5.0
    for thread in threads:
        thread.join()
    one.reader.close()
    two.reader.close()


@pytest.mark.parametrize("seed", range(12))
def test_each_gets_exactly_what_a_reader_of_its_own_would(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random assignments, pauses, ends, closes and produced messages, with a limit that is often reached."""
    rng, monotonic = Random(seed), time.monotonic
    monkeypatch.setattr(shared_reads, "SILENT_S", 0.01)
    monkeypatch.setattr(shared_reads, "BLOCKED_S", 0.005)
    monkeypatch.setattr(shared_reads, "DEAF_S", 0.002)
    monkeypatch.setattr(shared_reads, "AHEAD", 40)
    monkeypatch.setattr(shared_reads, "READ_SIZE", 25)
    place = Place(2, max_bytes=8_000)
    log: list[list[int]] = [[], []]
    takers = [place.reader() for _ in range(3)]
    until = monotonic() + 0.7
    fed = 0

    def end(partition: int) -> int:
        found = place.cluster.broker.log(TOPIC, partition)
        return 0 if found is None else found.end

    def check(taker: Taker) -> None:
        for (_, partition), got in taker.got.items():
            if (TOPIC, partition) in taker.begun:
                want = [x for x in log[partition] if taker.begun[TOPIC, partition] <= x < taker.at(partition)]
                assert got == want

    def act(taker: Taker) -> None:
        partition = rng.randrange(2)
        key = (TOPIC, partition)
        action = rng.random()
        if action < 0.7:
            taker.read(rng.choice((1, 7, 30, 1_000)), rng.choice((0.0, 0.0, 0.002)))
        elif key not in taker.begun or action < 0.78:
            taker.assign(
                rng.choice((end(partition), max(0, end(partition) - 20), rng.randint(0, end(partition)))), partition
            )
        elif action < 0.8:
            taker.unassign(partition)
        elif action < 0.85:
            taker.reader.pause([key])
        elif action < 0.95:
            taker.reader.resume([key])
        elif action < 0.96:
            taker.reader.close()
            takers[takers.index(taker)] = place.reader()
        check(taker)

    while monotonic() < until:
        partition, count = rng.randrange(2), rng.randrange(12)
        if rng.random() < 0.2:  # a marker of a transaction: an offset without a message
            work = place.cluster.transactional_producer("t", {}, transaction_timeout_ms=60_000)
            work.init(1.0)
            work.begin()
            log[partition].append(end(partition))
            work.send(TOPIC, b"x", partition=partition)
            work.commit("other", (TOPIC, partition), 0, "", 1.0)
            work.close()
        first = end(partition)
        place.produce(count, partition, size=rng.choice((1, 100)))
        log[partition] += range(first, first + count)
        for taker in rng.sample(takers, 3):
            act(taker)
            fed += taker.is_fed()
    assert fed > 20, "they read together"
    for taker in takers:
        taker.reader.resume([(TOPIC, 0), (TOPIC, 1)])
        for _, partition in list(taker.begun):
            taker.reach(end(partition), partition)
        check(taker)
        taker.reader.close()


def test_threads_that_read_beside_each_other_and_assignments_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reads, "AHEAD", 200)
    monkeypatch.setattr(shared_reads, "DEAF_S", 1e9)
    place, ended = Place(max_bytes=20_000), Event()
    takers = [place.reader() for _ in range(3)]
    order: list[list[int]] = [[], [], []]

    def read(number: int) -> None:
        reader = takers[number].reader
        while not ended.is_set():
            messages, faults = reader.read(50, 0.02)
            assert not faults
            order[number] += [each.offset() or 0 for each in messages]

    threads = [Thread(target=read, args=(number,)) for number in range(3)]
    for taker in takers:
        taker.reader.assign({(TOPIC, 0): 0})
    for thread in threads:
        thread.start()
    rng = Random(7)
    for turn in range(60):
        place.produce(30)
        taker = rng.choice(takers)
        taker.reader.assign({(TOPIC, 0): rng.randrange(min(500, 30 * turn + 30))})
        time.sleep(0.003)
    for taker in takers:
        taker.reader.assign({(TOPIC, 0): 100})
    place.produce(10)
    wait_until(lambda: all(found[-1_710:] == list(range(100, 1_810)) for found in order))
    ended.set()
    for thread in threads:
        thread.join()
    for taker in takers:
        taker.reader.close()


def test_in_a_forked_child_all_begins_anew(place: Place) -> None:
    reader = place.reader()
    before = shared_reads._LOCK
    try:
        pools = dict(shared_reads._POOLS)
        shared_reads._begin_in_child()
        assert not shared_reads._POOLS and shared_reads._LOCK is not before
    finally:
        shared_reads._LOCK = before
        shared_reads._POOLS.update(pools)
    assert isinstance(shared_reads._POOLS[place], Pool)
    reader.reader.close()
