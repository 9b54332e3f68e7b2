"""An AdminClient is never destroyed on a thread of librdkafka, which would abort the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from kafka_marshal.adapters.kafka.questions import SharedAdmin
from kafka_marshal.errors import ClosedError

#: Arguments: bootstrap servers, whether the cluster is closed. An answer arrives after the cluster has become garbage,
#: and the collector starts on the thread that brings it.
PROGRAM = """
import gc, sys, threading
from confluent_kafka.admin import AdminClient
from kafka_marshal.adapters.kafka import KafkaCluster

arrived, dropped, collected = threading.Event(), threading.Event(), threading.Event()
ask = AdminClient.describe_configs

def answered(_):
    arrived.set()
    dropped.wait(10)
    gc.collect()
    collected.set()

def describe_configs(self, *args, **options):
    answers = ask(self, *args, **options)
    for answer in answers.values():
        answer.add_done_callback(answered)
    return answers

def use_and_drop():
    cluster = KafkaCluster(sys.argv[1])
    cluster.cycle = cluster
    assert cluster.topic_config("not-there", 10) is None
    assert arrived.wait(10)
    if sys.argv[2] == "closed":
        threading.Timer(0.2, dropped.set).start()
        cluster.close()

AdminClient.describe_configs = describe_configs
gc.disable()
use_and_drop()
dropped.set()
assert collected.wait(10)
for thread in threading.enumerate():
    if thread.name == "kafka-marshal-destroy":
        thread.join(10)
"""


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_garbage_collected_on_a_thread_of_librdkafka(kafka_bootstrap: str, how: str) -> None:
    command = [sys.executable, "-c", PROGRAM, kafka_bootstrap, how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_client_in_use_outlives_its_close() -> None:
    admin = SharedAdmin({"bootstrap.servers": "127.0.0.1:1", "error_cb": lambda _error: None})
    with ExitStack() as stack:
        clients = [stack.enter_context(admin.use()) for _ in range(2)]
        closer = threading.Thread(target=admin.close)
        closer.start()
        closer.join(10)
        assert not closer.is_alive()  # it does not wait for its users
        with pytest.raises(ClosedError), admin.use():
            pass
        assert all(client.poll(0) >= 0 for client in clients)
    with pytest.raises(RuntimeError):
        clients[0].poll(0)
    admin.close()
