"""Results and exceptions of handlers of ``run``: work that has not run is not done, a bug makes no dead letter."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import MagicMock

import pytest

from kafka_marshal import Attempt, ConfigurationError, Hooks, Retry, errors
from kafka_marshal.client.handling import Fate, fate_of, is_async
from kafka_marshal.guard import SAID_EVERY_S
from kafka_marshal.logs import RateLimit
from tests.faults.runs import HOW, Bench, as_handler

pytestmark = pytest.mark.flaky(reruns=0)

PAGE = Path(__file__).parents[2] / "docs" / "handlers.md"


@pytest.fixture(autouse=True)
def _runs_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.client.fetching.SLICE_S", 0.005)


# What it returns.


class Awaitable:
    def __await__(self) -> Iterator[None]:
        yield


class ApplyResult:
    """As of a process pool."""

    __module__ = "multiprocessing.pool"


class AsyncCallable:
    async def __call__(self, _message: Any) -> None: ...


async def coroutine(_message: Any = None) -> None: ...


async def asynchronous(_message: Any) -> Any:
    yield


def generator(_message: Any) -> Iterator[None]:
    yield


def ended() -> Future[int]:
    future: Future[int] = Future()
    future.set_result(1)
    return future


#: Handlers that return work that has not run.
UNFINISHED: dict[str, Callable[[Any], object]] = {
    "a coroutine": lambda message: coroutine(message),
    "a coroutine of a partial": lambda message: partial(coroutine, message)(),
    "a coroutine of an object": lambda message: AsyncCallable()(message),
    "a generator": lambda message: generator(message),
    "an async generator": lambda message: asynchronous(message),
    "an awaitable": lambda message: Awaitable(),
    "a future of a pool": lambda message: Future(),
    "a result of a pool of processes": lambda message: ApplyResult(),
    "a thread": lambda message: Thread(),
    "a map": lambda message: map(str, ()),
    "a list of coroutines": lambda message: [coroutine(message), coroutine(message)],
    "a tuple of futures, of which one has ended": lambda message: (ended(), Future()),
    "a function": lambda message: coroutine,
    "a partial": lambda message: partial(coroutine, message),
}


@pytest.mark.parametrize("what", UNFINISHED)
@pytest.mark.parametrize("how", HOW)
def test_what_has_not_run_is_refused_and_its_message_is_not_done(how: str, what: str) -> None:
    with Bench(3) as bench:
        error = bench.run(as_handler(how, UNFINISHED[what]), lambda: False, concurrency=1)
        assert isinstance(error, ConfigurationError)
        assert re.search("the handler has returned an? ", str(error))
        assert "[0] offset 0" in error.__notes__[0]
        assert bench.letters == []
        lease = bench.marshal.world.lease("t", 0)
        assert lease is not None
        assert lease.stable is None
    gc.collect()  # Python warns of a coroutine that was never awaited now


def test_futures_and_tasks_of_a_loop_are_refused() -> None:
    async def handle(_message: Any) -> Any:
        return asyncio.get_running_loop().create_future()

    async def begin(_message: Any) -> Any:
        return asyncio.ensure_future(asyncio.sleep(0))

    for wrong in (handle, begin):
        with Bench(1) as bench:
            assert isinstance(bench.run(wrong, lambda: False), ConfigurationError)


@pytest.mark.parametrize("wrong", [generator, asynchronous, partial(generator), partial(asynchronous)])
def test_generator_functions_are_refused_before_anything_is_delivered(wrong: Any) -> None:
    with Bench(1) as bench, pytest.raises(ConfigurationError, match="does its work when called"):
        bench.consumer.run(wrong)


@pytest.mark.parametrize("right", [coroutine, partial(coroutine), AsyncCallable(), partial(AsyncCallable())])
def test_all_kinds_of_coroutine_functions_are_awaited(right: Any) -> None:
    assert is_async(right)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    "result", [1, "x", [1], [ended()], (), {"a": 1}, object(), MagicMock(), iter([1]), ConfigurationError]
)
def test_other_results_are_ignored(how: str, result: object) -> None:
    with Bench(2) as bench:

        def act(message: Any) -> object:
            bench.handled.append(message.offset())
            return result

        assert bench.run(as_handler(how, act), lambda: len(bench.handled) == 2) is None


@pytest.mark.parametrize("how", HOW)
def test_what_deserialize_and_hooks_return_must_not_need_an_await(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bench(2) as bench:
        error = bench.run(as_handler(how, bench.handled.append), lambda: False, deserialize=UNFINISHED["a coroutine"])
        assert isinstance(error, ConfigurationError)
        assert "deserialize has returned" in str(error)
        with pytest.raises(ConfigurationError, match="deserialize must be"):
            bench.consumer.run(print, deserialize=coroutine)
        with pytest.raises(ConfigurationError, match="after must be"):

            async def after(_attempt: Attempt, _seconds: float) -> None: ...

            Hooks(after=after)
        assert bench.handled == []
        monkeypatch.setattr("kafka_marshal.guard._repeats", RateLimit(SAID_EVERY_S))
        done = as_handler(how, lambda message: bench.handled.append(message.offset()))
        hooks = Hooks(before=UNFINISHED["a coroutine"])
        assert bench.run(done, lambda: len(bench.handled) == 2, hooks=[hooks]) is None
        assert "the hook 'before' of run(…) has returned a coroutine" in caplog.text


# What it raises.


def _made(kind: type[errors.MarshalError]) -> errors.MarshalError:
    return kind.__new__(kind, "of the handler")


def _rows() -> dict[str, str]:
    """Error → the page's row."""
    page = PAGE.read_text(encoding="utf-8").split("## Errors of this library")[1].split("\n## ")[0]
    found, said = dict[str, str](), ""
    for named, then in re.findall(r"^\| (`.*?) \| (.*?) \|$", page, re.MULTILINE):
        said = said if then == "the same" else then
        for name, condition in re.findall(r"`(\w+Error)`(?: (with|without) `retry`)?", named):
            found[f"{name} {condition}".strip()] = said
    return found


def test_every_public_error_has_its_row() -> None:
    rows = _rows()
    assert {name.split()[0] for name in rows} == set(errors.__all__)
    said = {Fate.ENDS: "ends at once", Fate.RETRIED: "tried again", Fate.FAILED: "a failure of the message"}
    for name, then in rows.items():
        error = _made(getattr(errors, name.split()[0]))
        if hasattr(type(error), "retry") or name.endswith(("with", "without")) or isinstance(error, errors.SinkError):
            error.retry = name.endswith("with")  # type: ignore[attr-defined]
        if isinstance(error, errors.ProduceError):
            error.retry = name.endswith("with")
        assert said[fate_of(error)] in then, name


def test_of_a_group_the_strongest_counts() -> None:
    stale, wrong, own = _made(errors.LeaseLostError), _made(errors.ClosedError), ValueError()
    assert fate_of(own) is fate_of(ExceptionGroup("", [own, own])) is Fate.FAILED
    assert fate_of(ExceptionGroup("", [own, ExceptionGroup("", [stale])])) is Fate.RETRIED
    assert fate_of(ExceptionGroup("", [own, stale, wrong])) is Fate.ENDS
    assert fate_of(BaseExceptionGroup("", [own, SystemExit()])) is fate_of(SystemExit()) is Fate.ENDS


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [errors.ConfigurationError, errors.ClosedError, errors.ForkedError])
def test_a_programs_mistake_ends_the_run_at_once(how: str, kind: type[errors.MarshalError]) -> None:
    tries = []

    def act(message: Any) -> None:
        tries.append(message.offset())
        raise kind("of the handler")

    with Bench(3) as bench:
        assert type(bench.run(as_handler(how, act), lambda: False, concurrency=1, retry=Retry(5, (0.0, 0.0)))) is kind
        assert tries == [0]
        assert bench.letters == []


@pytest.mark.parametrize("how", HOW)
def test_what_passes_is_tried_again_whatever_on_says_and_makes_no_letter(how: str) -> None:
    tries: list[int] = []

    def act(message: Any) -> None:
        tries.append(message.offset())
        if message.offset() == 0 and len(tries) < 3:
            raise errors.SinkError("busy", retry=True)
        if message.offset() == 1:
            raise errors.StaleEpochError("theirs", topic="t", partition=0, epoch=1, stored_epoch=2)

    with Bench(2) as bench:
        retry = Retry(3, (0.0, 0.0), on=(OSError,))
        error = bench.run(as_handler(how, act), lambda: False, concurrency=1, order="partition", retry=retry)
        assert isinstance(error, errors.StaleEpochError)
        assert tries == [0, 0, 0, 1, 1, 1]
        assert bench.letters == []


@pytest.mark.parametrize("how", HOW)
def test_failures_outside_on_and_in_not_on_are_final_at_once(how: str) -> None:
    kinds = (ValueError, OSError, FileNotFoundError, errors.SinkError)
    tries: list[int] = []

    def act(message: Any) -> None:
        tries.append(message.offset())
        raise kinds[message.offset()]("final?")

    with Bench(4) as bench:
        retry = Retry(2, (0.0, 0.0), on=(OSError,), not_on=FileNotFoundError)  # type: ignore[arg-type]
        assert bench.run(as_handler(how, act), lambda: len(bench.letters) == 4, retry=retry) is None
        assert sorted(tries) == [0, 1, 1, 2, 3]
    with pytest.raises(ConfigurationError, match="not_on must be"):
        Retry(not_on=(SystemExit,))  # type: ignore[arg-type]


@pytest.mark.parametrize("how", HOW)
def test_a_cancellation_of_what_a_handler_waits_for_is_a_failure(how: str) -> None:
    def act(message: Any) -> None:
        if message.offset() == 1:
            raise asyncio.CancelledError
        bench.handled.append(message.offset())

    with Bench(3) as bench:
        assert bench.run(as_handler(how, act), lambda: len(bench.handled) == 2 and bench.letters) is None
        assert bench.letters == [b"1"]


def test_a_handler_whose_task_is_cancelled_ends_the_run() -> None:
    async def handle(_message: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with Bench(1) as bench:
        assert isinstance(bench.run(handle, lambda: False), asyncio.CancelledError)
        assert bench.letters == []


# Exceptions meanwhile.


class Frozen(Exception):
    """As a frozen dataclass."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot assign to {name}")


class Speechless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("of __str__")

    __repr__ = __eq__ = __hash__ = __str__  # type: ignore[assignment]


def _deep(message: Any) -> None:
    _deep(message)


#: Odd handlers, and the class of the run's exception without dead letters.
ODD: dict[str, tuple[Callable[[Any], object], type[BaseException]]] = {
    "frozen": (lambda message: _raise(Frozen("no")), Frozen),
    "speechless": (lambda message: _raise(Speechless()), Speechless),
    "recursion": (_deep, RecursionError),
    "memory": (lambda message: _raise(MemoryError()), MemoryError),
}


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("letters", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_odd_exceptions_end_the_run_or_are_put_aside(how: str, letters: bool, what: str) -> None:
    act, kind = ODD[what]

    def handle(message: Any) -> None:
        if message.offset() < 2:  # as many as handlers
            act(message)
        bench.handled.append(message.offset())

    with Bench(5) as bench:
        options = {} if letters else {"dead_letters": None}
        error = bench.run(
            as_handler(how, handle), lambda: len(bench.handled) == 3 and len(bench.letters) == 2, **options
        )
        if letters and error is None:
            assert sorted(bench.letters, key=str) == [b"0", b"1"]
        else:
            assert any(isinstance(each, kind) for each in (error, error and error.__context__))


class Odd(Retry):
    """An invalid back-off."""

    def delay(self, failures: int, rng: Any) -> Any:
        found = DELAYS[self.attempts or 0]
        return found() if callable(found) else found


DELAYS: dict[int, Any] = {2: float("nan"), 3: float("inf"), 4: "soon", 5: None, 6: -1.0, 7: lambda: _raise(OSError())}


@pytest.mark.parametrize("attempts", DELAYS)
@pytest.mark.parametrize("how", HOW)
def test_an_invalid_back_off_ends_the_run_with_both_errors(how: str, attempts: int) -> None:
    with Bench(2) as bench:
        error = bench.run(
            as_handler(how, lambda message: _raise(ValueError("own"))), lambda: False, retry=Odd(attempts)
        )
        assert isinstance(error, OSError if attempts == 7 else ConfigurationError)
        assert isinstance(error.__context__, ValueError)


@pytest.mark.parametrize("name", ["send", "poll"])
def test_a_producer_that_fails_ends_the_run_and_what_it_had_comes_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"kafka_marshal.adapters.memory.writers.MemoryProducer.{name}", _fail)
    with Bench(2) as bench:
        error = bench.run(lambda message: _raise(ValueError("own")), lambda: False)
        assert isinstance(error, OverflowError)
        monkeypatch.undo()
        monkeypatch.setattr("kafka_marshal.client.fetching.SLICE_S", 0.005)

        def is_done() -> bool:  # a sent letter may be acknowledged when the producer closes
            return {0, 1} == set(bench.handled) | {int(value or b"") for value in bench.letters}

        assert bench.run(lambda message: bench.handled.append(message.offset()), is_done) is None
        assert is_done()


def _fail(*_: object, **__: object) -> None:
    raise OverflowError("of the producer")


# Handlers that are gone.


@pytest.mark.parametrize("how", HOW)
def test_health_counts_handlers(how: str) -> None:
    gate = Event()

    async def wait(_message: Any) -> None:
        while not gate.is_set():
            await asyncio.sleep(0.001)

    with Bench(2) as bench:
        bench.start(wait if how == "coroutines" else lambda message: gate.wait(10), concurrency=3)
        bench.wait(lambda: bench.marshal.health().handlers == 3, "three handlers")
        assert bench.marshal.health().handlers_wanted == 3
        workers = bench.consumer._delivery.in_lanes.lanes.handlers
        assert workers is not None
        setattr(workers, "_threads" if how == "threads" else "_tasks", 1)
        assert "run(…) has 1 of 3 handlers" in str(bench.marshal.health())
        assert not bench.marshal.health().ok
        setattr(workers, "_threads" if how == "threads" else "_tasks", 3)
        gate.set()
        bench.marshal.stop()
        assert bench.ended() is None
        assert bench.marshal.health().handlers == bench.marshal.health().handlers_wanted == 0


def test_a_handlers_thread_that_ends_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with Bench(2) as bench, ThreadPoolExecutor(1):
        monkeypatch.setattr("kafka_marshal.client.workers.Ready.take", _fail)
        assert isinstance(bench.run(lambda message: None, lambda: False), OverflowError)


@pytest.mark.parametrize("way", ["cancels its own task", "cancels all tasks", "stops the loop"])
def test_a_handler_that_ends_its_task_or_loop_ends_the_run_with_a_note(
    way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async def handle(message: Any) -> None:
        if message.offset() == 1:
            if way == "cancels its own task":
                asyncio.current_task().cancel()  # type: ignore[union-attr]
            elif way == "cancels all tasks":
                for task in asyncio.all_tasks():
                    task.cancel()
            else:
                asyncio.get_running_loop().stop()

    with Bench(3) as bench:
        error = bench.run(handle, lambda: False)
        assert isinstance(error, asyncio.CancelledError)
        assert "the program has cancelled a task that calls handlers" in error.__notes__[0]
    assert "Traceback" not in capfd.readouterr().err
