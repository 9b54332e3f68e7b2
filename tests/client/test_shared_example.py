"""examples/shared_worker.py, as a user starts it."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from confluent_kafka import Producer

from kafka_marshal import Admin
from tests.client.conftest import Scene, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "shared_worker.py"
MESSAGES = 200


def test_two_workers_write_each_row_once_and_what_was_set_aside_when_it_is_redriven(
    scene: Scene, tmp_path: Path
) -> None:
    """One of them is killed. The bad message is good for the mended program."""
    topic, database = scene.topic(1), tmp_path / "rows.db"
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    for number in range(MESSAGES):
        producer.produce(topic, b"?" if number == 7 else b"%d" % number)
    producer.flush()
    text = EXAMPLE.read_text().replace('"thumbnails")', f'"{scene.group}", topic="{scene.coordination}")')
    program = tmp_path / "shared_worker.py"
    program.write_text(text)
    command = [sys.executable, str(program), scene.bootstrap, topic, str(database)]

    def offsets() -> list[int]:
        if not database.exists():
            return []
        with closing(sqlite3.connect(database)) as connection:
            try:
                return sorted(at for (at,) in connection.execute("SELECT at FROM rows"))
            except sqlite3.OperationalError:
                return []  # there is no table yet

    workers = [subprocess.Popen(command) for _ in range(2)]
    try:
        wait_until(lambda: len(offsets()) > MESSAGES // 4)
        workers[0].kill()
        wait_until(lambda: offsets() == [x for x in range(MESSAGES) if x != 7], 120)
        admin = Admin(scene.bootstrap, topic=scene.coordination)
        wait_until(lambda: [(x.offset, x.reason) for x in admin.open_messages(scene.group)] == [(7, "ValueError")])
        workers[1].send_signal(signal.SIGTERM)
        assert workers[1].wait(20) == 0
        program.write_text(text.replace('int(message.value() or b"")', "len(message.value())"))
        workers.append(subprocess.Popen(command))
        assert admin.redrive(scene.group, [(topic, 0, 7)]).messages == ((topic, 0, 7),)
        wait_until(lambda: offsets() == [*range(MESSAGES)])
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
