"""The scene of the client's tests: a coordination topic, data topics and members on the session's real broker."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.client.conftest import scene

__all__ = ["scene", "times"]

_TOLD: list[str] = []


@pytest.fixture
def times(request: pytest.FixtureRequest) -> Callable[[str, float], None]:
    """Takes down what took how many seconds; told after the session."""
    name = request.node.name

    def tell(what: str, seconds: float) -> None:
        _TOLD.append(f"{name}, {what}: {seconds:.2f} s")

    return tell


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How long members took to start, or to be told why they can't."""
    if _TOLD:
        terminalreporter.section("log shapes")
        for line in _TOLD:
            terminalreporter.write_line(line)
