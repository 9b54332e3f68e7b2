"""An exception at every line of every public call: nothing is lost, repeated, locked or leased for ever (stories.py).

CI tries a sample. ``make campaign ARGS='tests/faults -rP'`` tries all lines and prints their number.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.ports import Message
from tests.faults.cases import CASES
from tests.faults.stories import TOPIC, WITHOUT, member, memory_cluster, verdict
from tests.interrupts import MODULES, Interrupted, Interrupts, Points, interrupt_at, lines, sweep

pytestmark = [
    pytest.mark.flaky(reruns=0),
    # An interrupt within a destructor goes to a hook, and hanging members are left behind.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: Points per case that CI tries: some 300 in all.
SAMPLE = 10

#: Cases of which CI tries every line: a second or two each; their faults were between two lines.
EVERY_LINE = frozenset(name for name in CASES if "at most once: a handler closes" in name)

#: Stop a case after this many failures, as each may take seconds.
MOST_FAILURES = 3
MOST_FAILURES_OF_A_CAMPAIGN = 20

#: Signals arrive within the standard library, too: a lock just taken by Condition.__enter__, a result of a queue.
MODULES_OF_CHECKS = (*MODULES, "threading", "queue", "concurrent.futures")


class Timeout(BaseException):
    """No Exception, like KeyboardInterrupt."""


AT_CHECKS: Any = {
    "exception": Timeout,
    "points": Points.CHECKS,
    "modules": MODULES_OF_CHECKS,
    "without": WITHOUT,
}


@pytest.mark.parametrize("name", CASES)
def test_a_sample_of_lines(name: str) -> None:
    limit, per_line = (None, 1) if name in EVERY_LINE else (SAMPLE, 2)
    report = sweep(CASES[name], without=WITHOUT, limit=limit, per_line=per_line, seed=1, most_failures=MOST_FAILURES)
    assert not report.failures, verdict(report)
    assert report.interrupted > 0


@pytest.mark.parametrize("name", ["poll", "at most once: iterate", "claim"])
def test_a_sample_of_checks(name: str) -> None:
    report = sweep(CASES[name], **AT_CHECKS, limit=SAMPLE, per_line=2, seed=2, most_failures=MOST_FAILURES)
    assert not report.failures, verdict(report)


def test_no_line_lies_between_what_is_made_and_its_with_block() -> None:
    def program() -> None:
        with member(memory_cluster()) as marshal, marshal.claim("by-hand", 0), marshal.consumer([TOPIC]):
            pass

    assert not [place for place in lines(program, without=WITHOUT) if "__enter__" in place.function]


def test_what_an_interrupt_of_poll_costs_follows_what_was_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all fetched messages: otherwise a loop would make no progress with an alarm every half millisecond."""
    messages, given_back = 5_000, []
    put_back = Buffer.put_back

    def counted(self: Buffer, messages: list[Message], covers_from: int) -> None:
        given_back.append(len(messages))
        put_back(self, messages, covers_from)

    monkeypatch.setattr(Buffer, "put_back", counted)
    with member(memory_cluster(1, messages)) as marshal, marshal.consumer([TOPIC]) as consumer:
        for number in range(messages):
            if number % 20 == 19:
                with pytest.raises(Interrupted), interrupt_at(4, without=WITHOUT):
                    consumer.poll()
            message = consumer.poll()
            assert message is not None
            assert message.offset() == number
            consumer.done(message)
    assert len(given_back) >= messages / 20
    assert sum(given_back) < 10 * messages  # 5,000 for the first interrupt, some 64 for each of the 249 others


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_every_line(name: str) -> None:
    report = sweep(CASES[name], without=WITHOUT, per_line=2, most_failures=MOST_FAILURES_OF_A_CAMPAIGN)
    print(f"{name}: {verdict(report).splitlines()[0]}")
    assert not report.failures, verdict(report)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_every_check(name: str) -> None:
    """Where the interpreter really runs signal handlers: after calls, whose results are lost."""
    report = sweep(CASES[name], **AT_CHECKS, per_line=1, most_failures=MOST_FAILURES_OF_A_CAMPAIGN)
    print(f"{name}: {verdict(report).splitlines()[0]}")
    assert not report.failures, verdict(report)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("again_after", [1, 4, 16])
@pytest.mark.parametrize("name", CASES)
def test_twice(name: str, again_after: int) -> None:
    """A second Ctrl-C while the first one is handled."""
    if (name, again_after) == ("Marshal()", 1):
        pytest.skip("within the two lines that clean up after the first one: an idle thread is left, and nothing else")
    report = sweep(
        CASES[name],
        exception=KeyboardInterrupt,
        again_after=again_after,
        without=WITHOUT,
        limit=40,
        per_line=1,
        seed=again_after,
        most_failures=MOST_FAILURES_OF_A_CAMPAIGN,
    )
    print(f"{name}, again after {again_after}: {verdict(report).splitlines()[0]}")
    assert not report.failures, verdict(report)


# The injector itself.


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = sys.gettrace(), sys.getprofile()
    yield
    assert (sys.gettrace(), sys.getprofile()) == before


def _careful(said: list[str]) -> None:
    try:
        said.append("work")
        said.append("more")
    except Interrupted:
        said.append("mend")
        said.append("mended")
        raise


OWN = {"modules": ("tests.faults.test_interrupts",), "without": ()}


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("points", "again_after", "said"),
    [
        (Points.LINES, None, [[], ["work"]]),
        (Points.CHECKS, None, [[], ["work"], ["work", "more"]]),
        (Points.LINES, 1, None),
        (Points.OPCODES, None, None),
    ],
)
def test_the_injector_comes_to_every_point(
    points: Points, again_after: int | None, said: list[list[str]] | None
) -> None:
    found: list[list[str]] = []

    def attempt(interrupts: Interrupts) -> None:
        heard: list[str] = []
        try:
            with interrupts:
                _careful(heard)
        except Interrupted:
            found.append([each for each in heard if not each.startswith("mend")])
            assert again_after is None or len(interrupts.fired) == 1 or "mended" not in heard

    report = sweep(attempt, points=points, again_after=again_after, **OWN)  # type: ignore[arg-type]
    assert not report.failures, report
    assert report.interrupted == report.counted > 1
    assert said is None or found == said


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("points", Points)
def test_a_with_block_is_left_as_the_interpreter_promises(points: Points) -> None:
    def locking(lock: threading.Lock) -> int:
        with lock:
            len("x")
            return len("y")

    def attempt(interrupts: Interrupts) -> None:
        lock = threading.Lock()
        try:
            with interrupts:
                locking(lock)
        except Interrupted:
            pass
        assert not lock.locked()

    report = sweep(attempt, points=points, **OWN)  # type: ignore[arg-type]
    assert report.interrupted > 2
    # Python 3.14 promises less: the interrupt after lock.__enter__ leaves the lock locked (cpython issue 148874).
    wanted = 1 if points is Points.CHECKS and sys.version_info[:2] == (3, 14) else 0
    assert len(report.failures) == wanted, report


def test_a_handler_that_returns_lets_the_call_continue() -> None:
    heard: list[list[str]] = []

    def attempt(interrupts: Interrupts) -> None:
        said: list[str] = []
        interrupts.handler = lambda: said.append("handled")
        with interrupts:
            _careful(said)
        heard.append(said)

    report = sweep(attempt, **OWN)  # type: ignore[arg-type]
    assert not report.failures, report
    assert report.interrupted == report.counted == 2
    assert heard == [["work", "more"], ["handled", "work", "more"], ["work", "handled", "more"]]


def test_what_hangs_and_what_fails_is_reported_with_its_line() -> None:
    def bad(event: threading.Event) -> None:
        len("x")
        event.set()

    def attempt(interrupts: Interrupts) -> None:
        event = threading.Event()
        try:
            with interrupts:
                bad(event)
        except Interrupted:
            event.wait()

    report = sweep(attempt, within_s=0.1, **OWN)  # type: ignore[arg-type]
    assert len(report.failures) == 2
    assert "event.set()" not in str(report)
    assert "test_interrupts.py:" in str(report)
    assert "bad (point 1 of lines): the call has not ended after 0.1 s" in str(report)
    assert "event.wait()" in str(report)
