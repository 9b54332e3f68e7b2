"""Each contract test runs three times: on the log in memory, on the simulation's log, and on a real broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract import sides
from tests.contract.sides import KafkaSide, MemorySide, Side, SimulatedSide


@pytest.fixture(params=["memory", "simulation", pytest.param("kafka", marks=pytest.mark.broker)])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    """One implementation, new for each test; the broker is the session's."""
    made: Side
    if request.param == "memory":
        made = MemorySide()
    elif request.param == "simulation":
        made = SimulatedSide()
        for module in (sides, request.module):
            monkeypatch.setattr(module, "time", made.time, raising=False)
            monkeypatch.setattr(module, "threading", made.threading, raising=False)
    else:
        kafka = request.getfixturevalue("kafka_broker")
        made = KafkaSide(kafka.bootstrap_servers, kafka.client_config)
    yield made
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of the simulation's log as a task of the simulation."""
    made = pyfuncitem.funcargs.get("side")
    if not isinstance(made, SimulatedSide):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    made.play(lambda: pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def kafka_side(request: pytest.FixtureRequest) -> Iterator[KafkaSide]:
    """The real one alone."""
    kafka = request.getfixturevalue("kafka_broker")
    made = KafkaSide(kafka.bootstrap_servers, kafka.client_config)
    yield made
    made.close()
