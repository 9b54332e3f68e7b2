"""An exception while a handler's failure is processed: the run ends with it or continues, and no lane is lost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import Attempt
from kafka_marshal.client.dead_letter_writer import DeadLetterWriter
from kafka_marshal.client.dead_letters import DeadLetter
from kafka_marshal.client.tries import Tries
from tests.faults.runs import DEAD, HOW, TWICE, Bench, as_handler
from tests.interrupts import Interrupted, Interrupts, Place, spread

pytestmark = pytest.mark.flaky(reruns=0)

MODULES = tuple(
    f"kafka_marshal.{name}"
    for name in (
        *("client.attempt", "client.dead_letter_writer", "client.dead_letters", "client.handling", "client.handled"),
        *("client.workers", "client.tries"),
        "engine.work.lanes",
    )
)


@pytest.fixture(autouse=True)
def _runs_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.client.fetching.SLICE_S", 0.005)


class OddExit(BaseException):
    """No Exception."""


class EndError(BaseException):
    """Ends a run."""


# An exception at each line.


class Rounds:
    """Consecutive runs of one consumer, each with three messages, of which the second fails."""

    def __init__(self, how: str, bench: Bench, fails: Callable[[Attempt], bool]) -> None:
        self.how = how
        self._bench = bench
        self._fails = fails
        self._interrupts: Interrupts | None = None
        self._is_ending = False
        self._done: set[int] = set()
        self._last = -1

    def _handle(self, message: Any) -> None:
        if message.value() == b"end":
            if self._is_ending:
                raise EndError
        elif message.value() == b"bad" and self._interrupts is not None:
            _arm(self._interrupts)
            if self._fails(Attempt.current()):
                raise ValueError("bad")
        self._done.add(message.offset())

    def __call__(self, interrupts: Interrupts) -> None:
        """One run with interrupts, which ends or continues; one without, which leaves nothing undone."""
        self._interrupts, produce = interrupts, self._bench.cluster.broker.produce
        for value in (b"good", b"bad", b"good"):
            self._last = produce("t", 0, value, b"key")
        error = self._until_done()
        if interrupts.fired and error is not None:
            chain = _chain(error)
            assert any(isinstance(each, type(interrupts.exception) | Interrupted | OddExit) for each in chain), error
        self._interrupts = None
        assert self._until_done() is None, "a run without interrupts"

    def _until_done(self) -> BaseException | None:
        """The run's exception, unless it has handled everything or written it as dead letters."""
        self._is_ending = False
        handler = as_handler(self.how, self._handle)
        self._bench.start(handler, concurrency=1, retry=TWICE, dead_letters=DEAD)
        self._bench.wait(self._is_complete, "everything is done, or the run over")
        if not self._bench.is_over:
            self._is_ending = True
            self._last = self._bench.cluster.broker.produce("t", 0, b"end", b"end")
        error = self._bench.ended()
        return None if isinstance(error, EndError) else error

    def _is_complete(self) -> bool:
        letters = map(DeadLetter.of, self._bench.cluster.broker.existing[DEAD].partitions[0].messages)  # type: ignore[arg-type]
        aside = {letter.offset for letter in letters if letter is not None}
        return self._done | aside >= set(range(self._last + 1))


def _arm(interrupts: Interrupts) -> None:
    """Interrupt this thread from here on, including its active frames."""
    if interrupts.fired:
        return
    interrupts.__enter__()
    frame = sys._getframe()
    while frame is not None:
        if interrupts._code.has(frame.f_code):
            frame.f_trace = interrupts._local
        frame = frame.f_back  # type: ignore[assignment]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


#: Outcome of the second message → test of the handler's attempt.
ENDS: dict[str, Callable[[Attempt], bool]] = {
    "done": lambda attempt: False,
    "tried again": lambda attempt: attempt.number == 1,
    "put aside": lambda attempt: True,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("end", ENDS)
def test_an_exception_at_any_line_after_a_handler_loses_no_lane(how: str, end: str) -> None:
    with Bench(0) as bench:
        _sweep(Rounds(how, bench, ENDS[end]), limit=20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("kind", "function"), [(Tries, "_time"), (DeadLetterWriter, "_serve")])
def test_an_exception_at_any_line_of_the_other_threads_loses_no_lane(
    kind: type, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, armed = getattr(kind, function), list[Interrupts]()

    def traced(self: Any) -> None:
        with armed[-1]:
            real(self)

    monkeypatch.setattr(kind, function, traced)
    with Bench(0) as bench:
        rounds = Rounds("threads", bench, ENDS["tried again" if kind is Tries else "put aside"])
        monkeypatch.setattr("tests.faults.test_run_failures._arm", lambda _: None)

        def attempt(interrupts: Interrupts) -> None:
            armed.append(interrupts)
            rounds(interrupts)

        _sweep(attempt, limit=15)


def _sweep(attempt: Callable[[Interrupts], object], limit: int) -> None:
    counting = Interrupts(None, modules=MODULES, keep=True)
    attempt(counting)
    points = spread(counting.places, limit, per_line=1)
    fired: set[Place] = set()
    for turn, number in enumerate(points):
        interrupts = Interrupts(number, OddExit if turn % 4 == 3 else Interrupted, modules=MODULES)
        try:
            attempt(interrupts)
        except AssertionError as error:
            raise AssertionError(f"{interrupts}: {error}") from error
        fired.update(interrupts.fired)
    assert len(fired) > len(points) / 2, f"{len(fired)} of {len(points)}"
