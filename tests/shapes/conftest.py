"""The scene of the client's tests: a coordination topic, data topics and members on the session's real broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.client.conftest import scene

__all__ = ["scene", "times"]

T = TypeVar("T")

Times = Callable[[str, float], None]

#: Time limit for a member's start (s), and the number of attempts, as the machine may be busy.
READY_S = 2.0
TRIES = 3

_TOLD: list[str] = []


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Times:
    """Records durations, which are printed after the session."""
    name = request.node.name

    def tell(what: str, seconds: float) -> None:
        _TOLD.append(f"{name}, {what}: {seconds:.2f} s")

    return tell


def in_time(what: str, times: Times, attempt: Callable[[], T], undo: Callable[[T], object] = lambda _: None) -> T:
    """Repeat until it is within the limit; undo cleans up late attempts. Reports the best time."""
    best = float("inf")
    for tries_left in reversed(range(TRIES)):
        began = time.monotonic()
        made = attempt()
        best = min(best, time.monotonic() - began)
        if best <= READY_S or not tries_left:
            break
        undo(made)
    times(what, best)
    assert best <= READY_S, f"{what}: {best:.1f} s at best of {TRIES} tries, {READY_S:g} s is promised"
    return made


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long members took to start or to fail."""
    if _TOLD:
        terminalreporter.section("log shapes")
        for line in _TOLD:
            terminalreporter.write_line(line)
