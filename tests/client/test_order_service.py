"""examples/order_service.py: in memory with kills and pauses, and once as a user starts it."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from contextlib import closing
from functools import partial
from pathlib import Path

from confluent_kafka import Producer

from kafka_marshal.testing import MemoryKafka
from order_service import REGULAR, work
from tests.client.conftest import Scene, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "order_service.py"
ORDERS = [(random.Random(n).choice("abcde"), random.Random(n).randint(500, 5_000)) for n in range(80)]


def rows(database: Path) -> list[tuple[int, int, str, int]]:
    if not database.exists():
        return []
    with closing(sqlite3.connect(database)) as connection:
        try:
            return connection.execute("SELECT * FROM orders ORDER BY place, at").fetchall()
        except sqlite3.OperationalError:
            return []  # there is no table yet


def check(database: Path) -> None:
    """Each order has one row, and the discount is that of a program that never crashed."""
    found: dict[str, list[int]] = defaultdict(list)
    spent: dict[str, int] = defaultdict(int)
    for _, _, customer, cents in rows(database):
        found[customer].append(cents)
    wanted: dict[str, list[int]] = defaultdict(list)
    for customer, cents in ORDERS:
        wanted[customer].append(cents * 9 // 10 if spent[customer] >= REGULAR else cents)
        spent[customer] += cents
    assert found == wanted


def test_in_memory_whatever_is_killed_or_paused(memory_marshal: MemoryKafka, tmp_path: Path) -> None:
    database = tmp_path / "orders.db"
    memory_marshal.create_topic("orders", 3)
    start = partial(memory_marshal.start, work, str(database), str(tmp_path / "spent"))

    def order(first: int, last: int) -> None:
        for customer, cents in ORDERS[first:last]:
            memory_marshal.produce("orders", str(cents), key=customer)

    first, second = start("a"), start("b")
    order(0, 40)
    memory_marshal.wait_until_done("orders", "orders")
    memory_marshal.advance(31)  # the group takes a checkpoint
    order(40, 60)
    memory_marshal.wait_until(lambda: len(rows(database)) > 50)  # some are written, and none is in a checkpoint
    first.kill()
    memory_marshal.advance(25)  # its session is over: the second goes back to the checkpoint, with the state
    memory_marshal.wait_until_done("orders", "orders")
    second.pause()
    order(60, 70)
    start("c")
    memory_marshal.advance(25)
    memory_marshal.wait_until_done("orders", "orders")
    second.resume()
    order(70, 80)
    memory_marshal.advance(31)
    memory_marshal.wait_until_done("orders", "orders")
    check(database)


def test_on_a_broker_a_killed_service_costs_no_order_and_doubles_none(scene: Scene, tmp_path: Path) -> None:
    topic, database = scene.topic(3), tmp_path / "orders.db"
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    for customer, cents in ORDERS:
        producer.produce(topic, str(cents), customer)
    producer.flush()
    text = EXAMPLE.read_text().replace('["orders"]', f'["{topic}"]')
    text = text.replace(
        'group_id="orders"', f'group_id="{scene.group}", topic="{scene.coordination}", heartbeat_interval=0.5'
    ).replace("mode=Group()", "mode=Group(session_timeout=2)")
    program = tmp_path / "order_service.py"
    program.write_text(text)

    def start(name: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(program), scene.bootstrap, str(database), str(tmp_path), name])

    services = [start("a")]
    try:
        wait_until(lambda: len(rows(database)) > len(ORDERS) // 4)
        services[0].kill()
        services.append(start("b"))
        wait_until(lambda: len(rows(database)) == len(ORDERS), 120)
        services[1].send_signal(signal.SIGTERM)
        assert services[1].wait(30) == 0
    finally:
        for each in services:
            each.kill()
            each.wait()
    check(database)
