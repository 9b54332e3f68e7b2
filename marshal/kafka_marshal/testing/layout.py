"""One local broker's files and ports: its configuration, its logs, its data."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import random
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.jars import Java
from kafka_marshal.testing.supervisor import LOCK_FILE

#: The only address on which local brokers listen.
LOOPBACK = "127.0.0.1"

_LOWEST = 15_000
_DEFAULT_EPHEMERAL = 32_768


def free_ports(count: int) -> list[int]:
    """Distinct ports that are free now. Another program may still be faster: retry if a bind fails.

    They are below the system's range for outgoing connections, where a free port may belong to a client socket a moment
    later.
    """
    low, high = _range()
    # The system's random source, not a test's seeded one: concurrent test runs must not draw the same ports.
    candidates = random.SystemRandom().sample(range(low, high), min(high - low, 50 * count + 200))
    found: list[int] = []
    for port in candidates:
        if is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise LocalBrokerError(
        f"Found only {len(found)} of {count} free ports between {low} and {high} on {LOOPBACK}. Nothing was started. "
        "End other programs that listen there, or name a port."
    )


def is_free(port: int) -> bool:
    """Whether a server could listen on this port of the loopback interface now."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        # As in Java: connections in TIME_WAIT don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _range() -> tuple[int, int]:
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first_ephemeral = _DEFAULT_EPHEMERAL
    # A system tuned to use nearly all ports leaves no room below: then any port will do.
    high = first_ephemeral if first_ephemeral > _LOWEST + 1_000 else _DEFAULT_EPHEMERAL
    return _LOWEST, high


#: Prefix of our folders in the system's temporary folder.
FOLDER_PREFIX = "kafka-marshal-broker-"

#: Tuned for a start in two seconds rather than for throughput.
JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Djava.awt.headless=true")

#: A folder younger than this may belong to a supervisor that is about to lock it.
_SWEEP_AFTER_S = 120.0

_LOG4J = """\
rootLogger.level=WARN
rootLogger.appenderRef.file.ref=file
appender.file.type=RollingFile
appender.file.name=file
appender.file.fileName={file}
appender.file.filePattern={file}.%i
appender.file.layout.type=PatternLayout
appender.file.layout.pattern=%d{{HH:mm:ss.SSS}} %-5p %c{{1}}: %m%n
appender.file.policies.type=Policies
appender.file.policies.size.type=SizeBasedTriggeringPolicy
appender.file.policies.size.size=8MB
appender.file.strategy.type=DefaultRolloverStrategy
appender.file.strategy.max=1
"""


def ready_classes(java: Java, jars: Sequence[Path]) -> Path:
    """Where this Java's archive of the broker's classes is, if there is one (``python -m kafka_marshal.testing``)."""
    program = java.path.resolve()
    status = program.stat()
    key = hashlib.sha256(f"{program} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()[:8]
    return jars[0].parent / f"classes-{key}.jsa"


def heap(brokers: int) -> tuple[str, ...]:
    """Heap options: three brokers on a small machine get less each."""
    return ("-Xms96m", "-Xmx512m" if brokers == 1 else "-Xmx384m")


@dataclass(frozen=True, slots=True)
class BrokerLayout:
    """One broker's ports and files."""

    folder: Path
    broker_id: int
    #: Port for clients …
    port: int
    #: … and the advertised port (the same, unless there is a proxy).
    advertised_port: int
    #: Port for other brokers, so that a proxy does not affect traffic between brokers.
    internal_port: int
    controller_port: int

    @property
    def properties_file(self) -> Path:
        """Kafka's configuration."""
        return self.folder / "server.properties"

    @property
    def log4j_file(self) -> Path:
        """Kafka's logging configuration."""
        return self.folder / "log4j2.properties"

    @property
    def console(self) -> Path:
        """The process's output."""
        return self.folder / "console.log"

    @property
    def log(self) -> Path:
        """What Kafka logged."""
        return self.folder / "server.log"

    @property
    def data(self) -> Path:
        """Kafka's log.dirs."""
        return self.folder / "data"

    @property
    def formatted(self) -> bool:
        """Whether the data folder was prepared before."""
        return (self.data / "meta.properties").exists()

    def write(self, cluster: Sequence[BrokerLayout], properties: Mapping[str, str]) -> None:
        """Write the broker's configuration, with properties overriding ours; begin new logs."""
        self.folder.mkdir(exist_ok=True)
        settings = {**self._settings(cluster), **properties}
        lines = [f"{_escaped(key)}={_escaped(value)}" for key, value in settings.items()]
        # It may contain users' passwords.
        self.properties_file.unlink(missing_ok=True)
        self.properties_file.touch(mode=0o600)
        self.properties_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        self.log4j_file.write_text(_LOG4J.format(file=_escaped(str(self.log))), encoding="utf-8")
        for log in (self.console, self.log):
            log.unlink(missing_ok=True)

    def log_tail(self, lines: int) -> str:
        """The last lines of Kafka's log, or of the process's output if it did not get as far as logging."""
        for log in (self.log, self.console):
            if log.exists():
                said = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
                if said:
                    return "\n".join(f"  {line}" for line in said)
        return ""

    def start_waits_at(self) -> str:
        """The stack of the thread that starts a broker, from the JVM's thread dump (SIGQUIT)."""
        said = self.console.read_text(encoding="utf-8", errors="replace") if self.console.exists() else ""
        _, _, dump = said.rpartition("Full thread dump")
        main = next((thread for thread in dump.split("\n\n") if thread.lstrip().startswith('"main"')), "(nowhere)")
        return "\n".join(f"  {line}" for line in main.splitlines())

    def bind_failed(self) -> bool:
        """Whether the broker ended because another program took one of its ports."""
        said = self.log_tail(200)
        return any(sign in said for sign in ("BindException", "Address already in use", "failed to bind"))

    def _settings(self, cluster: Sequence[BrokerLayout]) -> dict[str, str]:
        return {
            **common_settings(len(cluster)),
            "node.id": str(self.broker_id),
            "controller.quorum.voters": ",".join(
                f"{each.broker_id}@{LOOPBACK}:{each.controller_port}" for each in cluster
            ),
            "listeners": f"CLIENT://{LOOPBACK}:{self.port},INTERNAL://{LOOPBACK}:{self.internal_port},"
            f"CONTROLLER://{LOOPBACK}:{self.controller_port}",
            "advertised.listeners": f"CLIENT://{LOOPBACK}:{self.advertised_port},"
            f"INTERNAL://{LOOPBACK}:{self.internal_port}",
            "log.dirs": str(self.data),
        }


def common_settings(brokers: int) -> dict[str, str]:
    """Common settings of brokers for tests."""
    copies = min(3, brokers)
    in_sync = 2 if copies == 3 else 1
    return {
        "process.roles": "broker,controller",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "INTERNAL",
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "auto.create.topics.enable": "false",
        "default.replication.factor": str(copies),
        "min.insync.replicas": str(in_sync),
        "offsets.topic.replication.factor": str(copies),
        "transaction.state.log.replication.factor": str(copies),
        "transaction.state.log.min.isr": str(in_sync),
        "share.coordinator.state.topic.replication.factor": str(copies),
        "share.coordinator.state.topic.min.isr": str(in_sync),
        # Few partitions: creating fifty takes longer than most tests.
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.num.partitions": "4",
        # A killed broker's partitions get new leaders after 3 s instead of 9.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        "group.initial.rebalance.delay.ms": "0",
        # 128 MB by default, for a cleaner with little work here.
        "log.cleaner.dedupe.buffer.size": "16777216",
    }


def sweep() -> None:
    """Remove folders left behind by a killed supervisor, whose lock is free."""
    root = Path(tempfile.gettempdir())
    for folder in root.glob(f"{FOLDER_PREFIX}*"):
        try:
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _SWEEP_AFTER_S:
                continue
            with (folder / LOCK_FILE).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # in use, or another process was faster


def make_folder(keep: Path | None) -> Path:
    """The folder for a cluster: a new temporary one, or keep. Raises LocalBrokerError."""
    if keep is None:
        sweep()
        return Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    try:
        keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalBrokerError(
            f"Can't keep the data in {keep}: {error.strerror}. Nothing was started. Name another folder."
        ) from error
    return keep


def cluster_id(folder: Path, brokers: int) -> str:
    """The id of the cluster in the folder, random for a new one. Raises LocalBrokerError."""
    note = folder / "cluster.json"
    if note.exists():
        known = json.loads(note.read_text())
        if known["brokers"] != brokers:
            raise LocalBrokerError(
                f"{folder} holds the data of a cluster of {known['brokers']} broker(s), not {brokers}. "
                "Nothing was started or changed. Ask for that many, or name another folder."
            )
        return str(known["cluster_id"])
    # An id that begins with a dash would look like an option.
    new = "a" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
    note.write_text(json.dumps({"brokers": brokers, "cluster_id": new}))
    return new


def lay_out(
    folder: Path,
    ids: Sequence[int],
    fixed: Sequence[int],
    advertised: Mapping[int, int],
    properties: Mapping[str, str],
) -> dict[int, BrokerLayout]:
    """Choose ports (fixed: those of clients, if not empty) and write every broker's configuration; by id."""
    count = len(ids)
    chosen = free_ports(3 * count)
    ports = list(fixed) or chosen[:count]
    layouts = {
        broker_id: BrokerLayout(
            folder=folder / f"broker-{broker_id}",
            broker_id=broker_id,
            port=ports[i],
            advertised_port=advertised.get(broker_id, ports[i]),
            internal_port=chosen[count + i],
            controller_port=chosen[2 * count + i],
        )
        for i, broker_id in enumerate(ids)
    }
    for each in layouts.values():
        each.write(list(layouts.values()), properties)
    return layouts


def _escaped(text: str) -> str:
    """A key or value of a Java properties file."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")
