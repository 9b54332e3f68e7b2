"""on_checkpoint, on_restore and on_completed: their order, and how their ends are passed on, on a cluster in memory."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from kafka_marshal import (
    Checkpoint,
    CheckpointPolicy,
    ConfigurationError,
    Group,
    GroupConsumer,
    Marshal,
    Restore,
    StateError,
)
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.aio import Marshal as AsyncMarshal
from kafka_marshal.engine.effects import (
    Call,
    Callback,
    CheckpointCompleted,
    Effect,
    Piece,
    RestoredPiece,
    RestoreState,
    SavedPiece,
    SaveState,
)
from kafka_marshal.errors import StaleEpochError, StateMissingError
from rationalizer.limits import MAX_KEY_HASH
from tests.client.conftest import wait_until
from tests.faults.stories import TOPIC, member, memory_cluster
from tests.modes import options_of

#: Nothing of a topic that does not exist is restored but what the tests say.
ABSENT = "absent"

SAVED = SavedPiece((TOPIC, 0), 12, 0, MAX_KEY_HASH)
RESTORED = RestoredPiece(
    (TOPIC, 1), 0, MAX_KEY_HASH, 78, 5, ((7, 8),), ((0, MAX_KEY_HASH, 0),), ((0, MAX_KEY_HASH, 4),), -1
)


class Log:
    """Stands in for what the engine does about checkpoints: what is passed to it."""

    state, newest, kept, drain_seconds, drain_seconds_max = "POLLING", 72, ((72, 5, 1),), 0.5, 2.0

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def replace(self, consumer: GroupConsumer) -> None:
        """Take the place of the engine's part in a consumer, as far as it goes."""
        names = [name for name in vars(Log) if name[0] != "_" and name != "replace"]
        own = {name: getattr(self, name) for name in names}
        real: Any = consumer._member.checkpoints
        real.__class__ = type(
            "Replaced",
            (type(real),),
            {name: _method(value) if callable(value) else value for name, value in own.items()},
        )

    def returned(self, barrier: int, pieces: Sequence[SavedPiece], error: Exception | None, now: float) -> None:
        self.told.append(("returned", barrier, tuple(pieces), error))

    def safe(self, barrier: int, pieces: Sequence[SavedPiece], error: Exception | None, now: float) -> None:
        self.told.append(("safe", barrier, tuple(pieces), error))

    def restored(self, attempt: int, error: Exception | None, is_outdated: bool, now: float) -> None:
        self.told.append(("restored", attempt, error, is_outdated))

    def take(self, now: float) -> None:
        self.told.append(("take",))

    def go_back(self, to: int | None, now: float) -> None:
        self.told.append(("go back", to))


def _method(call: Callable[..., object]) -> Callable[..., object]:
    return lambda _, *args: call(*args)


@pytest.fixture
def cluster() -> MemoryCluster:
    return memory_cluster()


@pytest.fixture
def marshal(cluster: MemoryCluster) -> Iterator[Marshal]:
    with member(cluster) as made:
        yield made


def made(marshal: Marshal, **callbacks: Any) -> tuple[GroupConsumer, Log]:
    """A consumer whose engine's part is a stand-in."""
    consumer = marshal.consumer([ABSENT], **options_of({"checkpoints": CheckpointPolicy(), **callbacks}, Group))
    log = Log()
    with marshal._driver.condition:
        log.replace(consumer)
    return consumer, log


def carry_out(marshal: Marshal, *effects: Effect) -> None:
    with marshal._driver.condition:
        marshal._driver.effects.carry_out(list(effects))


def save(leaving: bool = False) -> SaveState:
    return SaveState(1, 72, (SAVED,), leaving, {(TOPIC, 0): frozenset({40})})


def restore(attempt: int = 3) -> RestoreState:
    return RestoreState(1, attempt, 72, "lost", (RESTORED,), {(TOPIC, 0): 3, (TOPIC, 1): 5})


def test_what_the_callbacks_are_given_and_what_the_engine_takes(marshal: Marshal) -> None:
    found: list[Any] = []
    names: Any = dict.fromkeys(("on_checkpoint", "on_restore", "on_completed"), found.append)
    _consumer, log = made(marshal, **names)
    carry_out(marshal, save(leaving=True), restore(), CheckpointCompleted(1, 72))
    wait_until(lambda: len(found) == 3)
    checkpoint, restored, completed = found
    assert isinstance(checkpoint, Checkpoint) and isinstance(restored, Restore)
    assert (checkpoint.id, checkpoint.leaving, dict(checkpoint.needed)) == (72, True, {(TOPIC, 0): frozenset({40})})
    assert [tuple(x) for x in checkpoint.pieces] == [(TOPIC, 0, 0, MAX_KEY_HASH)]
    assert (restored.checkpoint, restored.why, restored.positions[TOPIC, 1]) == (72, "lost", 5)
    [piece] = restored.pieces
    assert (piece.key, piece.epoch, piece.position, piece.ranges) == ((TOPIC, 1), 78, 5, ((7, 8),))
    assert piece.states == ((0, MAX_KEY_HASH, None),)
    assert piece.group_id == checkpoint.pieces[0].group_id == marshal.group_id
    assert completed == 72
    assert log.told == [
        ("returned", 72, (SAVED,), None),
        ("safe", 72, (SAVED,), None),
        ("restored", 3, None, False),
    ]


def test_they_are_called_in_order_with_the_other_callbacks(marshal: Marshal) -> None:
    """A piece that was lost and is restored has its on_lost first: it may drop the state that on_restore brings."""
    order: list[str] = []
    names: Any = {
        name: lambda *_, name=name: order.append(name)
        for name in ("on_lost", "on_checkpoint", "on_restore", "on_completed")
    }
    consumer, _ = made(marshal, **names)
    consumer._engine.callbacks_running += 2  # the two calls that follow
    lost = Call(1, Callback.LOST, (Piece((TOPIC, 1), 12, 0),))
    carry_out(marshal, lost, restore(), save(), lost, CheckpointCompleted(1, 72))
    wait_until(lambda: len(order) == 5)
    assert order == ["on_lost", "on_restore", "on_checkpoint", "on_lost", "on_completed"]


def test_without_callbacks_there_is_nothing_to_save(marshal: Marshal) -> None:
    _consumer, log = made(marshal)
    carry_out(marshal, save(), restore(), CheckpointCompleted(1, 72))
    wait_until(lambda: len(log.told) == 3)


def raises(error: BaseException) -> Callable[[object], None]:
    def call(_: object) -> None:
        raise error

    return call


ERRORS = [ValueError("no disk"), SystemExit(3), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_callback_that_raises(marshal: Marshal, caplog: pytest.LogCaptureFixture, error: BaseException) -> None:
    names: Any = {name: raises(error) for name in ("on_checkpoint", "on_restore", "on_completed")}
    _consumer, log = made(marshal, **names)
    carry_out(marshal, save(), restore(), CheckpointCompleted(1, 72), save())
    wait_until(lambda: len(log.told) == 3 and marshal._driver.effects.callbacks.running is None)
    (_, _, _, saving), (_, attempt, restoring, is_outdated), again = log.told
    assert (attempt, is_outdated, again[0]) == (3, False, "returned")
    for told in (saving, restoring):
        assert told is error if isinstance(error, Exception) else isinstance(told, StateError)
        assert str(error) in str(told)
    assert "the state of t [0] is not saved for checkpoint 72: left for the next checkpoint" in caplog.text
    assert "this member leaves the group" in caplog.text
    assert "on_completed raised" in caplog.text


OUTDATED = [
    StateMissingError("not there", topic=TOPIC, partition=1, checkpoint=72),
    StaleEpochError("another writes", topic=TOPIC, partition=1, epoch=12, stored_epoch=13),
]


@pytest.mark.parametrize("error", OUTDATED, ids=lambda error: type(error).__name__)
def test_what_a_newer_view_may_change_is_passed_on_as_that(
    marshal: Marshal, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """A member that slept restores pieces that others own since: it looks again, and does not end."""
    _consumer, log = made(marshal, on_restore=raises(error))
    carry_out(marshal, restore())
    wait_until(lambda: log.told)
    assert log.told == [("restored", 3, error, True)]
    assert "leaves the group" not in caplog.text


@pytest.mark.parametrize("result", [None, OSError("bucket"), "cancelled"], ids=["done", "failed", "cancelled"])
def test_a_future_is_awaited_before_the_answer_and_the_pieces_continue_at_once(
    marshal: Marshal, caplog: pytest.LogCaptureFixture, result: Any
) -> None:
    future: Future[None] = Future()
    _consumer, log = made(marshal, on_checkpoint=lambda _: future)
    carry_out(marshal, save())
    wait_until(lambda: log.told)
    assert [told[0] for told in log.told] == ["returned"]
    if result is None:
        future.set_result(None)
    elif result == "cancelled":
        future.cancel()
    else:
        future.set_exception(result)
    wait_until(lambda: len(log.told) == 2)
    kind, _, pieces, error = log.told[1]
    assert (kind, pieces) == ("safe", (SAVED,))
    assert (error is None) == (result is None)
    assert ("left for the next checkpoint" in caplog.text) == (result is not None)


@pytest.mark.parametrize("returned", [[Future()], lambda: None, iter(map(str, "ab"))], ids=["list", "function", "map"])
def test_what_would_never_run_is_refused(marshal: Marshal, caplog: pytest.LogCaptureFixture, returned: Any) -> None:
    _consumer, log = made(marshal, on_checkpoint=lambda _: returned)
    carry_out(marshal, save())
    wait_until(lambda: log.told)
    [(kind, _, _, error)] = log.told
    assert kind == "returned" and isinstance(error, ConfigurationError)


def test_a_hanging_callback_is_named_and_delays_no_heartbeat(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kafka_marshal.node.effects.LATE_MS", 50)
    hangs = threading.Event()

    def events() -> dict[str, str]:
        return {getattr(record, "event", ""): record.getMessage() for record in caplog.records}

    with member(cluster) as marshal:
        consumer, _ = made(marshal, on_checkpoint=lambda _: hangs.wait(20))
        carry_out(marshal, save())
        wait_until(lambda: "on_checkpoint of t [0] has not returned" in str(marshal.health()))
        assert not marshal.health().needs_restart and consumer.state != "REDISCOVER"
        wait_until(lambda: "callback_late" in events())
        hangs.set()
        wait_until(lambda: "on_checkpoint of t" not in str(marshal.health()))
    said = events()["callback_late"]
    assert "on_checkpoint of t [0] has not returned" in said and "those to be saved for a checkpoint pause" in said


def test_calls_of_the_program(marshal: Marshal) -> None:
    consumer, log = made(marshal)
    assert (consumer.checkpoints.state, consumer.checkpoints.newest) == ("POLLING", 72)
    assert [tuple(x) for x in consumer.checkpoints.kept] == [(72, 5, "periodic")]
    assert (consumer.checkpoints.drain_seconds, consumer.checkpoints.drain_seconds_max) == (0.5, 2.0)
    consumer.checkpoint()
    consumer.rollback()
    consumer.rollback(to=72)
    assert log.told == [("take",), ("go back", None), ("go back", 72)]
    with pytest.raises(ConfigurationError, match=r"no checkpoint 70 to go back to: it has 72"):
        consumer.rollback(70)


def test_in_an_event_loop(cluster: MemoryCluster, caplog: pytest.LogCaptureFixture) -> None:
    """Its pieces continue when a coroutine ends, and the answer goes when what it returned is done."""
    caplog.set_level(logging.ERROR)
    seen: list[Any] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        copied, uploaded = asyncio.Event(), loop.create_future()

        async def on_checkpoint(checkpoint: Checkpoint) -> object:
            await copied.wait()
            seen.append(checkpoint.id)
            return uploaded

        async def on_restore(restore: Restore) -> None:
            await asyncio.sleep(0)
            seen.append(restore.why)

        log = Log()
        callbacks: Any = {"on_checkpoint": on_checkpoint, "on_restore": on_restore, "on_completed": seen.append}
        policy = CheckpointPolicy(**callbacks)
        async with (
            AsyncMarshal.on_cluster(cluster.connect("a"), group_id="g") as marshal,
            marshal.consumer([ABSENT], mode=Group(), checkpoints=policy) as consumer,
        ):
            with marshal.sync._driver.condition:
                log.replace(consumer.sync)
            carry_out(marshal.sync, save(), restore(), CheckpointCompleted(1, 72))
            await asyncio.sleep(0.05)
            assert log.told == []
            copied.set()
            while len(seen) < 3:
                await asyncio.sleep(0.01)
            assert [told[0] for told in log.told] == ["returned", "restored"]
            uploaded.set_result(None)
            while len(log.told) < 3:
                await asyncio.sleep(0.01)
            assert (await consumer.checkpoints()).newest == 72
            await consumer.checkpoint()
            await consumer.rollback(72)
            with pytest.raises(ConfigurationError, match=r"checkpoint\(\)"):
                await consumer.commit()
        assert [told[0] for told in log.told] == ["returned", "restored", "safe", "take", "go back"]

    asyncio.run(main())
    assert seen == [72, "lost", 72]
    assert not caplog.records


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"delivery": "at-most-once"}, "at-least-once"),
        ({"transactions": True}, "not both"),
        ({"start": 48_213}, "release-group"),
        ({"topics": [(TOPIC, 0)]}, r"marshal\.claim\(topic, partition\)"),
        ({"checkpoints": 30}, r"CheckpointPolicy\(\)"),
        ({"on_checkpoint": lambda: None}, "takes"),
        ({"on_checkpoint": 5}, "on_checkpoint must be a function"),
    ],
)
def test_options_that_contradict_checkpoints(marshal: Marshal, options: dict[str, Any], text: str) -> None:
    given = {"topics": [TOPIC], "checkpoints": CheckpointPolicy(), **options}
    with pytest.raises(ConfigurationError, match=text):
        marshal.consumer(**options_of(given, Group))
    assert marshal._ending.consumers == []


async def _never(_: object) -> None:
    """A coroutine that no event loop would run."""


@pytest.mark.parametrize("name", ["on_checkpoint", "on_restore", "on_completed"])
def test_a_coroutine_function_belongs_to_the_module_for_event_loops(marshal: Marshal, name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a function"):
        marshal.consumer([TOPIC], mode=Group(), checkpoints=CheckpointPolicy(**{name: _never}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda consumer: consumer.commit(), r"Call checkpoint\(\)"),
        (lambda consumer: consumer.seek(TOPIC, 0, 5), r"rollback\(\)"),
        (lambda consumer: consumer.assign([(TOPIC, 0)]), r"marshal\.claim"),
        (lambda consumer: consumer.rollback("newest"), "to must be a whole number"),
    ],
)
def test_other_ways_of_progress_are_refused(marshal: Marshal, call: Callable[[Any], object], text: str) -> None:
    consumer, _ = made(marshal)
    with pytest.raises(ConfigurationError, match=text):
        call(consumer)


@pytest.mark.parametrize(
    "call", [GroupConsumer.checkpoint, GroupConsumer.rollback, lambda consumer: consumer.checkpoints]
)
def test_they_need_a_policy(marshal: Marshal, call: Callable[[GroupConsumer], object]) -> None:
    consumer = marshal.consumer([TOPIC], mode=Group())
    with pytest.raises(ConfigurationError, match=r"checkpoints=CheckpointPolicy\(\)"):
        call(consumer)


def test_state_that_is_saved_and_not_taken_up_is_warned_of(marshal: Marshal, caplog: pytest.LogCaptureFixture) -> None:
    _consumer, _ = made(marshal, on_checkpoint=print)
    assert "this consumer has no on_restore" in caplog.text
