"""If the lease may be over by the member's clock, each way out of a handler of ``run`` has no effect."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Attempt, ConfigurationError, Hooks, KafkaUnavailableError, LeaseLostError, Retry
from kafka_marshal.adapters.memory import writers
from kafka_marshal.sinks import SqliteSink
from tests.faults.runs import HOW, TWICE, Bench, as_handler

pytestmark = pytest.mark.flaky(reruns=0)

HI = 100


@pytest.fixture(autouse=True)
def _runs_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.client.fetching.SLICE_S", 0.005)


class Stopped:
    """A member whose background thread is blocked until released, as in a stopped process."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.goes_on = threading.Event()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Within the block, the lease can't be proven, and the engine does not know that it is lost."""
        held = threading.Event()
        thread = threading.Thread(target=self._hold, args=(held,))
        thread.start()
        assert held.wait(10)
        attempt = Attempt.current()
        while attempt.is_held:
            time.sleep(0.001)
        yield
        assert thread.is_alive()

    def _hold(self, held: threading.Event) -> None:
        with self._bench.marshal._driver.lock.locked(step=False):
            held.set()
            self.goes_on.wait(10)


#: Way out → retry policy.
WAYS = {"the last try": Retry(1), "a retry": TWICE, "not worth one": Retry(5, on=(OSError,))}


@pytest.mark.parametrize("letters", [True, False])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOW)
def test_a_failure_has_no_effect_and_its_message_comes_again(how: str, way: str, letters: bool) -> None:
    called: list[tuple[str, int]] = []
    with Bench(1, HI) as bench:
        stopped = Stopped(bench)

        def act(message: Any) -> None:
            called.append(("begin", Attempt.current().number))
            if len(called) == 1:
                with stopped():
                    raise ValueError("too late")
            bench.handled.append(message.offset())

        def lost(attempt: Attempt, _seconds: float, error: BaseException) -> None:
            assert isinstance(error, ValueError)
            called.append(("lost", attempt.number))
            stopped.goes_on.set()

        hooks = Hooks(failed=lambda *_: called.append(("failed", 0)), lost=lost)
        options: dict[str, Any] = {} if letters else {"dead_letters": None}
        error = bench.run(as_handler(how, act), lambda: bench.handled, retry=WAYS[way], hooks=[hooks], **options)
        assert error is None
        assert called == [("begin", 1), ("lost", 1), ("begin", 1)]
        assert bench.letters == []
        failures, retries, aside = bench.consumer._handled.read()
        assert not failures
        assert not retries
        assert not aside


@pytest.mark.parametrize("error", [ConfigurationError("too late"), SystemExit(2)])
@pytest.mark.parametrize("how", HOW)
def test_what_ends_the_run_is_no_failure_either(how: str, error: BaseException) -> None:
    called: list[str] = []
    with Bench(1, HI) as bench:
        stopped = Stopped(bench)

        def act(_message: Any) -> None:
            with stopped():
                raise error

        def note(name: str) -> None:
            called.append(name)
            stopped.goes_on.set()

        hooks = Hooks(failed=lambda *_: note("failed"), lost=lambda *_: note("lost"))
        assert bench.run(as_handler(how, act), lambda: False, hooks=[hooks]) is error
        assert called == ["lost"]
        assert not bench.consumer._handled.read()[0]


@pytest.mark.parametrize("how", HOW)
def test_a_dead_letter_is_not_sent_again_once_the_lease_is_in_doubt(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first acknowledgement reports an outage; by then another member may have the partition."""
    sent: list[object] = []
    with Bench(1, HI) as bench:
        stopped = Stopped(bench)

        def send(self: object, topic: str, value: object, key: object, headers: object, on_ack: Any) -> None:
            sent.append(value)
            if len(sent) == 1:
                with stopped():
                    on_ack(KafkaUnavailableError("away"))
            stopped.goes_on.set()

        def act(message: Any) -> None:
            if not sent:
                raise ValueError("no")
            bench.handled.append(message.offset())

        monkeypatch.setattr(writers.MemoryProducer, "send", send)
        assert bench.run(as_handler(how, act), lambda: bench.handled, retry=Retry(1)) is None
        assert sent == [b"0"]


def test_a_sink_does_not_commit(tmp_path: Path) -> None:
    errors: list[BaseException] = []
    with Bench(1, HI) as bench, SqliteSink(tmp_path / "x.db") as sink:
        with sqlite3.connect(tmp_path / "x.db") as rows:
            rows.execute("CREATE TABLE lines (try)")
        stopped = Stopped(bench)

        def act(_message: Any) -> None:
            bench.handled.append(0)
            try:
                with sink.record() as tx:
                    tx.execute("INSERT INTO lines VALUES (?)", (len(bench.handled),))
                    if len(bench.handled) == 1:
                        with stopped():
                            pass
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                stopped.goes_on.set()

        def is_done() -> bool:
            lease = bench.marshal.world.lease("t", 0)
            return lease is not None and lease.stable == 0

        assert bench.run(act, is_done) is None
        assert [type(error) for error in errors] == [LeaseLostError]
        with sqlite3.connect(tmp_path / "x.db") as rows:
            assert rows.execute("SELECT * FROM lines").fetchall() == [(2,)]


@pytest.mark.parametrize("stops", [False, True])
def test_a_run_that_begins_while_kafka_is_away_waits_for_it(
    stops: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The topic of its dead letters can't be looked up; an error would end a worker that has joined."""
    monkeypatch.setattr("kafka_marshal.client.dead_letter_writer.LOOKUP_TIMEOUT_S", 0.1)
    monkeypatch.setattr("kafka_marshal.client.dead_letter_writer.AGAIN_S", 0.02)
    handled: list[object] = []
    with Bench(1, 60_000) as bench:
        client = bench.marshal._driver.cluster.client  # type: ignore[attr-defined]
        bench.cluster.broker.set_reachable(client, False)
        bench.start(lambda message: handled.append(message.offset()))
        bench.wait(lambda: "run() waits: nothing is delivered" in caplog.text, "it says that it waits")
        assert not bench.is_over, bench.error
        assert not handled
        if stops:
            bench.marshal.stop()
        else:
            bench.cluster.broker.set_reachable(client, True)
            bench.wait(lambda: handled, "it has begun")
            bench.marshal.stop()
        assert bench.ended() is None
        bench.cluster.broker.set_reachable(client, True)
    assert handled == ([] if stops else [0])
