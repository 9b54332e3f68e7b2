"""Look-ups whose time is up too early, or while the broker is away: librdkafka ends the process if asked carelessly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_marshal.testing import RunningKafka
from kafka_marshal.testing.select_broker import TEST_BOOTSTRAP

pytestmark = pytest.mark.slow

#: Many threads whose look-ups have next to no time: each way of asking, over and over, for the seconds given.
SHORT = """
import random, sys, threading, time
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import MarshalError

bootstrap, topic, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
key, until, answers = (topic, 0), time.monotonic() + seconds, {}

def ask():
    cluster = KafkaCluster(bootstrap)
    ways = {
        "watermarks": lambda s: cluster.watermarks([key], s),
        "offsets_for_time": lambda s: cluster.offsets_for_time([key], 5, s),
        "kafka_group": lambda s: cluster.kafka_group("short", s),
        "commit_for_group": lambda s: cluster.commit_for_group("short", {key: (0, "")}, s),
        "delete_records": lambda s: cluster.delete_records({key: 1}, s),
    }
    cluster.watermarks([key], 10.0)
    while time.monotonic() < until:
        way = random.choice([*ways, "watermarks", "watermarks"])
        try:
            ways[way](random.uniform(0.0001, 0.02))
            answers[way, "answered"] = True
        except MarshalError:
            answers[way, "not in time"] = True
    cluster.close()

threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert ("watermarks", "not in time") in answers and ("watermarks", "answered") in answers, answers
print("lives")
"""

#: Questions to a group's coordinator before, during and after an outage; a line says that it is to begin or to end.
OUTAGE = """
import sys, time
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import KafkaUnavailableError

cluster, key = KafkaCluster(sys.argv[1]), (sys.argv[2], 0)
ways = (lambda s: cluster.kafka_group("outage", s), lambda s: cluster.commit_for_group("outage", {key: (0, "")}, s))
for way in ways: way(20.0)
print("known", flush=True)
sys.stdin.readline()
for way in (*ways, *ways):
    try:
        way(1.5)
        raise AssertionError("answered")
    except KafkaUnavailableError:
        pass
print("away", flush=True)
sys.stdin.readline()
until = time.monotonic() + 30
for way in ways:
    while True:
        try:
            way(5.0)
            break
        except KafkaUnavailableError:
            assert time.monotonic() < until
cluster.close()
print("lives")
"""


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )


def test_a_look_up_with_next_to_no_time_leaves_the_process_alive(
    kafka_bootstrap: str, topic_factory: Callable[..., str]
) -> None:
    process = started(SHORT, kafka_bootstrap, topic_factory(1), "4")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "lives\n"), err[-2000:]


@pytest.mark.skipif(TEST_BOOTSTRAP in os.environ, reason="another user's broker is not harmed")
@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
def test_a_group_is_asked_about_again_after_an_outage(
    kafka_broker: RunningKafka, topic_factory: Callable[..., str], is_frozen: bool
) -> None:
    process = started(OUTAGE, kafka_broker.bootstrap_servers, topic_factory(1))
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "known\n"
    (kafka_broker.pause if is_frozen else kafka_broker.kill)()
    try:
        print(file=process.stdin, flush=True)
        line = process.stdout.readline()
    finally:
        (kafka_broker.resume if is_frozen else kafka_broker.restart)()
    assert line == "away\n", process.communicate()[1][-2000:]
    out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, out) == (0, "lives\n"), err[-2000:]
