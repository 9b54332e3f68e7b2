"""Members count in memory, and the counts move and go back with the group's positions; on a cluster in memory."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from kafka_marshal import (
    Checkpoint,
    CheckpointPolicy,
    Group,
    GroupConsumer,
    Marshal,
    Message,
    Restore,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.aio import GroupConsumer as AsyncConsumer
from kafka_marshal.aio import Marshal as AsyncMarshal
from kafka_marshal.engine.groups import mirror
from kafka_marshal.engine.work import delivery
from kafka_marshal.metrics.measure import GroupLag
from rationalizer import ConfigureGroup, encode
from tests.client.conftest import wait_until
from tests.client.counting import Ledger, Memory, counted
from tests.faults.stories import GROUP, TOPIC, memory_cluster

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


def test_a_loss_goes_back_to_the_last_cut_of_its_pieces_alone(team: Team) -> None:
    a, b = team.start("a", policy=ON_DEMAND), team.start("b", policy=ON_DEMAND)
    settled(a, b)
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 40)
    a.consumer.checkpoint()
    wait_until(lambda: len(a.consumer.checkpoints.kept) > 1 and a.consumer.checkpoints.kept[-1].kind == "periodic")
    theirs = b.owns()
    team.produce(5)
    wait_until(lambda: len(team.handled()) == 60)
    before = len(a.restored())
    b.die()
    wait_until(lambda: a.owns() == set(range(PARTITIONS)))
    team.await_counted(a)
    assert Counter(a.restored()[before:]) == {("lost", partition): 1 for partition in theirs}
    repeated = {at for at, times in team.handled().items() if times > 1}
    assert repeated == {(partition, offset) for partition in theirs for offset in range(10, 15)}


def test_a_restart_under_the_same_name_takes_up_at_once(team: Team) -> None:
    a = team.start("a", session_timeout=60.0)
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 40)
    a.die()
    again = team.start("a", session_timeout=60.0)
    team.produce(5)
    team.await_counted(again)
    assert {why for why, _ in again.restored()} == {"lost"}


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


def test_a_handler_that_hangs_holds_back_its_piece_alone(team: Team) -> None:
    """Other lanes continue; checkpoints are complete without it, and it comes again after its member is gone."""
    a = team.start("a", run)
    released = threading.Event()

    def handle(message: Message) -> None:
        if message.value() == b"hang":
            released.wait(20)
        else:
            a.ledger.handle(message)

    a.handle = handle
    team.produce(1, b"hang", range(1))
    team.produce(20)
    wait_until(lambda: len(team.handled()) == 80)
    wait_until(lambda: len({p for what, more in list(a.said) if what == "saved" for p in more["partitions"]}) == 3)
    newest = a.consumer.checkpoints.newest
    team.produce(20)
    wait_until(lambda: len(team.handled()) == 160 and a.consumer.checkpoints.newest != newest)
    assert 0 not in {p for what, more in list(a.said) if what == "saved" for p in more["partitions"]}
    a.marshal.stop()
    a.marshal.close(1.5)
    released.set()
    b = team.start("b")
    team.await_counted(b)
    assert {partition for (partition, _), times in team.handled().items() if times > 1} == {0}


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


def test_an_exception_that_leaves_the_block_costs_what_was_done_since_the_last_cut(team: Team) -> None:
    """What its handler has left in memory is not known, so nothing of it is saved."""

    def block(consumer: GroupConsumer, handle: Callable[[Message], object]) -> None:
        with consumer:
            loop(consumer, handle)

    a = team.start("a", block, policy=ON_DEMAND)
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 40)
    saved = len(team.store.states)

    def handle(message: Message) -> None:
        raise ValueError("a bug")

    a.handle = handle
    team.produce(1)
    wait_until(lambda: a.error is not None)
    assert len(team.store.states) == saved
    b = team.start("b")
    team.await_counted(b)
    assert set(team.handled().values()) == {1, 2}


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


def test_the_answer_waits_for_a_future_and_the_piece_does_not(team: Team) -> None:
    futures: list[Future[None]] = []
    a = team.start("a", policy=CheckpointPolicy(every=None, drain=0.5, timeout=30))
    save = a.ledger.save
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 40)
    kept = a.consumer.checkpoints.newest

    def later(checkpoint: Checkpoint) -> Future[None]:
        save(checkpoint)
        futures.append(Future())
        return futures[-1]

    a.consumer._state_calls._functions = {"on_checkpoint": later, "on_restore": a.ledger.restore}
    a.consumer.checkpoint()
    wait_until(lambda: futures)
    team.produce(5)
    wait_until(lambda: len(team.handled()) == 60)
    assert a.consumer.checkpoints.newest == kept
    assert a.consumer.checkpoints.state == "SAVING"
    wait_until(lambda: sum(len(more["partitions"]) for what, more in list(a.said) if what == "saved") == PARTITIONS)
    for future in futures:
        future.set_result(None)
    wait_until(lambda: a.consumer.checkpoints.newest != kept)
    assert a.consumer.checkpoints.state == "POLLING"


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


def test_a_run_that_is_stopped_closes_gaps_that_no_checkpoint_can_name(team: Team) -> None:
    setting = ("accept_individual_commit", False)  # as for a key share: its cut may have no gaps
    team.cluster.broker.produce("__marshal", 0, encode(ConfigureGroup("i", "o", GROUP, (setting,))))
    a = team.start("a", run, ON_DEMAND)
    returns = threading.Event()

    def handle(message: Message) -> None:
        assert message.offset() != 0 or returns.wait(10)
        a.ledger.handle(message)

    a.handle = handle
    for key in (b"k", b"k", b"m"):
        team.cluster.broker.produce(TOPIC, 0, b"x", key=key)
    wait_until(lambda: team.handled() == {(0, 2): 1})
    a.marshal.stop()
    returns.set()
    a.leave()
    b = team.start("b")
    wait_until(lambda: ("joined", 0) in b.restored())
    assert team.handled() == {(0, 0): 1, (0, 1): 1, (0, 2): 1}
    assert b.ledger.counts[0].total() == 3


def test_what_on_restore_raises_ends_the_membership_and_is_raised(team: Team) -> None:
    a = team.start("a")
    team.produce(10)
    wait_until(lambda: len(team.handled()) == 40)
    a.leave()
    states, team.store.states = team.store.states, {}
    b = team.start("b")
    wait_until(lambda: b.error is not None)
    assert isinstance(b.error, AssertionError)  # the store's
    assert b.handle == b.ledger.handle and not [1 for what, _ in b.said if what == "handled"]
    team.store.states = states
    c = team.start("c")
    team.await_counted(c)


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
