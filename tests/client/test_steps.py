"""A reader in steps: it rests only while nothing is waited for; whatever is waited for ends the rest at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.engine.awaited import AWAITED, Awaited
from kafka_marshal.engine.effects import Append
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.settings import EngineSettings, proof_margin_ms
from kafka_marshal.engine.shares.consumer import BUSY_STEP_MS
from kafka_marshal.node import log_reader, pacing
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.pacing import WAITS, Steps, Waits, step_ms
from kafka_marshal.ports import TailBatch
from rationalizer import GroupHeartbeat, LeaveGroup, SettlingMessages, World
from tests.client.conftest import take, wait_until
from tests.client.test_group import Groups, await_shared

#: A step that nothing but a reason ends, and a session whose beats come too late for a test to end it.
LONG_S, LONG_SESSION = 3_600.0, 300_000

WHOLE = SimpleNamespace(harmless_step_ms=0.0)

BEAT = GroupHeartbeat("a-1", "a", "g", "m", 1)
ASKS = LeaveGroup("a-1", "a", "g", "m", 1)


@dataclass
class Scene:
    """One reader's steps, and what they ask."""

    lock: Any
    owed: bool = False
    now: float = 1_000_000.0
    steps: Steps = field(init=False)

    def rests(self, wait_s: float = 0.002, due_in: float = inf) -> bool:
        if rests := self.steps.begin_rest(wait_s, self.now + due_in):
            self.steps.wait()
        return rests

    def hears(self, *senders: str) -> None:
        for sender in senders:
            self.steps.heard(SimpleNamespace(message=SimpleNamespace(instance_id=sender)))  # type: ignore[arg-type]

    def reads(self, records: int = 1) -> None:
        self.steps.read(TailBatch({0: [(at, 0, b"") for at in range(records)]}))


@pytest.fixture
def scene() -> Scene:
    settings = EngineSettings("g", "a", "a-1", 1, 3_000)
    condition = threading.Condition(threading.RLock())
    lock = SimpleNamespace(condition=condition, started=True, engine=Engine(settings, {0: World(0, 1)}, Random(1)))
    made = Scene(lock)
    runtime: Any = SimpleNamespace(now_ms=lambda: made.now, condition=threading.Condition)
    made.steps = Steps(runtime, made.lock, lambda: made.owed)
    made.hears(*(f"m{number}" for number in range(200)))
    made.rests()
    made.reads()
    return made


def began(scene: Scene) -> None:
    scene.lock.started = not scene.lock.started


def called(scene: Scene) -> None:
    scene.steps.callers = 1 - scene.steps.callers


def known(scene: Scene) -> None:
    scene.owed = not scene.owed


def asked(scene: Scene) -> None:
    if scene.now < scene.steps.answered_by:
        scene.now = scene.steps.answered_by
        scene.rests()
        scene.reads()
    else:
        scene.steps.appended(Append(0, ASKS, 1))


def behind(scene: Scene) -> None:
    scene.reads(1 if scene.steps.is_behind else pacing.MANY_RECORDS)


#: What begins a wait; called again, it ends it.
BEGINS: dict[Waits, Callable[[Scene], object]] = {
    Waits.START: began,
    Waits.CALL: called,
    Waits.RECORD: known,
    Waits.ANSWER: asked,
    Waits.REST: behind,
}


@pytest.mark.parametrize("reason", [*Waits, *Awaited])
def test_each_reason_to_wait_ends_the_rest(
    scene: Scene, reason: Waits | Awaited, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaits = False
    if isinstance(reason, Awaited):
        monkeypatch.setitem(AWAITED, reason, lambda engine, now: awaits)
    assert scene.rests()
    if isinstance(reason, Waits):
        BEGINS[reason](scene)
    else:
        awaits = True
    assert scene.steps.reason(scene.now) is reason
    assert not scene.rests()
    if isinstance(reason, Waits):
        BEGINS[reason](scene)
    else:
        awaits = False
    assert scene.steps.reason(scene.now) is None
    scene.rests()
    scene.reads()
    assert scene.rests()


def test_no_reason_is_forgotten() -> None:
    assert set(WAITS) == set(BEGINS) == set(Waits)


def test_what_is_appended_by_time_asks_nobody(scene: Scene) -> None:
    scene.steps.appended(Append(0, BEAT, 1))
    assert scene.rests()


@pytest.mark.parametrize(
    "ends",
    [
        pytest.param(lambda of: of.appended(Append(0, BEAT, 1)), id="a record, whose answer is polled"),
        pytest.param(lambda of: of.waiting().__enter__(), id="a call"),
        pytest.param(lambda of: of.ring(), id="the end"),
    ],
)
def test_it_ends_a_rest_that_has_begun(
    scene: Scene, ends: Callable[[Steps], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pacing, "step_ms", lambda members, session_ms: LONG_S * 1000)
    scene.reads()
    thread = threading.Thread(target=scene.rests, args=(LONG_S,), daemon=True)
    thread.start()
    wait_until(lambda: scene.steps._is_resting)
    with scene.lock.condition:
        ends(scene.steps)
    thread.join(20)
    assert not thread.is_alive()


def test_a_step_ends_by_itself_and_is_followed_by_one_read(scene: Scene) -> None:
    assert scene.rests()
    scene.now += pacing.LONGEST_STEP_MS
    assert not scene.rests()
    scene.reads()
    assert scene.rests()


def test_it_reads_before_it_does_what_is_due_by_time(scene: Scene) -> None:
    assert scene.rests(due_in=10 * pacing.FRESH_MS)
    assert not scene.rests(due_in=pacing.FRESH_MS)


def test_steps_grow_with_the_members_up_to_a_third_of_the_margin() -> None:
    assert [step_ms(members, 10_000) for members in (1, 10, 12, 13, 32, 52, 1_000)] == [0, 0, 0, 8, 160, 320, 333]
    for session in (100, 1_000, 3_000, 10_000, 60_000):
        assert 3 * step_ms(1_000, session) <= proof_margin_ms(session)
    assert pacing.LONGEST_STEP_MS < log_reader.HELD_UP_S * 1000, "a rest is no hold-up of the reader"


def test_the_members_counted_are_those_heard_lately(scene: Scene) -> None:
    assert scene.steps.step_ms(scene.now) == step_ms(200, 2 * 3_000) == 200
    for _ in range(2):
        scene.now += pacing.HEARD_MS
        scene.hears(*(f"m{number}" for number in range(20)))
        now = scene.steps.step_ms(scene.now)
    assert now == 8 * pacing.MEMBER_STEP_MS
    scene.hears(*(f"new{number}" for number in range(40)))
    assert scene.steps.step_ms(scene.now) == 200, "a group that grows at once is not waited for"


def test_a_member_without_leases_has_the_margin_of_its_session(scene: Scene) -> None:
    engine = scene.lock.engine
    engine.groups[0] = engine.consumers[0] = SimpleNamespace(session_timeout_ms=10_000, schedule=WHOLE)
    assert scene.steps.step_ms(scene.now) == 333
    engine.consumers[1] = SimpleNamespace(schedule=WHOLE)
    assert scene.steps.step_ms(scene.now) == 200, "a consumer that claims"
    del engine.consumers[1]
    engine.book.leases["orders", 0] = SimpleNamespace()
    assert scene.steps.step_ms(scene.now) == 200, "a lease by hand"


def test_a_few_members_that_only_share_read_in_steps(scene: Scene) -> None:
    engine = scene.lock.engine
    engine.consumers[0] = SimpleNamespace(schedule=SimpleNamespace(harmless_step_ms=BUSY_STEP_MS))
    for _ in range(2):
        scene.now += pacing.HEARD_MS
        scene.hears("m1", "m2")
        step = scene.steps.step_ms(scene.now)
    assert step == BUSY_STEP_MS
    engine.consumers[1] = SimpleNamespace(schedule=WHOLE)
    assert scene.steps.step_ms(scene.now) == 0, "it holds others whole"
    del engine.consumers[1]
    engine.settings = EngineSettings("g", "a", "a-1", 1, 300)
    assert scene.steps.step_ms(scene.now) == pytest.approx(600 / 30), "no longer than in a large group"
    for _ in range(2):
        scene.now += pacing.HEARD_MS
        scene.hears("m1")
        step = scene.steps.step_ms(scene.now)
    assert step == 0, "nobody else writes"


def test_what_sharers_settle_and_take_asks_no_other_member(scene: Scene) -> None:
    scene.steps.appended(
        Append(0, SettlingMessages("a-1", "a", "g", "orders", 0, 1, 5, ((0, 1),), take=(2, 9, False)), 1)
    )
    assert scene.rests()


def test_a_turn_that_is_due_ends_no_step(scene: Scene) -> None:
    assert scene.steps.begin_rest(0.002, inf)
    assert not scene.steps.wait(), "it turns, and rests on"
    assert scene.steps.begin_rest(1_000.0, inf)
    scene.now += pacing.LONGEST_STEP_MS
    scene.steps.ring()
    assert scene.steps.wait()


@pytest.mark.parametrize("is_time", [True, False])
def test_a_rest_ends_with_a_read_in_the_same_turn(is_time: bool) -> None:
    """Else each step is two turns; and a turn that is only due reads nothing."""
    came = TailBatch({0: [(0, 0, b"")]})
    rested = SimpleNamespace(begin_rest=lambda *_: True, wait=lambda: is_time, read=lambda _: False)
    pacing = SimpleNamespace(steps=rested, due_at=0.0, wait_s=lambda: 0.0)
    replica = SimpleNamespace(tail=SimpleNamespace(rest=lambda: True), read=lambda _: came)
    driver: Any = SimpleNamespace(pacing=pacing, replica=replica)
    assert Driver._read(driver, 1.0).records == (came.records if is_time else {})


# On a broker.


@pytest.fixture
def groups(
    kafka_bootstrap: str, topic_factory: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Groups]:
    monkeypatch.setattr(pacing, "FREE_MEMBERS", 0)
    monkeypatch.setattr(pacing, "step_ms", lambda members, session_ms: LONG_S * 1000)
    made = Groups(kafka_bootstrap, topic_factory)
    yield made
    made.close()


def await_rest(groups: Groups, member: Any) -> None:
    """A record of another process begins a step; the member waits for nothing."""

    def rests() -> bool:
        groups.write(BEAT)
        return bool(member.marshal._driver.pacing.steps._is_resting)

    wait_until(rests)


def test_an_own_beat_is_read_as_soon_as_it_is_in_the_log(groups: Groups) -> None:
    """T4: nothing else would have it read before the next beat."""
    a = groups.joined("a", groups.topic(1), session_timeout=LONG_SESSION / 1000)
    await_shared(1, a)
    await_rest(groups, a)
    driver = a.marshal._driver
    before = a.member()
    assert before is not None
    last_beat = before.last_beat
    beat = GroupHeartbeat(*driver.engine.ids, a.consumer.member_id, a.consumer.generation)
    with driver.lock.locked() as engine:
        engine.take(None, engine.outbox.append, groups.home, beat)
    wait_until(lambda: before.last_beat > last_beat)


def test_what_a_member_waits_for_comes_at_once(groups: Groups) -> None:
    """It joins, commits, takes a piece over and leaves; no beat would end a step meanwhile."""
    topic = groups.topic(2, 20)
    a = groups.joined("a", topic, session_timeout=LONG_SESSION / 1000)
    assert len(take(a.consumer, 20)) == 20
    a.consumer.commit(10)
    await_rest(groups, a)
    b = groups.joined("b", topic, session_timeout=LONG_SESSION / 1000)
    wait_until(lambda: b.consumer.member_id)
    a.consumer.commit(10)  # so a reads at once, and sees the join
    await_shared(2, a, b)
    await_rest(groups, b)
    b.consumer.close(timeout=10)
    await_rest(groups, a)


def test_a_lease_by_hand_comes_and_goes_at_once(groups: Groups) -> None:
    marshal = groups.member("a", group_id="claims", heartbeat_interval=(LONG_SESSION // 2) / 1000)
    with marshal.claim("t", 0, timeout=10) as lease:
        lease.heartbeat(5)
    with marshal.claim("t", 0, timeout=10):
        pass


def test_a_rest_fetches_nothing(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> None:
    topic, cluster = topic_factory(1), KafkaCluster(kafka_bootstrap, {})
    tail = cluster.tail(topic, {0: 0})
    read: list[int] = []

    def has_read(offset: int) -> bool:
        read.extend(at for at, _, _ in tail.read(0.1).records.get(0, ()))
        return offset in read

    def write() -> None:
        producer.produce(topic, b"", partition=0)
        assert producer.flush(20) == 0

    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    write()
    wait_until(lambda: has_read(0))
    wait_until(tail.rest)
    write()
    assert tail._reading.read(1, 0.5) == [], "it lies at the broker"
    wait_until(lambda: has_read(1))
    assert read == [0, 1]
    tail.close()
    cluster.close()
