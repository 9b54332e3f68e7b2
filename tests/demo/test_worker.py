"""One worker process on a real broker under faults: unwritten batches are not done, and nothing is lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from confluent_kafka import Producer

from flights import data
from flights.bad_records import planted
from flights.check import check
from flights.dead_letters import Letters
from flights.kafka import Kafka
from flights.ledger import create
from flights.options import PARTITIONS, WorkerSettings
from flights.ownership import Change, History, history_of
from flights.publish import Published, Scene, publish
from flights.reference import compute
from flights.supervisor import ENVIRONMENT, Crew, WorkerProcess
from flights.tables import find_folder, read_tables
from flights.worker import FAILED, PARENT_GONE
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.log_reader import bounds, read_range
from kafka_marshal.sinks import SqliteSink
from rationalizer.dump import DumpHeader, DumpRecord
from rationalizer.history import End
from tests.demo.helpers import alive, ask, eventually, watchdog_of

ROWS = 3_000

TopicFactory = Callable[..., str]


class Stage:
    """A topic of flights, a coordination topic, a database, and workers."""

    def __init__(self, bootstrap: str, topic: str, folder: Path) -> None:
        run = uuid.uuid4().hex[:8]
        self.scene = Scene(bootstrap, {}, topic, f"__marshal-{run}", f"delays-{run}")
        self.folder = folder
        self.database = folder / "delays.sqlite"
        self.cluster = KafkaCluster(bootstrap)
        create_topic(self.cluster, self.scene.coordination, 3, 20)
        create(self.database)
        self.crew = Crew(self.settings, folder)

    def settings(self, client_id: str, pace: int = 0, watchdog: bool = True) -> WorkerSettings:
        scene = self.scene
        return WorkerSettings(
            bootstrap=scene.bootstrap,
            config=scene.config,
            topic=scene.topic,
            coordination=scene.coordination,
            group_id=scene.group_id,
            client_id=client_id,
            database=str(self.database),
            tables=str(find_folder()),
            heartbeat_interval_ms=500,
            batch_size=100,
            watchdog=watchdog,
            pace=pace,
        )

    def publish(self, rows: int = ROWS) -> Published:
        return publish(Kafka(self.scene.bootstrap, {}), self.scene, data.find_file(), rows, lambda done: None)

    def rows_done(self) -> int:
        return int(ask(self.database, "SELECT coalesce(sum(rows), 0) FROM batches")[0][0])

    def log(self) -> tuple[DumpHeader, list[DumpRecord]]:
        """The coordination log up to its end as it is now."""
        topic = self.scene.coordination
        marks = bounds(self.cluster, topic, 20)
        assert marks is not None
        runs = read_range(self.cluster, topic, marks, 20)
        return DumpHeader(topic, len(marks)), [DumpRecord(cp, *entry) for cp, entries in runs for entry in entries]

    def history(self) -> History:
        """By the log."""
        return history_of(*self.log(), self.scene.group_id, self.scene.topic)

    def done_by_the_log(self) -> int:
        return sum(rows for _, _, rows in self.history().progress)

    def finish(self, published: Published) -> None:
        """A worker without faults does the rest, and the result is equal."""
        self.crew.start("healthy")
        eventually(lambda: self.rows_done() >= published.rows, what="doing all rows")
        # If a worker was killed between sink and log, the partition's next worker reports its progress.
        eventually(lambda: self.done_by_the_log() >= published.rows, what="telling the log")
        assert self.crew.end() == []
        wanted = compute(data.read(data.find_file(), published.rows), read_tables(find_folder()))
        verdict = check(self.database, wanted, planted(()), Letters(0, {}), published.ends)
        assert verdict.equal, verdict
        assert self.done_by_the_log() == published.rows


@pytest.fixture
def stage(kafka_bootstrap: str, topic_factory: TopicFactory, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(kafka_bootstrap, topic_factory(PARTITIONS), tmp_path)
    with made.crew, closing(made.cluster):
        yield made


def ended(worker: WorkerProcess, timeout_s: float = 40.0) -> int:
    assert worker.wait(timeout_s), f"{worker.client_id} did not end: {worker.log.read_text()}"
    return int(worker.process.returncode)


def test_a_worker_ends_in_order_and_releases_what_it_holds(stage: Stage) -> None:
    published = stage.publish()
    worker = stage.crew.start("w")
    eventually(lambda: stage.rows_done() == published.rows, what="doing all rows")
    worker.ask_to_end()
    assert ended(worker) == 0
    history = stage.history()
    assert {tenure.ended for tenure in history.all_tenures()} == {End.RELEASED}
    assert history.holders() == {}
    assert stage.done_by_the_log() == published.rows
    assert "ERROR" not in worker.log.read_text()


def test_a_disk_without_room_is_named_and_nothing_is_lost(stage: Stage) -> None:
    """A limit on file size stands in for a full disk: the write fails in the same place."""
    published = stage.publish()
    limit = stage.database.stat().st_size + 60_000
    settings = stage.settings("cramped", pace=5_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "flights.worker"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(settings)).encode() + b"\n")
    process.stdin.flush()
    assert process.wait(40) == FAILED
    assert process.stdout is not None
    assert process.stderr is not None
    told, said = process.stdout.read().decode(), process.stderr.read().decode()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()
    assert str(stage.database) in said
    assert "Nothing of this transaction was written" in said or "it was as a whole or not at all" in said
    assert "Traceback" not in said
    # Its last batch was never written, and neither database nor log contains it.
    assert ['"begun"' in line for line in told.splitlines()[-2:]] == [True, False]
    assert '"failed"' in told.splitlines()[-1]
    done = stage.rows_done()
    assert 0 < done < published.rows
    assert stage.done_by_the_log() <= done
    stage.finish(published)


def test_a_message_that_is_no_flight_ends_the_worker_and_is_not_done(stage: Stage) -> None:
    producer = Producer({"bootstrap.servers": stage.scene.bootstrap})
    producer.produce(stage.scene.topic, b"no flight", partition=5)
    assert producer.flush(20) == 0
    worker = stage.crew.start("w")
    assert ended(worker) == FAILED
    assert "JSONDecodeError" in worker.last_words()
    assert "another worker gets it" in worker.log.read_text()
    assert stage.rows_done() == 0
    assert stage.done_by_the_log() == 0
    assert stage.history().holders() == {}  # it released what it held on its way out


def test_a_worker_ends_when_its_parent_is_gone(stage: Stage) -> None:
    stage.publish()
    worker = stage.crew.start("w")
    eventually(lambda: stage.rows_done() > 0, what="the first batch")
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    assert ended(worker, 5.0) == PARENT_GONE


def test_a_worker_whose_parent_went_before_it_began_does_nothing(stage: Stage) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "flights.worker"],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=90,
    )
    assert process.returncode == PARENT_GONE


def test_what_the_database_refuses_because_of_its_epoch_is_neither_written_nor_done(stage: Stage) -> None:
    published = stage.publish()
    fence = [(stage.scene.topic, 4, 10**12, -1)]
    with SqliteSink(stage.database) as sink, sink.transaction(stage.scene.group_id, fence):
        pass
    others = published.rows - published.ends[4]
    worker = stage.crew.start("w")
    eventually(lambda: stage.rows_done() == others, what="doing the other partitions")
    refused: set[int] = set()

    def is_refused() -> bool:
        event = stage.crew.next_event(1.0)
        if event is not None and event.what == "fenced":
            refused.update(partition for partition, _, _ in event.ranges)
        return bool(refused)

    eventually(is_refused, what="being refused")
    worker.ask_to_end()
    assert ended(worker) == 0
    assert refused == {4}
    assert stage.rows_done() == others
    assert stage.done_by_the_log() == others
    assert "the lease went to another writer" in worker.log.read_text()


@pytest.mark.parametrize(("watchdog", "end"), [(True, End.RELEASED), (False, End.REPLACED)])
def test_a_killed_worker_and_its_successor_lose_nothing(stage: Stage, watchdog: bool, end: End) -> None:
    published = stage.publish()
    crew = stage.crew
    settings = stage.settings("victim", pace=2_000, watchdog=watchdog)
    victim = WorkerProcess(settings, stage.folder / "victim.log", lambda event: None)
    crew.workers["victim"] = victim
    eventually(lambda: stage.rows_done() > published.rows / 4, what="a quarter of the rows")
    if watchdog:
        watchdog_of(victim.process.pid)
    victim.kill()
    assert victim.process.returncode == -signal.SIGKILL
    assert stage.rows_done() < published.rows
    stage.finish(published)
    tenures = [tenure for tenure in stage.history().all_tenures() if tenure.client_id == "victim"]
    assert {tenure.ended for tenure in tenures} == {end}
    changes = {each.change for each in stage.history().takeovers({"victim"}) if each.old == "victim"}
    assert changes == {Change.WATCHDOG if watchdog else Change.SILENT}


def test_what_a_watchdog_says_is_not_its_workers_last_word(stage: Stage) -> None:
    stage.publish()
    worker = stage.crew.start("w")
    eventually(lambda: stage.rows_done() > 0, what="the first batch")
    watchdog_of(worker.process.pid)
    worker.process.send_signal(signal.SIGSEGV)
    assert ended(worker) == -signal.SIGSEGV
    eventually(lambda: "died without a goodbye: " in worker.log.read_text(), what="its watchdog's word")
    assert "goodbye" not in worker.last_words()
    assert worker.end_watchdog(5.0)


def test_a_watchdog_that_does_not_end_is_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, it can't release a killed worker's leases; it must not stay behind either."""
    stage.publish()
    worker = stage.crew.start("w")
    eventually(lambda: stage.rows_done() > 0, what="the first batch")
    watchdog = watchdog_of(worker.process.pid)
    os.kill(watchdog, signal.SIGSTOP)
    monkeypatch.setattr("flights.supervisor.WATCHDOG_GRACE_S", 0.5)
    with stage.crew:
        pass
    assert not worker.running
    eventually(lambda: not alive(watchdog), what="its end")
    assert worker.end_watchdog(0.0)
