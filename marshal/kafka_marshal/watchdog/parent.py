"""The worker's side of its watchdog: starts the process, keeps its releases up to date, replaces it when it dies.

The pre-encoded release is sent when our replica applies a grant, under the driver's lock, before any message of the
partition is delivered. Nothing here waits for the watchdog. What the pipe has no room for is kept by lease and sent
later by a thread of this module, which also notices the watchdog's end.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from math import inf
from typing import Any

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.secret import values_of
from kafka_marshal.types import Key
from kafka_marshal.watchdog import process
from rationalizer import (
    CommitEntry,
    CommitOffsets,
    Group,
    Lease,
    LeaveGroup,
    Outcome,
    Record,
    ReleasingPartition,
    World,
    encode,
    route_group,
)
from rationalizer.leases.shares import Share
from rationalizer.wire.wellformed import REACHED_AND_LEAVES

#: Only for callbacks that the watchdog does not have.
_LISTENING = frozenset(
    {"debug", "error_cb", "log_level", "logger", "stats_cb", "statistics.interval.ms", "throttle_cb"}
)

_OWN: Mapping[str, object] = {
    # Connected to every broker at all times, so that the leader of each CP can be reached at once.
    "enable.sparse.connections": False,
    # Its lines would mix with those of the worker. What matters comes with the records' answers.
    "log_level": 0,
}

#: Of the worker's environment: where libraries, certificates, tickets and proxies are found.
_INHERITED = frozenset({"HOME", "LANG", "PATH", "TMPDIR", "TZ"})
_INHERITED_PREFIXES = ("DYLD_", "KRB5", "LD_", "LC_", "OPENSSL_", "SSL_")
_INHERITED_SUFFIXES = ("_PROXY",)


def producer_properties(
    bootstrap_servers: str, config: Mapping[str, object], heartbeat_interval_ms: int
) -> dict[str, object]:
    """librdkafka's properties for the watchdog's producer; records are given up within HI, as the worker's are (L1).

    Raises ConfigurationError where config has something that another process can't be given, such as ``oauth_cb``.
    """
    # Imported here: reading a dump needs no Kafka client.
    from kafka_marshal.adapters.kafka.settings import Role, properties

    found = {
        **{k: v for k, v in properties(Role.APPENDER, bootstrap_servers, config).items() if k not in _LISTENING},
        **_OWN,
        "message.timeout.ms": heartbeat_interval_ms,
    }
    for name, value in found.items():
        if not isinstance(value, str | int | float):
            raise ConfigurationError(
                f"watchdog=True can't be used with {name!r} in config: a {_kind(value)} of this process can't be given "
                "to the watchdog, another process. Nothing was sent; leave watchdog out (a worker that dies is then "
                "replaced after 2 · HI), or use properties of text and numbers only"
            )
    return found


def _kind(value: object) -> str:
    return "function" if callable(value) else type(value).__name__


def environment() -> dict[str, str]:
    """The few variables of this process that the watchdog's gets: secrets often lie in the others."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _INHERITED
        or name.upper().startswith(_INHERITED_PREFIXES)
        or name.upper().endswith(_INHERITED_SUFFIXES)
    }
    # glibc would give each of librdkafka's threads a separate heap.
    return {**kept, "MALLOC_ARENA_MAX": "1"}


def _leaves(group: Group | None, slot: int) -> bool:
    """Whether the log shows that a member leaves at the open barrier: a LeaveGroup would lose what it handed in."""
    barrier = None if group is None or group.checkpoints is None else group.checkpoints.barrier
    found = None if barrier is None else barrier.answers.get(slot)
    return found is not None and found.answer == REACHED_AND_LEAVES


#: Stands for the membership: its LeaveGroup.
_MEMBER: Key = ("", -1)


def _slot(key: Key, number: int) -> Key:
    """Stands for the release of the number-th of our shares of a partition; no topic can have such a name."""
    return (f"{key[0]}\0{number}", key[1]) if number else key


class LastWill:
    """The pre-encoded releases of one worker. Not thread-safe: its watchdog has a lock."""

    def __init__(self, ids: tuple[str, str, str]) -> None:
        """ids: instance, client, group of the member."""
        self._ids = ids
        #: By CP: the member's own replica, as far as it reads; and how many CPs there are.
        self.worlds: Mapping[int, World] = {}
        self.partitions = 0
        self._numbers: dict[Key, int] = {_MEMBER: process.LEAVE}
        #: What is to be appended for each lease, or each piece with progress that is not committed: CP and packed
        #: entry.
        self.leases: dict[Key, tuple[int, bytes]] = {}
        #: Of a coordinated group: the member and its session (ms), as our replica shows them; "": it is no member.
        self._member_id, self._session_ms = "", 0
        #: What was not sent to the watchdog yet, in order.
        self.untold: dict[Key, None] = {}

    def touched(self, cp: int, outcome: Outcome) -> list[Key]:
        """The leases that may have become ours, or ceased to be, with this record."""
        message = outcome.message
        if message is None or message.group_id != self._ids[2]:
            return []
        match outcome.type:
            case "ClaimingPartition" | "ReleasingPartition" | "ClaimingShare":
                return [(message.topic, message.partition)]
            case "Heartbeat" if message.epoch is None:  # a takeover (C7)
                return [(message.topic, message.partition)]
            case "ForgetGroup":
                return [key for key, (its_cp, _) in self.leases.items() if its_cp == cp]
        return []

    def look(self, cp: int, key: Key) -> None:
        """Bring one lease, or our shares of it, up to date with the replica."""
        instance_id, client_id, group_id = self._ids
        lease = self.worlds[cp].lease(group_id, *key)
        ours: list[Lease | Share] = []
        if lease is not None and lease.shares is not None:
            ours += [share for share in lease.shares if share.is_of(instance_id, client_id)]
        elif lease is not None and lease.is_held_by(instance_id, client_id, lease.epoch):
            ours = [lease]
        for number, one in enumerate(ours):
            release = ReleasingPartition(*self._ids, *key, one.epoch, None)
            self._say(_slot(key, number), cp, one.heartbeat_interval_ms, release)
        gone = len(ours)
        while gone == 0 or _slot(key, gone) in self.leases:
            self._drop(_slot(key, gone))
            gone += 1

    # Of a member of a coordinated group.

    def look_at_member(self, cp: int) -> bool:
        """A record of some group was accepted there: bring our membership up to date; whether it has changed."""
        instance_id, client_id, group_id = self._ids
        home = route_group(group_id, self.partitions)
        if cp != home:
            return False
        group = self.worlds[home].group(group_id)
        member = None if group is None else group.clients.get(client_id)
        if member is None or member.instance_id != instance_id or _leaves(group, member.slot):
            if not self._member_id:
                return False
            self._member_id = ""
            for key in list(self.leases):
                self._drop(key)
            return True
        if (self._member_id, self._session_ms) == (member.member_id, member.session_timeout_ms):
            return False
        self._member_id, self._session_ms = member.member_id, member.session_timeout_ms
        # Any generation since it joined will do (G13).
        self._say(_MEMBER, home, member.session_timeout_ms // 2, LeaveGroup(*self._ids, member.member_id, member.slot))
        return True

    def done(self, pieces: Mapping[Key, tuple[int, int]]) -> None:
        """What the member has done and the log does not know: by partition, epoch and last offset (G14)."""
        if not self._member_id:
            return
        home = route_group(self._ids[2], self.partitions)
        for key in [key for key in self.leases if key not in pieces and key != _MEMBER]:
            self._drop(key)
        for key, (epoch, last_offset) in pieces.items():
            entries = (CommitEntry(*key, through=last_offset),)
            # Under the generation since which it has the piece: rejected if the piece went away since, and came back.
            record = CommitOffsets(*self._ids, self._member_id, epoch, False, entries)
            self._say(key, home, self._session_ms // 2, record)

    # Of both.

    def _say(self, key: Key, cp: int, heartbeat_interval_ms: int, record: Record) -> None:
        entry = process.pack_lease(self._number(key), cp, heartbeat_interval_ms, encode(record))
        if self.leases.get(key) != (cp, entry):
            self.leases[key] = (cp, entry)
            self.untold[key] = None

    def _drop(self, key: Key) -> None:
        if self.leases.pop(key, None) is not None:
            self.untold[key] = None

    def _number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def begin(self) -> None:
        """A new watchdog knows nothing."""
        self.untold = dict.fromkeys(self.leases)

    def packet(self) -> tuple[bytes, list[Key]]:
        """The next packet of what is untold, and which leases it is about."""
        parts, size = [process.LAST_WILL], 0
        for key in self.untold:
            _, entry = self.leases.get(key) or (0, process.pack_lease(self._number(key), 0, 0, b""))
            size += len(entry)
            if len(parts) > 1 and size > process.MAX_PACKET_BYTES:
                break
            parts.append(entry)
        return b"".join(parts), list(islice(self.untold, len(parts) - 1))

    def told(self, keys: Iterable[Key]) -> None:
        """The watchdog knows of these."""
        for key in keys:
            del self.untold[key]


#: Connections of this process. A forked child may drop its copy of a Marshal and continue to handle its messages. If
#: that closed the connection, the watchdog would take the worker for dead (see process.py).
_open: set[socket.socket] = set()


class NoRoomError(Exception):
    """The watchdog has not read for long; what was to be sent was not."""


class Pipe:
    """Never blocks; open in forked children, closed by an exec."""

    def __init__(self) -> None:
        """Make a pair; ``theirs`` is for the watchdog."""
        # A pipe in all but name. A pipe proper would raise SIGPIPE, which some programs let kill them.
        self.theirs: socket.socket
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._identity = self._found()
        _open.add(self._socket)

    def fileno(self) -> int:
        """For poll()."""
        return self._socket.fileno()

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.fstat(self._socket.fileno())
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @property
    def is_ours(self) -> bool:
        """Whether the descriptor still is this connection: daemons close all they find, and numbers are used again."""
        return self._identity is not None and self._found() == self._identity

    def send(self, packet: bytes) -> None:
        """Send one packet. Raises NoRoomError, or OSError if the reader is gone."""
        try:
            self._socket.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise NoRoomError from None

    def receive(self, limit: int) -> bytes | None:
        """The next packet; None: there is none yet; b"": the other end is closed. Raises OSError."""
        while True:
            try:
                return self._socket.recv(limit)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                continue  # raised once, before the rest, if the other side ended without reading everything

    def close(self) -> None:
        """Close both ends, unless they are the parent's."""
        self.theirs.close()
        if not self.is_ours:
            self._socket.detach()  # the number may belong to another process by now
        self._socket.close()
        _open.discard(self._socket)


#: Between a watchdog's end and the next one's start: doubled from the first to the last, reset after a long life.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 60.0
LONG_LIFE_S = 60.0

#: How often the connection is checked: whether it is ours, and has room again.
LOOK_S = 0.25

#: A watchdog is pinged this often, and replaced if it has not answered for this long plus a heartbeat interval.
ASK_S = 5.0
DEAF_S = 10.0

#: After a goodbye, the longest wait for its end: it takes milliseconds, unless the process was stopped.
GOODBYE_S = 0.5

#: The longest an interpreter takes until the process has left our family.
START_S = 15.0


def is_supported() -> bool:
    """Whether this system reports that a process is gone: Linux 5.3 or later, with an interpreter to be started."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return bool(sys.executable)


class _Asking:
    """When to ask the watchdog whether it is there, and how long it has owed an answer.

    Counted in the time in which we did look: a worker that was stopped itself must not blame its watchdog.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._is_asked = False
        self.waited_s = 0.0

    def is_due(self, heard: bool, passed_s: float) -> bool:
        """After a check: was there an answer, and how much time has passed?"""
        if heard:
            self._is_asked, self.waited_s = False, 0.0
        self.waited_s += passed_s if self._is_asked else 0.0
        self._since_s += passed_s
        if self._since_s < ASK_S:
            return False
        self._since_s = 0.0
        self._is_asked = True
        return True


class Watchdog:
    """One worker's watchdog. Works from ``start`` on; ``close`` says goodbye to it."""

    def __init__(
        self,
        name: str,
        topic: str,
        ids: tuple[str, str, str],
        properties: Mapping[str, object],
        heartbeat_interval_ms: int,
    ) -> None:
        """Prepare one for the member with these ids (instance, client, group) on a coordination topic.

        name: of the worker, for people. properties: of the producer (see properties.py).
        Raises ConfigurationError if a watchdog can't work.
        """
        client = find_spec("confluent_kafka")
        if not is_supported() or client is None or not client.submodule_search_locations:
            raise ConfigurationError(
                "watchdog=True needs Linux 5.3 or later (pidfd_open), and a Python interpreter that can be started "
                f"(sys.executable is {sys.executable!r}); this system has not both. Nothing was sent. Leave it out: a "
                "worker that dies is then replaced after 2 · HI"
            )
        self._name = name
        folder = client.submodule_search_locations[0]
        self._config = process.pack_config(
            {
                "name": name,
                "topic": topic,
                "properties": dict(properties),
                "folder": folder,
                "secrets": values_of(properties),
            }
        )
        self._deaf_s = DEAF_S + heartbeat_interval_ms / 1000
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self.last_will: LastWill = LastWill(ids)
        self._pipe: Pipe | None = None
        #: The driver whose progress is passed on.
        self._driver: Driver | None = None
        #: The watchdog has no room for more.
        self._is_full = False
        self._ended = threading.Event()
        #: Process id of the watchdog; None while there is none.
        self.pid: int | None = None
        #: Whether its producer is connected, so that it can append at once.
        self.is_ready: bool = False
        self._thread = threading.Thread(target=self._run, name="kafka-marshal-watchdog", daemon=True)

    def start(self) -> None:
        """Start it, in the background."""
        self._thread.start()

    # The pre-encoded releases.

    def watch(self, driver: Driver) -> None:
        """Follow what this driver's replica applies from now on."""
        with driver.condition:
            self.last_will.worlds = driver.replica.worlds
            self.last_will.partitions = driver.replica.info.partitions
            driver.listeners.append(self._applied)
            self._driver = driver

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        """A record was applied (a listener of the driver; its lock is held): what do we hold now?"""
        if keys := self.last_will.touched(cp, outcome):
            with self._lock:
                for key in keys:
                    self.last_will.look(cp, key)
                self._tell()
        elif outcome.of_group and outcome.accepted:
            with self._lock:
                if self.last_will.look_at_member(cp):
                    self._tell()

    def _note_progress(self) -> None:
        """Pass on what members of coordinated groups have done and not committed, between commits, on our thread."""
        driver = self._driver
        if driver is None or driver.is_over or not driver.engine.groups:
            return
        with driver.lock.locked(step=False) as engine:
            found = {
                piece.key: (piece.epoch, last_offset)
                for member in engine.groups.values()
                for piece, last_offset in member.reports.uncommitted()
            }
            with self._lock:
                self.last_will.done(found)
                self._tell()

    def _tell(self) -> None:
        """Send what was not sent, as far as there is room; the lock is held."""
        while self.last_will.untold and self._pipe is not None:
            packet, told = self.last_will.packet()
            if not self._send(self._pipe, packet):
                return
            self.last_will.told(told)

    def _send(self, pipe: Pipe, packet: bytes) -> bool:
        """False: it was not sent; the thread will see why, or try again."""
        if not pipe.is_ours:
            return False
        try:
            pipe.send(packet)
        except NoRoomError:
            self._is_full = True
            return False
        except OSError:
            return False
        self._is_full = False
        return True

    # The thread.

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                why = self._keep_one()
            except (OSError, subprocess.SubprocessError) as error:
                why = f"it could not be started: {error}"
            except Exception as error:  # noqa: BLE001 - logged with its traceback
                text = "no watchdog any more: the thread that keeps it failed"
                log(logging.ERROR, "watchdog_failed", text, error=error)
                return
            if self._ended.is_set():
                return
            pause_s = FIRST_PAUSE_S if time.monotonic() - began > LONG_LIFE_S else min(2 * pause_s, LAST_PAUSE_S)
            log(
                logging.WARNING,
                "watchdog_ended",
                "the watchdog of %s has ended: %s. Another one is started in %.1f s; should this process die before, "
                "its leases fall free after 2 heartbeat intervals, its pieces of a coordinated group after its session",
                self._name,
                why,
                pause_s,
            )
            self._ended.wait(pause_s)

    def _keep_one(self) -> str:
        """Start a watchdog, and look after it until it ends; why it did."""
        pipe = Pipe()
        try:
            self._start_process(pipe)
            with self._lock:
                if self._ended.is_set():
                    return "goodbye"  # it received nothing, and ends with the connection
                pipe.send(self._config)
                self._pipe = pipe
                self._is_full = False
                self.last_will.begin()
                self._tell()
            return self._look_after(pipe)
        finally:
            with self._lock:
                self._pipe = None
                self.is_ready = False
                self.pid = None
            pipe.close()

    def _start_process(self, pipe: Pipe) -> None:
        worker = os.pidfd_open(self._process_id)
        try:
            inherited = (pipe.theirs.fileno(), worker)
            # -I, -S: nothing of the user's environment, no site-packages; the program names what it needs.
            program = [sys.executable, "-I", "-S", process.__file__, f"--worker={self._process_id}"]
            child = subprocess.Popen(
                [*program, *map(str, inherited)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                env=environment(),
                pass_fds=inherited,
                start_new_session=True,
            )
        finally:
            pipe.theirs.close()
            os.close(worker)
        try:
            status = child.wait(START_S)  # for our child; the watchdog is a child of that one
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            raise
        if status != 0:
            raise OSError(f"{sys.executable} ended with status {status}")

    def _look_after(self, pipe: Pipe) -> str:
        poller = select.poll()
        asking = _Asking()
        until = inf
        while (began := time.monotonic()) < until:
            if self._ended.is_set():
                until = min(until, began + GOODBYE_S)
            poller.register(pipe, select.POLLIN | (select.POLLOUT if self._is_full else 0))
            poller.poll(LOOK_S * 1000)
            self._note_progress()
            with self._lock:
                if not pipe.is_ours:
                    return "this process closed the connection to it, which it did not open"
                self._tell()
            heard = self._hear(pipe)
            if heard is None:
                return "its process is gone"
            if asking.is_due(heard, min(LOOK_S, time.monotonic() - began)):
                with self._lock:
                    self._send(pipe, process.ASK)
            if asking.waited_s > self._deaf_s:
                self._put_down()
                return f"it answered nothing for {self._deaf_s:g} s and was killed"
        return "goodbye"

    def _hear(self, pipe: Pipe) -> bool | None:
        """Whether it sent something; None: it has ended."""
        heard = False
        while (packet := pipe.receive(process.READ_BYTES)) is not None:
            if not packet:
                return None
            heard = True
            message: dict[str, Any] = json.loads(packet)
            self.pid = message.get("hello", self.pid)
            self.is_ready = message.get("ready", self.is_ready)
            if "trouble" in message:
                text = "the watchdog of %s can't speak for it: %s"
                log(logging.WARNING, "watchdog_trouble", text, self._name, message["trouble"])
        return heard

    def _put_down(self) -> None:
        """Kill a watchdog that does not answer: if it resumed later, it would append though we said goodbye."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    # The end.

    def close(self) -> None:
        """Say goodbye: the watchdog ends without appending. Not in a forked child, which holds no leases."""
        if os.getpid() != self._process_id or self._ended.is_set():
            return
        with self._lock:
            self._ended.set()
            if self._pipe is not None and not self._send(self._pipe, process.GOODBYE):
                self._put_down()
        if self._thread.ident is not None:
            self._thread.join(START_S)  # until it is gone
