"""Settings for all tests. The broker fixtures come from the package's pytest plugin, as for users."""

from __future__ import annotations

import gc
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.scheduling import pytest_runtest_setup as pytest_runtest_setup
from tests.scheduling import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parent

# No deadlines: on two shared cores they measure other processes. CI draws the same examples each time, so that only a
# change turns it red; local runs draw new ones.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


# Spark sessions in tests last a minute: the JVM's optimizing compiler costs more than it saves in that time (a third of
# a driver's processor time).
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# Tests and commands under test must not use the developer's cluster.
os.environ.pop("KAFKA_MARSHAL_BOOTSTRAP", None)

# Started in the background by a shell, this process and its children would ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Folders of tests that only compute, without a broker or waits. (But test_costs.py measures.)
ALONE_WITH_A_PROCESSOR = ("rationalizer", "scripts", "engine", "simulation", "mutants")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Here, as pytest loads only this folder's conftest.py before it reads the command line."""
    text = "write what comes of each command into the scripts of tests/scripts; read the diff before you commit it"
    parser.addoption("--rewrite-scripts", action="store_true", help=text)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Set markers by fixtures: tests with a broker's fixture need a broker, and tests with Spark are slow.

    With pytest-xdist (make test: --dist loadgroup) one process runs all tests that share a Spark session or a cluster
    of three brokers; tests with Kafka stay together by file, with a broker per process. The longest start first; tests
    that only compute come last, in any free process, so that all processes end together.
    """
    if hasattr(config, "workerinput"):
        for item in items:
            if not _only_computes(item) or item.path.parent == ROOT:
                item.add_marker(pytest.mark.xdist_group(_group_of(item)))
        items.sort(key=_turn)
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "spark" in fixtures:
            item.add_marker(pytest.mark.slow)
            if item.get_closest_marker("timeout") is None:
                # One that is broken off leaves its session to the others in a state in which they fail, too.
                item.add_marker(pytest.mark.timeout(300))
        if "kafka_cluster3" in fixtures:
            item.add_marker(pytest.mark.cluster3)
        elif "kafka_broker" in fixtures or "topic_factory" in fixtures:
            item.add_marker(pytest.mark.broker)


def _group_of(item: pytest.Item) -> str:
    if item.path.parent == ROOT:
        return "house"  # they read the same modules
    fixtures = getattr(item, "fixturenames", ())
    shared = next((name for name in ("spark", "kafka_cluster3") if name in fixtures), None)
    return shared or item.path.stem


def _turn(item: pytest.Item) -> int:
    if item.path.parent == ROOT:
        return 2
    if _only_computes(item):
        return 3 if item.get_closest_marker("slow") is None else 2
    return 0 if "spark" in item.path.name or item.path.parent.name == "pipeline" or _group_of(item) == "spark" else 1


def _only_computes(item: pytest.Item) -> bool:
    folder = item.path.parent
    return (folder == ROOT or folder.name in ALONE_WITH_A_PROCESSOR) and item.path.name != "test_costs.py"


def pytest_sessionfinish() -> None:
    """Collect Kafka clients that tests dropped: later they would log a missing broker after the last line."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why a test was rerun (in CI): other processes' load, or a defect."""
    for report in terminalreporter.stats.get("rerun", ()):
        crash = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.write_line(f"RERUN {report.nodeid}: {getattr(crash, 'message', report.longrepr)!s:.1000}")
        for trace, _, _ in getattr(report.longrepr, "chain", ())[:-1]:  # its cause, possibly in another thread
            terminalreporter.write_line(f"RERUN came of: {trace!s:.3000}")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One Spark for the whole session: two cores, little memory, no web page."""
    from kafka_marshal.pipeline.session import spark_session

    settings = {
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.session.timeZone": "UTC",
        # Progress bars would overwrite pytest's lines.
        "spark.ui.showConsoleProgress": "false",
    }
    session = spark_session("kafka-marshal tests", master="local[2]", config=settings)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
