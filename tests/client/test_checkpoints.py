"""Members count in memory, and the counts move and go back with the group's positions; on a cluster in memory."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from kafka_marshal import (
    Checkpoint,
    CheckpointPolicy,
    ConfigurationError,
    Group,
    GroupConsumer,
    Marshal,
    Message,
    Restore,
    StateError,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.aio import GroupConsumer as AsyncConsumer
from kafka_marshal.aio import Marshal as AsyncMarshal
from kafka_marshal.client import fetching, tries
from kafka_marshal.engine.groups import mirror
from kafka_marshal.engine.work import delivery
from kafka_marshal.metrics.measure import GroupLag
from kafka_marshal.metrics.rows import CheckpointMetrics
from kafka_marshal.node import coordination_topic
from rationalizer import ConfigureGroup, Record, SettleOffsets, encode
from tests.client.conftest import wait_until
from tests.client.counting import Ledger, Memory, counted
from tests.faults.stories import GROUP, TOPIC, memory_cluster
from tests.fleet import Fleet, started

SESSION = 600
PARTITIONS = 4
POLICY = CheckpointPolicy(every=0.3, drain=0.5, timeout=1.0)
#: Nothing begins by itself but a hand-over.
ON_DEMAND = CheckpointPolicy(every=None, drain=0.5, timeout=1.0)

Way = Callable[[GroupConsumer, Callable[[Message], object]], None]


def loop(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
    for message in consumer:
        handle(message)


def poll(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
    while not consumer.stopping:
        if (message := consumer.poll(0.05)) is not None:
            handle(message)
            consumer.done(message)


def batches(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
    for batch in consumer.batches(max_messages=7, timeout=0.01):
        for message in batch:
            handle(message)
        batch.done()


def run(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
    consumer.run(handle, concurrency=4, retry=None)


WAYS: dict[str, Way] = {"loop": loop, "poll": poll, "batches": batches, "run": run}


class Worker:
    """A member that works in a thread."""

    def __init__(self, team: Team, name: str, way: Way, policy: CheckpointPolicy, options: dict[str, Any]) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.ledger = Ledger(team.store, lambda what, **more: self.said.append((what, more)))
        self.handle: Callable[[Message], object] = self.ledger.handle
        self.error: BaseException | None = None
        self.marshal = Marshal.on_cluster(
            team.cluster.connect(name), group_id=GROUP, client_id=name, heartbeat_interval=0.3
        )
        options = {"session_timeout": SESSION / 1000, **options}
        self.consumer = self.ledger.consumer(self.marshal, TOPIC, policy, **options)
        self._way = way
        self._thread = threading.Thread(target=self._work, name=name)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._way(self.consumer, lambda message: self.handle(message))
        except BaseException as error:  # noqa: BLE001 - the test reads it
            self.error = error

    def restored(self) -> list[tuple[str, int]]:
        """(why, partition) of each restore."""
        return [(more["why"], more["partition"]) for what, more in self.said if what == "restored"]

    def owns(self) -> set[int]:
        return {piece.partition for piece in self.consumer.pieces() if not piece.revoked}

    def leave(self, timeout: float = 60) -> None:
        self.marshal.stop()
        self._thread.join(20)
        self.marshal.close(timeout)

    def die(self) -> None:
        """As by kill -9: the log hears nothing more of it."""
        self.marshal.terminate()
        self._thread.join(20)


class Team:
    """Workers on one cluster and one store."""

    def __init__(self) -> None:
        self.cluster: MemoryCluster = memory_cluster(PARTITIONS, 0)
        self.store = Memory()
        self.workers: list[Worker] = []
        self.produced: Counter[tuple[int, int]] = Counter()

    def start(self, name: str, way: Way = loop, policy: CheckpointPolicy = POLICY, **options: Any) -> Worker:
        self.workers.append(Worker(self, name, way, policy, options))
        return self.workers[-1]

    def produce(
        self, count: int, value: bytes = b"x", partitions: range = range(PARTITIONS), key: bool = False
    ) -> None:
        for number in range(count):
            for partition in partitions:
                self.cluster.broker.produce(TOPIC, partition, value, key=b"%d" % number if key else None)
                self.produced[partition, sum(1 for p, _ in self.produced if p == partition)] += 1

    def handled(self) -> Counter[tuple[int, int]]:
        """How often each message was handled, by all that ever worked."""
        rows = (more for worker in self.workers for what, more in list(worker.said) if what == "handled")
        return Counter((more["partition"], more["offset"]) for more in rows)

    def await_counted(self, *workers: Worker) -> None:
        """These have counted all messages, each once."""
        wait_until(lambda: counted(each.ledger for each in workers) >= self.produced, 30, str(self._differs(workers)))
        assert counted(each.ledger for each in workers) == self.produced

    def _differs(self, workers: tuple[Worker, ...]) -> object:
        found = counted(each.ledger for each in workers)
        return {key: found[key] for key in self.produced if found[key] != 1}

    def close(self) -> None:
        for worker in self.workers:
            worker.marshal.stop()
        for worker in self.workers:
            worker.die()


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team()
    yield made
    made.close()


def settled(*workers: Worker) -> None:
    """All partitions are shared out among these, which have their states."""
    share = PARTITIONS // len(workers)
    wait_until(lambda: all(len(each.owns()) == len(each.ledger.counts) == share for each in workers))


@pytest.mark.parametrize("way", WAYS)
def test_joins_and_leaves_repeat_nothing(team: Team, way: str) -> None:
    a = team.start("a", WAYS[way])
    team.produce(30)
    team.await_counted(a)
    b = team.start("b", WAYS[way])
    for _ in range(20):
        team.produce(2)
        time.sleep(0.005)
    settled(a, b)
    wait_until(lambda: sum(team.handled().values()) >= len(team.produced))
    a.leave()
    team.produce(5)
    wait_until(lambda: b.owns() == set(range(PARTITIONS)))
    team.await_counted(b)
    assert set(team.handled().values()) == {1}
    assert {why for why, _ in b.restored()} == {"handed_over"}
    b.leave()
    c = team.start("c", WAYS[way])  # no member was there meanwhile
    team.await_counted(c)
    assert {why for why, _ in c.restored()} == {"joined"}
    assert set(team.handled().values()) == {1}


@pytest.mark.parametrize("hold", [False, True])
def test_all_go_back_by_a_rollback(team: Team, hold: bool) -> None:
    policy = CheckpointPolicy(every=None, drain=0.5, timeout=1.0, hold=hold)
    a, b = team.start("a", policy=policy), team.start("b", policy=policy)
    settled(a, b)
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 40)
    a.consumer.checkpoint()
    wait_until(lambda: len(a.consumer.checkpoints.kept) > 1 and a.consumer.checkpoints.kept[-1].kind == "periodic")
    tens = a.consumer.checkpoints.newest
    assert tens is not None
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 80)
    a.consumer.checkpoint()
    wait_until(lambda: a.consumer.checkpoints.newest != tens)
    team.produce(5)
    wait_until(lambda: len(team.handled()) == 100)
    b.consumer.rollback()
    wait_until(lambda: sum(team.handled().values()) == 120)
    team.await_counted(a, b)
    b.consumer.rollback(to=tens)
    wait_until(lambda: sum(team.handled().values()) == 180)
    team.await_counted(a, b)
    assert [why for why, _ in a.restored() + b.restored()].count("rollback") == 2 * PARTITIONS
    assert a.consumer.checkpoints.newest == tens


def test_what_could_not_be_saved_is_left_for_the_next_checkpoint(team: Team, caplog: pytest.LogCaptureFixture) -> None:
    a = team.start("a", policy=ON_DEMAND)
    a.ledger.failures = 1_000
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 40)
    a.consumer.checkpoint()
    wait_until(lambda: "no space left on device" in caplog.text)
    assert "left for the next checkpoint" in caplog.text
    a.ledger.failures = 0
    a.leave()  # at another checkpoint, which can be saved
    b = team.start("b")
    team.await_counted(b)
    assert set(team.handled().values()) == {1}


def test_a_lost_batch_that_a_loop_has_skipped_is_reported_until_the_next_one_comes(
    team: Team, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "OWED_AFTER_MS", 0.0)
    skipped: list[int] = []

    def skip_the_first(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
        for batch in consumer.batches(max_messages=7, timeout=0.01):
            if not skipped:
                skipped.append(batch.partition)
                consumer.rollback()
                while batch.is_held:
                    time.sleep(0.01)
                continue  # and the variable keeps it
            for message in batch:
                handle(message)
            batch.done()

    a = team.start("a", skip_the_first, policy=ON_DEMAND)
    settled(a)
    team.produce(5, partitions=range(1))
    [one] = wait_until(lambda: a.marshal.health().held_back)
    assert (one.topic, one.partition, one.offset, one.in_hand) == (TOPIC, 0, 0, 5)
    wait_until(lambda: "the state of this piece is not restored here" in caplog.text)
    assert ("rollback", 0) not in a.restored()
    team.produce(1, partitions=range(1, 2))
    team.await_counted(a)
    assert ("rollback", 0) in a.restored()
    assert a.marshal.health().held_back == ()


def test_a_piece_that_waits_for_a_handler_left_behind_is_reported(
    team: Team, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "OWED_AFTER_MS", 0.0)
    a = team.start("a", run, policy=ON_DEMAND, handler_timeout=0.3)
    settled(a)
    hangs, calls, handle = threading.Event(), [], a.handle

    def hang_once(message: Message) -> None:
        calls.append(message.offset())
        if len(calls) == 1:
            hangs.wait(20)
        handle(message)

    a.handle = hang_once
    team.produce(1, partitions=range(1))
    [one] = wait_until(lambda: a.marshal.health().held_back)
    assert one[:3] == (TOPIC, 0, 0)
    wait_until(lambda: "Find out what its handler waits for" in caplog.text)
    hangs.set()
    wait_until(lambda: a.marshal.health().held_back == ())
    team.await_counted(a)


def test_the_end_of_a_marshal_does_not_wait_again_for_what_the_close_of_its_consumer_waits_for(team: Team) -> None:
    """As with one block in the other: the first close() gives up, Kafka being away, while the second one begins."""
    a = team.start("a", policy=ON_DEMAND)
    settled(a)
    team.produce(1)
    team.await_counted(a)
    team.cluster.broker.faults.unreachable.add("a")
    first = threading.Thread(target=a.consumer.close, args=(1,))
    second = threading.Thread(target=a.marshal.close, args=(60,))
    first.start()
    wait_until(lambda: a.consumer._engine.closing)
    second.start()
    wait_until(lambda: not (first.is_alive() or second.is_alive()))


def test_members_that_share_partitions_by_key_hand_over_state_by_key(team: Team) -> None:
    team.cluster.broker.produce(  # the group's only coordination partition
        "__marshal", 0, encode(ConfigureGroup("i", "o", GROUP, (("accept_range_fetch", (TOPIC,)),)))
    )
    names = "abcdef"
    workers = [team.start(name, allow_key_share=True) for name in names]
    team.produce(40, key=True)
    wait_until(lambda: all(each.consumer.pieces() for each in workers))
    wait_until(lambda: sum(team.handled().values()) >= len(team.produced))
    for worker in workers[:4]:
        worker.leave()
        team.produce(5, key=True)
    e, f = workers[4:]
    team.await_counted(e, f)
    assert set(team.handled().values()) == {1}


def test_in_an_event_loop(team: Team) -> None:
    """Coroutine callbacks, many tasks, a leave at a checkpoint."""
    ledger = Ledger(team.store)

    async def on_checkpoint(checkpoint: Checkpoint) -> object:
        await asyncio.sleep(0)
        return asyncio.get_running_loop().run_in_executor(None, ledger.save, checkpoint)

    async def on_restore(restore: Restore) -> None:
        await asyncio.sleep(0)
        ledger.restore(restore)

    async def work() -> None:
        policy = replace(POLICY, on_checkpoint=on_checkpoint, on_restore=on_restore)
        mode = Group(session_timeout=SESSION / 1000)
        async with (
            AsyncMarshal.on_cluster(team.cluster.connect("z"), group_id=GROUP, client_id="z") as marshal,
            marshal.consumer([TOPIC], mode=mode, checkpoints=policy) as consumer,
        ):
            running = asyncio.ensure_future(consumer.run(_handled(ledger)))
            await _until(lambda: counted([ledger]) == team.produced)
            await _has_newest(consumer)
            consumer.stop()
            await running

    team.produce(20)
    asyncio.run(work())
    assert sum(1 for _ in team.store.states) >= PARTITIONS
    b = team.start("b")
    team.await_counted(b)
    assert not [1 for what, _ in b.said if what == "handled"]


def _handled(ledger: Ledger) -> Callable[[Message], Any]:
    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        ledger.handle(message)

    return handle


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def _has_newest(consumer: AsyncConsumer) -> None:
    async with asyncio.timeout(20):
        while (await consumer.checkpoints()).newest is None:
            await asyncio.sleep(0.01)


def test_a_loop_left_by_break_leaves_its_piece_for_later(team: Team, caplog: pytest.LogCaptureFixture) -> None:
    """The message comes again, and the state may have it: so the cut before counts, and the close does not wait."""
    left: list[tuple[int, int]] = []

    def until_ten(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
        for message in consumer:
            handle(message)
            if message.offset() == 9:
                left.append((message.partition() or 0, 9))
                break

    a = team.start("a", until_ten, policy=ON_DEMAND)
    team.produce(10)
    wait_until(lambda: left)
    began = time.monotonic()
    a.leave(30)
    assert "given up before it was done" in caplog.text
    assert time.monotonic() < began + 10
    b = team.start("b")
    team.await_counted(b)
    assert {at[0] for at, times in team.handled().items() if times > 1} == {left[0][0]}


# -- what others see --------------------------------------------------------------------------------------------------


def test_lag_is_live_where_a_member_says_it(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between checkpoints the log shows no progress: what is done counts all the same, until it is lost."""
    monkeypatch.setattr(mirror, "MIRROR_MS", 20.0)
    a = team.start("a", policy=ON_DEMAND, mirror_offsets=True)
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 40)
    keys = [(TOPIC, partition) for partition in range(PARTITIONS)]
    assert [each.offset for each in a.consumer.committed(keys)] == [0] * PARTITIONS
    wait_until(lambda: [team.cluster.committed_offset(GROUP, key, 5) for key in keys] == [(10, "")] * PARTITIONS)
    assert [(each.offset, each.lag) for each in a.marshal.metrics().partitions] == [(10, 0)] * PARTITIONS
    lag = GroupLag(a.marshal._meter).read(closed=False)
    assert lag["lag"] == 0
    a.consumer.checkpoint()
    wait_until(lambda: [each.offset for each in a.consumer.committed(keys)] == [10] * PARTITIONS)


def test_health_says_where_it_stands_and_what_it_waits_for(team: Team) -> None:
    a = team.start("a", policy=ON_DEMAND)
    settled(a)
    wait_until(lambda: a.marshal.health().checkpoints in ("POLLING", "RESET_COMPLETE"))
    hangs = threading.Event()
    a.consumer._state_calls._functions = {"on_checkpoint": lambda _: hangs.wait(20), "on_restore": a.ledger.restore}
    team.produce(5)
    wait_until(lambda: len(team.handled()) == 20)
    a.consumer.checkpoint()
    wait_until(lambda: not a.marshal.health().ok)
    [problem] = a.marshal.health().problems
    assert "on_checkpoint of" in problem and "Return a Future" in problem
    hangs.set()
    wait_until(lambda: a.marshal.health().ok)


# -- Which members a group that takes checkpoints lets in; on a cluster in memory ---------------------------------


def refusal(consumer: GroupConsumer) -> str:
    with pytest.raises(ConfigurationError) as caught, suppress(StateError):
        consumer.poll(10)
    return str(caught.value)


def test_all_members_take_part_or_none(team: Team) -> None:
    a = team.start("a")
    wait_until(lambda: a.owns() == set(range(PARTITIONS)))
    other = Marshal.on_cluster(team.cluster.connect("b"), group_id=GROUP, client_id="b", heartbeat_interval=0.3)
    with other, other.consumer([TOPIC], mode=Group(session_timeout=SESSION / 1000)) as consumer:
        assert "checkpoints=CheckpointPolicy" in refusal(consumer)
    other = Marshal.on_cluster(team.cluster.connect("c"), group_id=GROUP, client_id="c", heartbeat_interval=0.3)
    hold = CheckpointPolicy(hold=True)
    with other, other.consumer([TOPIC], mode=Group(session_timeout=SESSION / 1000), checkpoints=hold) as consumer:
        assert "hold" in refusal(consumer)
    adopting = team.start("d", policy=CheckpointPolicy(adopt=True, hold=True))
    wait_until(lambda: adopting.owns())


def test_a_group_that_works_without_checkpoints_is_not_joined_with_them(team: Team) -> None:
    other = Marshal.on_cluster(team.cluster.connect("b"), group_id=GROUP, client_id="b", heartbeat_interval=0.3)
    with other, other.consumer([TOPIC], mode=Group(session_timeout=SESSION / 1000)) as there:
        wait_until(lambda: there.pieces())
        a = team.start("a")
        wait_until(lambda: a.error is not None)
        assert f"kafka-marshal checkpoints {GROUP} --start" in str(a.error)
        adopting = team.start("c", policy=CheckpointPolicy(adopt=True))
        wait_until(lambda: adopting.owns())
        adopting.consumer.commit()
        with pytest.raises(ConfigurationError, match="--start"):
            adopting.consumer.checkpoint()


def test_a_group_with_open_messages_begins_no_checkpoints(team: Team) -> None:
    def append(record: Record, cp: int) -> int:
        return team.cluster.broker.produce("__marshal", cp, encode(record))

    fleet = Fleet(GROUP, 1, append)
    fleet.configure()
    generation = fleet.join("b", {TOPIC: PARTITIONS}, session=SESSION)
    fleet.commit("b", generation, *started(TOPIC, 0))
    append(SettleOffsets(*fleet.ids("b"), generation, 99, TOPIC, 0, parked=((5, 8, 5, "Bad"),)), 0)
    fleet.leave("b", generation)
    a = team.start("a")
    wait_until(lambda: a.error is not None)
    assert isinstance(a.error, ConfigurationError)
    assert f"kafka-marshal discard {GROUP} --all" in str(a.error)


def test_a_topic_below_level_3_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination_topic, "SUPPORTED_LEVEL", 2)
    cluster = memory_cluster()
    marshal = Marshal.on_cluster(cluster.connect("a"), group_id=GROUP, client_id="a", heartbeat_interval=0.3)
    with (
        marshal,
        marshal.consumer([TOPIC], mode=Group(), checkpoints=POLICY) as consumer,
        pytest.raises(Exception) as caught,
    ):
        consumer.poll(10)
    assert "kafka-marshal upgrade" in str(caught.value) and "level 3" in str(caught.value)


# -- Pieces continue with the end of their cut, whatever the threads that want messages wait for ------------------


@pytest.mark.parametrize("way", WAYS)
def test_what_is_fetched_continues_with_the_end_of_a_cut(team: Team, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the end of a wait for new messages: here it takes a minute."""
    for module, name in ((fetching, "SLICE_S"), (tries, "LOOK_S")):
        monkeypatch.setattr(module, name, 60.0)
    first, begun, looked = threading.Lock(), threading.Event(), threading.Event()

    def work(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
        def first_asks(message: Message) -> None:
            if first.acquire(blocking=False):
                consumer.checkpoint()
                if way != "run":  # there another thread reads, and waits already
                    looked.clear()
                begun.set()
            begun.wait(10)
            handle(message)

        WAYS[way](consumer, first_asks)

    def fill(self: fetching.Fetcher, *about: Any) -> int:
        found = filled(self, *about)
        looked.set()
        return found

    def save_when_waited_for(*state: Any) -> None:
        looked.wait(10)
        save(*state)

    filled, save = fetching.Fetcher.fill, team.store.save
    monkeypatch.setattr(fetching.Fetcher, "fill", fill)
    monkeypatch.setattr(team.store, "save", save_when_waited_for)
    team.produce(10)
    a = team.start("a", work, ON_DEMAND)
    team.await_counted(a)
    assert "saved" in [what for what, _ in a.said]
    monkeypatch.undo()
    team.produce(1)  # ends such a wait
    team.await_counted(a)


# on_checkpoint does not return, or fails, in a member that closes or continues; on a cluster in memory.


def test_pieces_whose_state_was_not_saved_are_not_said_to_be_handed_over(
    team: Team, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    hangs, save = threading.Event(), team.store.save
    monkeypatch.setattr(team.store, "save", lambda *_: hangs.wait(20))
    a = team.start("a")
    team.produce(3)
    wait_until(lambda: "on_checkpoint has not returned since an earlier checkpoint" in caplog.text)
    a.leave(timeout=1)
    assert "close() does not wait any longer: on_checkpoint of t [0]" in caplog.text
    assert "The member leaves its group without that" in caplog.text
    assert "lost t [0-3]: this member has left at a checkpoint that does not have what was done" in caplog.text
    assert "handed over" not in caplog.text and "messages in flight were not done" not in caplog.text
    monkeypatch.setattr(team.store, "save", save)
    hangs.set()
    b = team.start("b")
    team.await_counted(b)
    assert {why for why, _ in b.restored()} == {"joined"}


def test_a_member_whose_saves_fail_one_after_another_is_not_well(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    save = team.store.save

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(team.store, "save", fails)
    a = team.start("a")
    team.produce(3)

    def found() -> list[str]:  # on a busy machine there may be others for a moment, too
        return [x for x in a.marshal.health().problems if x.startswith("its last ")]

    wait_until(lambda: bool(found()))
    (problem,) = found()
    assert "lack some or all of its pieces" in problem
    assert "on_checkpoint fails or hangs: check the store of states" in problem
    monkeypatch.setattr(team.store, "save", save)
    wait_until(lambda: a.marshal.health().ok)
    a.leave()


def test_figures_and_the_log_count_what_is_saved_and_not_what_was_tried(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = team.start("a")
    team.produce(3)

    def read() -> CheckpointMetrics:
        found = a.marshal.metrics().checkpoints
        assert found is not None
        return found

    def outcomes() -> dict[str, int]:
        return dict(read().outcomes)

    wait_until(lambda: outcomes().get("complete", 0) > 0)
    save = team.store.save

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(team.store, "save", fails)
    ended = outcomes().get("ended", 0)
    team.produce(3)
    wait_until(lambda: outcomes().get("ended", 0) > ended + 1)
    before, saved, kept = outcomes(), read().save_seconds.count, a.consumer.checkpoints.kept
    cut_at = time.monotonic() - (read().oldest_cut_seconds or 0.0)
    wait_until(lambda: outcomes().get("ended", 0) > before["ended"] + 2)
    found = read()
    assert found.oldest_cut_seconds is not None
    assert abs(time.monotonic() - found.oldest_cut_seconds - cut_at) < 0.2, "the alert of a store that refuses"
    assert outcomes() == {**before, "ended": outcomes()["ended"]}
    assert (found.save_seconds.count, a.consumer.checkpoints.kept) == (saved, kept), "nothing was retired either"
    monkeypatch.setattr(team.store, "save", save)
    wait_until(lambda: (read().oldest_cut_seconds or 9.0) < time.monotonic() - cut_at - 0.5)
    assert outcomes()["complete"] > before["complete"]


def test_one_of_two_members_that_saves_nothing_is_named(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = team.start("a"), team.start("b")
    settled(a, b)
    monkeypatch.setattr(b.ledger, "failures", 10**6)
    team.produce(1)

    def outcome(worker: Worker, what: str) -> int:
        found = worker.marshal.metrics().checkpoints
        return 0 if found is None else dict(found.outcomes).get(what, 0)

    wait_until(lambda: outcome(a, "without_some") > 0 and outcome(b, "without_some") > 0)
