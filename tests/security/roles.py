"""A short action for each role of docs/security.md, which raises if its user lacks a right."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import Producer, TopicPartition

from kafka_marshal import Admin, Batches, Consumer, Group, GroupConsumer, Keys, Marshal, Transactions
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node import kept, log_keeper
from kafka_marshal.node.coordination_topic import create_snapshots_topic, create_topic, required_settings
from kafka_marshal.node.kept import keep_settings
from rationalizer import Tick, World, encode
from rationalizer.marker import marker
from tests.cli.harness import Command
from tests.secured import Config, login
from tests.stored_snapshot import encode_snapshot

MESSAGES = 3
PATIENCE_S = 5.0


class RefusedError(Exception):
    """The action failed; the text is all that a user sees."""


@dataclass
class Trial:
    """One user that tries one role's action."""

    bootstrap: str
    user: str
    names: dict[str, str]
    command: Command
    config_file: str
    #: As root.
    cluster: KafkaCluster
    said: list[str] = field(default_factory=list)

    @property
    def group(self) -> str:
        return self.names["billing"]

    @property
    def topic(self) -> str:
        return self.names["__marshal"]

    @property
    def data(self) -> str:
        return self.names["orders"]

    def login(self) -> Config:
        return login(self.user)

    def end_of(self, name: str) -> int:
        """The end offset of partition 0 of a topic; name: as on the page."""
        key = (self.names[name], 0)
        return self.cluster.watermarks([key], PATIENCE_S)[key][1]

    def marshal(self, config: Config | None = None) -> Marshal:
        """A member, as this user."""
        return Marshal(
            self.bootstrap,
            group_id=self.group,
            client_id=f"worker-{self.user}",
            topic=self.topic,
            heartbeat_interval=0.6,
            config=self.login() if config is None else config,
            timeout=PATIENCE_S,
        )

    def run(self, *args: str) -> None:
        """Run the command as this user."""
        reach = ("--bootstrap", self.bootstrap, "--config", self.config_file, "--topic", self.topic, "--timeout", "5")
        ran = self.command(*reach, *args)
        self.said.append(ran.err)
        if ran.status != 0 or "needs the right" in ran.out:
            raise RefusedError(f"{ran.err}{ran.out}")


@contextmanager
def heard(trial: Trial) -> Iterator[None]:
    """Add what the library logs meanwhile to the error's text."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            trial.said.append(record.getMessage())

    handler = Handler(logging.WARNING)
    logging.getLogger("kafka_marshal").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("kafka_marshal").removeHandler(handler)


def _first(consumer: Consumer | GroupConsumer) -> None:
    """Wait for a message."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        if consumer.consume(1, timeout=0.2):
            return
    raise RefusedError("no message came")


# -- members --------------------------------------------------------------------------------------------------------


def _member(trial: Trial) -> None:
    with trial.marshal() as marshal, marshal.consumer([trial.data], partition_stuck="raise") as consumer:
        _first(consumer)


def _at_most_once(trial: Trial) -> None:
    options: dict[str, Any] = {"delivery": "at-most-once", "batch_size": 1, "partition_stuck": "raise"}
    with trial.marshal() as marshal, marshal.consumer([trial.data], **options) as consumer:
        _first(consumer)


def _group_member(trial: Trial, **options: Any) -> None:
    mode = Group(session_timeout=2.0, **options)
    with (
        trial.marshal() as marshal,
        marshal.consumer([trial.data], mode=mode, partition_stuck="raise") as consumer,
    ):
        _first(consumer)


def _mirror(trial: Trial) -> None:
    with heard(trial):
        _group_member(trial, mirror_offsets=True)
    if not committed(trial):
        raise RefusedError("\n".join(trial.said))


def committed(trial: Trial) -> bool:
    """Whether Kafka's group of that name has an offset."""
    consumer = KafkaConsumer({**login("root"), "bootstrap.servers": trial.bootstrap, "group.id": trial.group})
    try:
        return consumer.committed([TopicPartition(trial.data, 0)], timeout=PATIENCE_S)[0].offset >= 0
    finally:
        consumer.close()


def _dead_letters(trial: Trial, config: Config | None = None) -> None:
    tried, before = threading.Event(), trial.end_of("orders-dead")

    def handle(message: object) -> None:
        tried.set()
        raise ValueError("no")

    with trial.marshal(config) as marshal, marshal.consumer([trial.data], partition_stuck="raise") as consumer:

        def stop_when_written() -> None:
            if tried.wait(PATIENCE_S):
                until = time.monotonic() + PATIENCE_S
                while time.monotonic() < until and trial.end_of("orders-dead") < before + MESSAGES - 1:
                    time.sleep(0.05)
            marshal.stop()

        watching = threading.Thread(target=stop_when_written)
        watching.start()
        try:
            consumer.run(handle, concurrency=1, retry=None, dead_letters=trial.names["orders-dead"])
        finally:
            tried.set()
            watching.join()


def _sharer(trial: Trial) -> None:
    options: dict[str, Any] = {"mode": Batches(), "partition_stuck": "raise"}
    with trial.marshal() as marshal, marshal.consumer([trial.data], **options) as consumer:
        batch: Any = next(_within(consumer, consumer.batches()))
        batch.park(batch.messages[0], "bad")
        batch.done()


def _assigned(trial: Trial) -> None:
    """All keys of a partition, in two ranges; a message is set aside."""
    spans = [(0, 2**62), (2**62 + 1, 2**63 - 1)]
    with (
        trial.marshal() as marshal,
        marshal.consumer(mode=Keys({(trial.data, 0): spans}), partition_stuck="raise") as consumer,
    ):
        _park_one(marshal, trial, consumer)


def _park_one(marshal: Marshal, trial: Trial, consumer: Consumer) -> None:
    """Set the first message aside, and wait until the log shows it."""
    until = time.monotonic() + PATIENCE_S
    while not (found := consumer.consume(1, timeout=0.2)):
        if time.monotonic() > until:
            raise RefusedError("no message came")
    consumer.park(found[0], "bad")
    while (lease := marshal.world.lease(trial.data, 0)) is None or not lease.open:
        if time.monotonic() > until:
            raise RefusedError("it was not set aside")
        time.sleep(0.05)


def _within(consumer: Consumer, batches: Iterator[Any]) -> Iterator[Any]:
    """These batches; the consumer stops if none comes in time."""
    waiting = threading.Timer(PATIENCE_S, consumer.stop)
    waiting.start()
    try:
        for batch in batches:
            waiting.cancel()
            yield batch
    finally:
        waiting.cancel()
    raise RefusedError("no batch came")


def _transactions(trial: Trial) -> None:
    options: dict[str, Any] = {"exactly_once": Transactions(), "partition_stuck": "raise"}
    with trial.marshal() as marshal, marshal.consumer([trial.data], **options) as consumer:
        batch = next(consumer.batches(1, 0.1))
        with consumer.transaction(batch) as tx:
            tx.produce(trial.names["orders-dead"], b"x")


def _snapshots(trial: Trial) -> None:
    """A member reads the newest snapshots at its start, and writes a due one (S2)."""
    before = trial.end_of("__marshal_snapshots")
    with heard(trial), trial.marshal() as marshal, marshal.consumer([trial.data]) as consumer:
        _first(consumer)
        until = time.monotonic() + 15
        while time.monotonic() < until and trial.end_of("__marshal_snapshots") == before:
            if any("needs the right" in line for line in trial.said):
                raise RefusedError("\n".join(trial.said))
            time.sleep(0.1)
    if trial.end_of("__marshal_snapshots") == before:
        raise RefusedError("no snapshot came\n" + "\n".join(trial.said))


# -- operators ------------------------------------------------------------------------------------------------------


def _commands(*commands: tuple[str, ...]) -> Callable[[Trial], None]:
    def act(trial: Trial) -> None:
        for command in commands:
            trial.run(*(trial.names.get(word, word) for word in command))

    return act


def _history(trial: Trial) -> None:
    _commands(("log",), ("who", "looked-at", "orders", "0"), ("dump",))(trial)
    with TemporaryDirectory() as place:
        trial.run("archive", "--to", place)


def _after_work(*command: str) -> Callable[[Trial], None]:
    """Run a command on a group with progress of other users."""

    def act(trial: Trial) -> None:
        with trial.marshal(login("root")) as marshal, marshal.consumer([trial.data]) as consumer:
            _first(consumer)
        _commands(command)(trial)

    return act


def _steer(trial: Trial) -> None:
    """A dead holder's lease, a living worker, and the group as a whole."""
    dead = trial.marshal(login("root"))
    consumer = dead.consumer([trial.data])  # unreferenced, it would be closed
    _first(consumer)
    dead.terminate()
    trial.run("evict", trial.group, trial.data, "0", "--yes", "--force")
    with trial.marshal(login("root")) as marshal, marshal.consumer([trial.data]) as living:
        _first(living)
        trial.run("drain", trial.group, marshal.client_id)
    trial.run("release-group", trial.group, "--expires", "1s", "--yes")
    trial.run("convert-group", trial.group, "--to", "coordinated", "--yes", "--file", f"{trial.config_file}.saved")
    trial.run("forget-group", trial.group, "--yes")


def _move(trial: Trial) -> None:
    with trial.marshal(login("root")) as marshal, marshal.consumer([trial.data]) as consumer:
        _first(consumer)
    trial.run("release-group", trial.group, "--to", "earliest", "--yes")
    trial.run("skip", trial.group, f"{trial.data}:0", "--to", "2", "--yes")


def _parked(trial: Trial) -> None:
    """As root, set the first message of the data topic aside."""
    with trial.marshal(login("root")) as marshal, marshal.consumer([trial.data]) as consumer:
        _park_one(marshal, trial, consumer)


def _open(trial: Trial) -> None:
    _parked(trial)
    trial.run("open-messages", trial.group)
    if "needs the right" in trial.said[-1]:
        raise RefusedError(trial.said[-1])


def _redrive(trial: Trial) -> None:
    _parked(trial)
    trial.run("redrive", trial.group, f"{trial.data}:0:0")


def _redo(trial: Trial) -> None:
    """What root has handled and released: nobody holds it, so that it is read for its key."""
    with trial.marshal(login("root")) as marshal, marshal.consumer([trial.data]) as consumer:
        message = consumer.poll(30)
        assert message is not None
        consumer.done(message)
    with tempfile.TemporaryDirectory() as folder:
        trial.run("redo", trial.group, f"{trial.data}:0", "--offsets", "0", "--yes", "--plan", f"{folder}/plan.json")


def _settle(trial: Trial) -> None:
    """One that waits for its next try is set aside, and then given up."""
    _parked(trial)
    root = Admin(trial.bootstrap, topic=trial.topic, config=login("root"))
    root.redrive(trial.group, "all")
    trial.run("park", trial.group, f"{trial.data}:0:0")
    trial.run("discard", trial.group, "--all", "--yes")
    if root.open_messages(trial.group):
        raise RefusedError("it is open still")


def _redrive_letters(trial: Trial) -> None:
    _dead_letters(trial, login("root"))
    trial.run("redrive", trial.group, "--from", trial.names["orders-dead"], "--to", trial.data)


def _import(trial: Trial) -> None:
    settings = {**login("root"), "bootstrap.servers": trial.bootstrap, "group.id": trial.group}
    consumer = KafkaConsumer(settings)
    consumer.commit(offsets=[TopicPartition(trial.data, 0, 2)], asynchronous=False)
    consumer.close()
    trial.run("import-group", trial.group, "--yes")


def _export(trial: Trial) -> None:
    with (
        trial.marshal(login("root")) as marshal,
        marshal.consumer([trial.data], mode=Group(session_timeout=1.0)) as consumer,
    ):
        _first(consumer)
    trial.run("export-group", trial.group, "--yes")


def _keeper(trial: Trial) -> None:
    """Prune by itself, with turns of no length: the topic has snapshots after every third record."""
    trial.cluster.alter_topic(trial.topic, keep_settings(1), PATIENCE_S)
    _append(trial.cluster, trial.topic, [encode(Tick("1", "a", "g"))])  # younger than all that have snapshots
    key = (trial.topic, 0)
    with (
        heard(trial),
        patch.object(kept, "LEAST_KEEP_MS", 1),
        patch.object(log_keeper, "SHORTEST_LOOK_MS", 100.0),
        patch.object(log_keeper, "interval", lambda listed: 3),
        trial.marshal(),
    ):
        until = time.monotonic() + PATIENCE_S
        while trial.cluster.watermarks([key], PATIENCE_S)[key][0] == 0:
            if time.monotonic() > until:
                raise RefusedError("\n".join(trial.said))
            time.sleep(0.05)


ACTIONS: dict[str, Callable[[Trial], None]] = {
    "member": _member,
    "at-most-once": _at_most_once,
    "group-member": _group_member,
    "mirror": _mirror,
    "dead-letters": _dead_letters,
    "sharer": _sharer,
    "assigned": _assigned,
    "transactions": _transactions,
    "snapshots": _snapshots,
    "history": _history,
    "looker": _commands(
        ("status",),
        ("status", "--group", "looked-at"),
        ("lag",),
        ("groups",),
        ("group", "looked-at"),
        ("check", "--group", "looked-at"),
    ),
    "after-prune": _commands(("status",), ("check",)),
    "show": lambda trial: trial.run("show", f"{trial.data}:0:0"),
    "letters": _commands(("dead-letters", "orders-dead")),
    "init": _commands(("init", "--partitions", "1"), ("init", "--check")),
    "steer": _steer,
    "move": _move,
    "open": _open,
    "settle": _settle,
    "redrive": _redrive,
    "redo": _redo,
    "redrive-letters": _redrive_letters,
    "upgrade": _commands(("upgrade", "--yes")),
    "keeper": _keeper,
    "keep": _commands(
        ("topic", "--keep", "30d"),
    ),
    "prune": _commands(("prune", "--keep", "2", "--yes")),
    "import": _import,
    "export": _export,
}


# -- preparation ----------------------------------------------------------------------------------------------------

#: Roles whose action needs a separate coordination topic.
OWN_TOPIC = frozenset({"init", "upgrade", "keep", "keeper", "prune", "after-prune", "snapshots"})


def prepare(role: str, cluster: KafkaCluster, bootstrap: str, topic: str) -> None:
    """Create the coordination topic for this role's action. cluster: as root."""
    if role == "upgrade":
        _below_newest_level(cluster, topic)
    elif role == "keep":
        create_topic(cluster, topic, 1, 10)
    elif role in ("keeper", "prune", "after-prune"):
        _with_snapshots(cluster, topic, cut=role == "after-prune")
    elif role == "snapshots":
        _almost_due(cluster, bootstrap, topic)


def _below_newest_level(cluster: KafkaCluster, topic: str) -> None:
    cluster.create_topic(topic, 1, 1, required_settings(1), 10)
    _append(cluster, topic, [encode(marker("init", 1))])
    create_snapshots_topic(cluster, topic, 1, 1, 10)


def _append(cluster: KafkaCluster, topic: str, values: list[bytes]) -> None:
    appender = cluster.appender(topic, delivery_timeout_ms=10_000)
    for value in values:
        appender.append(0, value, None)
    assert appender.flush(10) == 0
    appender.close()


def _with_snapshots(cluster: KafkaCluster, topic: str, *, cut: bool) -> None:
    """Ticks, with a snapshot after every third; cut: the first ones are deleted."""
    create_topic(cluster, topic, 1, 10)
    _append(cluster, topic, [encode(Tick("1", "a", "g"))] * 12)
    world, places = World(0, 1), []
    tail = cluster.tail(topic, {0: 0})
    until = time.monotonic() + PATIENCE_S
    while world.next_offset < 14:
        assert time.monotonic() < until
        for entry in tail.read(0.2).records.get(0, ()):
            world.apply(*entry)
            if world.next_offset % 3 == 0:
                places.append(world.next_offset)
                _append(cluster, f"{topic}_snapshots", list(encode_snapshot(world)))
    tail.close()
    if cut:
        cluster.delete_records({(topic, 0): places[0]}, 10)


def _almost_due(cluster: KafkaCluster, bootstrap: str, topic: str) -> None:
    """Fill the log until the next snapshot is due within a few records."""
    create_topic(cluster, topic, 1, 10)
    _append(cluster, f"{topic}_snapshots", list(encode_snapshot(World(0, 1))))
    producer = Producer({**login("root"), "bootstrap.servers": bootstrap, "linger.ms": 20})
    for _ in range(10_000):
        producer.produce(topic, encode(Tick("1", "a", "g")), b"", 0)
        producer.poll(0)
    assert producer.flush(30) == 0
