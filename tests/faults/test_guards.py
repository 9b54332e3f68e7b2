"""Exceptions of users' functions cost no message, thread or lease, and are logged."""

from __future__ import annotations

import copy
import logging
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from kafka_marshal import (
    Admin,
    Balanced,
    Claims,
    ClosedError,
    ConfigurationError,
    Consumer,
    KafkaUnavailableError,
    Marshal,
    Policy,
)
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka.errors import Troubles
from kafka_marshal.adapters.kafka.questions import AddressCheck
from kafka_marshal.adapters.kafka.settings import Role, properties
from kafka_marshal.engine.policies import View, Wishes
from kafka_marshal.errors import AuthenticationError
from kafka_marshal.guard import SAID_EVERY_S, Guard
from kafka_marshal.logs import RateLimit
from kafka_marshal.testing.layout import free_ports
from tests.client.conftest import HI, Scene, take, wait_until

MANY = 20_000


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.guard._repeats", RateLimit(SAID_EVERY_S))


class OddError(Exception):
    """Raised only by these tests."""


class OddExit(BaseException):
    """Not an Exception, like SystemExit."""


class Raising:
    """A callback that raises each time, and counts its calls."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.calls = 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        raise self.error(f"call {self.calls}")


def read_all(consumer: Consumer, count: int) -> list[int]:
    """Iterate to the last message, restarting the loop if it raises a callback's exception."""
    seen: list[int] = []
    until = time.monotonic() + 60
    while not seen or seen[-1] != count - 1:
        assert time.monotonic() < until, f"{len(seen)} of {count}"
        with suppress(OddError, OddExit):
            for message in consumer:
                seen.append(message.offset() or 0)
                if message.offset() == count - 1:
                    break
    return seen


def reports(caplog: pytest.LogCaptureFixture, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "kafka_marshal" and text in record.getMessage()]


# -- callbacks of librdkafka's ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OddError, OddExit])
def test_a_stats_cb_that_raises_costs_no_message(
    scene: Scene, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    topic = scene.topic(1, MANY)
    callback = Raising(error)
    marshal = scene.member()
    consumer = marshal.consumer([topic], config={"statistics.interval.ms": 5, "stats_cb": callback})
    assert read_all(consumer, MANY) == list(range(MANY))
    while callback.calls <= 3:
        assert consumer.poll(0.01) is None
    told = reports(caplog, "stats_cb raised")
    assert len(told) == 1
    assert told[0].exc_info is not None


@pytest.mark.parametrize("error", [OddError, OddExit])
def test_a_stats_cb_of_the_marshals_own_that_raises_ends_no_thread(scene: Scene, error: type[BaseException]) -> None:
    topic = scene.topic(1, 100)
    callback = Raising(error)
    marshal = scene.member(config={"statistics.interval.ms": 10, "stats_cb": callback})
    assert len(take(marshal.consumer([topic]), 100)) == 100
    calls, lease = callback.calls, marshal.claim("by-hand", 0)
    Event().wait(3 * HI / 1000)  # longer than a lease lasts without heartbeats
    assert callback.calls > calls
    assert lease.valid
    lease.heartbeat(5)


def test_log_handlers_that_raise_cost_no_message(scene: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    topic = scene.topic(1, MANY)
    mine = logging.Logger("mine", logging.DEBUG)
    refusing = Raising(OddError)
    mine.addFilter(refusing)  # type: ignore[arg-type]
    consumer = scene.member().consumer([topic], config={"logger": mine, "debug": "fetch"})
    assert read_all(consumer, MANY) == list(range(MANY))
    assert refusing.calls > 3


def test_where_logging_itself_raises_stderr_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafka_marshal.logs.LOGGER.log", Raising(OddExit))
    assert Guard("stats_cb", Raising(OddError))() is None
    assert "stats_cb raised" in capsys.readouterr().err


def test_an_error_that_cannot_say_what_it_is_is_in_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise OddError

    assert Guard("stats_cb", Raising(MuteError))() is None
    assert reports(caplog, "stats_cb raised MuteError; continuing")
    assert "logging" not in capfd.readouterr().err


def test_an_error_cb_that_raises_hides_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    callback = Raising(OddExit)
    cluster = KafkaCluster(f"127.0.0.1:{free_ports(1)[0]}", {"error_cb": callback})
    with pytest.raises(KafkaUnavailableError, match="Connection refused"):
        cluster.topics(0.5)
    tail = cluster.tail("t", {0: 0})
    wait_until(lambda: tail.read(0.1).faults)
    tail.close()
    cluster.close()
    assert callback.calls > 1
    assert reports(caplog, "error_cb raised OddExit")


def test_troubles_never_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    troubles = Troubles()
    monkeypatch.setattr(troubles, "_take", Raising(OddExit))
    troubles(KafkaError(KafkaError._TRANSPORT))
    troubles.log(20, "%s", *("too", "many"))


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("name", ["stats_cb", "throttle_cb", "on_commit", "on_delivery", "a.callback.of.the.future"])
def test_every_function_in_a_config_is_guarded(role: Role, name: str) -> None:
    callback = Raising(OddExit)
    guarded: Any = properties(role, "h:1", {name: callback})[name]
    assert guarded("event", 2) is None
    assert callback.calls == 1


def test_a_guarded_function_gets_its_arguments_and_its_answer_is_passed_on() -> None:
    guarded: Any = properties(Role.DATA, "h:1", {"any_cb": lambda *given: given})["any_cb"]
    assert guarded(1, "two") == (1, "two")


def test_no_client_is_made_with_settings_of_another_source() -> None:
    """settings.properties guards callables: all configurations for confluent-kafka must come from it."""
    makers = {"Consumer(", "Producer(", "AdminClient(", "producer("}
    package = Path(sys.modules["kafka_marshal.adapters.kafka"].__path__[0])
    found = {
        f"{path.stem}: {line.strip()}"
        for path in package.glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if any(f"= {maker}" in line or f"self._{maker}" in line for maker in makers)
    }
    # Each of these gets settings.properties(), from its caller or in the lines before.
    assert found == {
        'questions: admin = AdminClient(cast("dict[str, Any]", settings))',
        'questions: self._admin = AdminClient(cast("dict[str, Any]", dict(properties)))',
        "cluster: self.consumer = Consumer(settings)",
        "cluster: consumer = Consumer({**self._properties(Role.DATA), **settings})",
        "readers: self.consumer: Consumer = Consumer(settings)",
        "writers: made = producer(settings)",
    }


def test_the_check_of_addresses_outlives_a_callback_that_raises(kafka_bootstrap: str) -> None:
    callback = Raising(OddExit)
    config = {"statistics.interval.ms": 1, "stats_cb": callback}
    check = AddressCheck([kafka_bootstrap], properties(Role.ADMIN, kafka_bootstrap, config))
    assert list(check.ids(20)) == [kafka_bootstrap]


# -- oauth_cb -----------------------------------------------------------------------------------------------------

OAUTH = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "OAUTHBEARER"}


@pytest.mark.parametrize("answer", [None, "token", ("token",), ("token", "soon"), ["token", 1.0], (b"token", 1.0)])
def test_an_oauth_cb_still_fails_where_it_raises_or_answers_what_cant_be_read(
    answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    guarded: Any = properties(Role.ADMIN, "h:1", {"oauth_cb": lambda _: answer})["oauth_cb"]
    with pytest.raises(TypeError, match="must return"):
        guarded("")
    guarded = properties(Role.ADMIN, "h:1", {"oauth_cb": Raising(OddError)})["oauth_cb"]
    with pytest.raises(OddError):
        guarded("")


@pytest.mark.parametrize("answer", [("t", 1), ("t", 1.5, "me"), ("t", 1.5, "me", {"a": "b"}), ("t", 1, "", {})])
def test_an_oauth_cbs_answer_is_passed_on(answer: object) -> None:
    guarded: Any = properties(Role.ADMIN, "h:1", {"oauth_cb": lambda _: answer})["oauth_cb"]
    assert guarded("") is answer


@pytest.mark.slow
def test_no_token_is_reported_as_a_refusal_and_the_log_says_why(
    kafka_bootstrap: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AuthenticationError, match="oauth_cb"):
        KafkaCluster(kafka_bootstrap, {**OAUTH, "oauth_cb": Raising(OddError)})
    assert reports(caplog, "oauth_cb raised OddError: call 1")


# -- signals ------------------------------------------------------------------------------------------------------


@contextmanager
def handler(number: int, handle: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def leave(*_: object) -> None:
    sys.exit(7)


def ring(*_: object) -> None:
    raise OddError


@pytest.mark.parametrize(
    ("number", "handle", "error"),
    [
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, leave, SystemExit),
        (signal.SIGALRM, ring, OddError),
        (signal.SIGUSR1, Raising(OddExit), OddExit),
    ],
)
def test_what_a_signal_raises_in_a_callback_is_raised_again_outside(
    number: int, handle: Callable[..., object], error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    with handler(number, handle):
        guarded = Guard("stats_cb", lambda: signal.raise_signal(number))
        guarded()
        began = time.monotonic()
        with pytest.raises(error):
            Event().wait(5)
        assert time.monotonic() - began < 4
    assert not reports(caplog, "stats_cb raised")


def test_what_a_callback_raises_itself_is_not_raised_again(caplog: pytest.LogCaptureFixture) -> None:
    with handler(signal.SIGALRM, ring):
        Guard("stats_cb", Raising(OddError))()
        Event().wait(0.1)
    assert reports(caplog, "stats_cb raised OddError")


def test_ctrl_c_within_a_callback_ends_the_loop(scene: Scene) -> None:
    topic = scene.topic(1, 10)
    rung: list[int] = []

    def press(_: str) -> None:
        if not rung:
            rung.append(1)
            signal.raise_signal(signal.SIGINT)

    consumer = scene.member().consumer([topic], config={"statistics.interval.ms": 20, "stats_cb": press})
    with handler(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        for _ in consumer:
            pass
    assert rung


# -- policies and predicates --------------------------------------------------------------------------------------


class Moody(Policy):
    """Balanced, except when it is set to fail."""

    def __init__(self, answer: Callable[[], object] | None = None) -> None:
        self.answer = answer
        self.asked = 0

    def wishes(self, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
        self.asked += 1
        return Balanced().wishes(view, own, now) if self.answer is None else self.answer()  # type: ignore[return-value]


@pytest.mark.parametrize(
    "answer",
    [
        Raising(OddError),
        Raising(OddExit),
        lambda: None,
        lambda: Wishes(claim=([],)),  # type: ignore[arg-type]
        lambda: Wishes(claim=7),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_fails_keeps_what_is_held_and_is_asked_again(
    scene: Scene, answer: Callable[[], object], caplog: pytest.LogCaptureFixture
) -> None:
    topic = scene.topic(3)
    policy = Moody(answer)
    marshal = scene.member("a")
    consumer = marshal.consumer([topic], mode=Claims(policy=policy))
    wait_until(lambda: policy.asked > 2)
    assert not consumer.assignment()
    policy.answer = None
    wait_until(lambda: len(consumer.assignment()) == 3)
    policy.answer, policy.asked = answer, 0
    Event().wait(3 * HI / 1000)
    assert len(consumer.assignment()) == 3
    marshal.claim("by-hand", 0).heartbeat(3)
    assert len(reports(caplog, "the policy Moody raised")) in range(1, 4)


def test_a_policy_gets_nothing_that_it_was_not_shown(scene: Scene) -> None:
    topic, other = scene.topic(1), scene.topic(1)
    wanted = ((other, 0), (topic, 0), (topic, 9))
    marshal = scene.member()
    consumer = marshal.consumer([topic], mode=Claims(policy=Moody(lambda: Wishes(claim=wanted, release=((other, 0),)))))
    wait_until(lambda: consumer.assignment())
    assert [(each.topic, each.partition) for each in consumer.assignment()] == [(topic, 0)]
    assert marshal.world.lease(other, 0) is None


@pytest.mark.parametrize("error", [OddError, OddExit])
def test_a_predicate_that_raises_reaches_its_caller_and_holds_no_lock(scene: Scene, error: type[BaseException]) -> None:
    marshal = scene.member()
    lease = marshal.claim("by-hand", 0)
    with pytest.raises(error):
        marshal.world.wait_for(Raising(error), 5)
    Event().wait(3 * HI / 1000)
    assert lease.valid
    assert marshal.world.wait_for(lambda world: world.lease("by-hand", 0), 5)


# -- other processes, other threads -------------------------------------------------------------------------------


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_belongs_to_a_process_is_not_pickled(scene: Scene, send: Callable[[object], object]) -> None:
    marshal = scene.member()
    admin = Admin(scene.bootstrap, topic=scene.coordination)
    for of_this_process in (marshal, admin, admin.pause("g")):
        with pytest.raises(TypeError, match=f"a {type(of_this_process).__name__} can't be pickled.*in each process"):
            send(of_this_process)


def test_an_exit_stack_ends_what_it_has_entered(scene: Scene) -> None:
    with ExitStack() as stack:
        marshal = stack.enter_context(Marshal(scene.bootstrap, group_id="stacked", topic=scene.coordination))
        lease = stack.enter_context(marshal.claim("by-hand", 1))
        consumer = stack.enter_context(marshal.consumer([scene.topic()]))
        was_valid = lease.valid
    assert (was_valid, lease.valid) == (True, False)
    with pytest.raises(ClosedError):
        consumer.poll(0)


@pytest.mark.parametrize("make", [lambda: Marshal("127.0.0.1:1", group_id="g"), lambda: Admin("127.0.0.1:1")])
@pytest.mark.parametrize(
    ("module", "asked", "part"),
    [("gevent.monkey", "is_module_patched", "threading"), ("eventlet.patcher", "is_monkey_patched", "thread")],
)
def test_green_threads_are_refused(
    make: Callable[[], object], module: str, asked: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{asked: lambda name: name == part}))
    with pytest.raises(ConfigurationError, match=r"greenlets.*Nothing was sent.*thread=False"):
        make()


def test_a_process_that_left_its_threads_alone_is_not_refused(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gevent.monkey", SimpleNamespace(is_module_patched=lambda name: name == "socket"))
    assert scene.member().claim("by-hand", 0).valid


# -- repeats ------------------------------------------------------------------------------------------------------


def test_what_repeats_is_held_back_and_counted() -> None:
    repeats = RateLimit(10.0, kept=2)
    assert [repeats.due("a", now) for now in (0.0, 1.0, 9.9, 10.0, 11.0, 30.0)] == [0, None, None, 2, None, 1]
    assert repeats.due("b", 30.0) == 0
    assert repeats.due("a", 30.0) is None
    assert repeats.due("c", 30.0) == 0  # forgets the others, to bound memory
    assert repeats.due("a", 30.0) == 0
