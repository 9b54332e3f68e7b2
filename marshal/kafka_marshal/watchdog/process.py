"""The watchdog's own process: waits for a worker's death, then releases what it held.

A program by itself, started by :mod:`kafka_marshal.watchdog.parent` as a file: importing the package, or all of
confluent_kafka, would make it several times as large. So it knows neither the protocol nor its configuration. Over a
pipe the worker sends what to append if it dies, already encoded, and with which properties.

    worker ──config, releases, ask, goodbye──▶ watchdog     one packet each: never half written at any kill
    worker ◀──hello, ready, here, trouble── watchdog

For a lease the record is its release. For a member of a coordinated group the records are what it had done and not
committed, as far as it was passed on, and last that the member leaves.

It appends only when the pipe is at its end *and* the kernel says that the process is gone. An exec closes the pipe too,
and so does a daemon that closes all its descriptors: the process lives. Forked children of a process that is gone may
still handle messages: they hold the pipe. If only one of the two is true, it waits for as long as the worker's leases
can last without a beat (2 · HI, or a member's session), and ends without appending (C6: it could change nothing by
then).
"""

from __future__ import annotations

import json
import os
import select
import signal
import struct
import sys
import time
from types import ModuleType
from typing import Any

#: Of the packets. A worker that runs on while it is upgraded may start a newer program.
FORMAT = 1

#: A packet's first byte says what it is.
CONFIG, LAST_WILL, ASK, GOODBYE = b"C", b"W", b"A", b"G"

#: Packets of releases stay below this; a pipe takes more than a hundred of them before its reader must have read.
MAX_PACKET_BYTES = 16_384

#: Room for the largest packet there can be: a configuration, with certificates in it.
READ_BYTES = 262_144

#: number of the lease, CP, HI (ms), length of the release, which follows; length 0: the lease is over.
_LEASE = struct.Struct("!IIIH")

#: The number of the record with which a member leaves its group: the last one, as records go out by number.
LEAVE = 2**32 - 1

#: Waits between two checks whether the producer has connected: doubled from the first to the last.
FIRST_LOOK_S, LAST_LOOK_S = 0.02, 1.0

#: Without a cluster for this long, the worker is sent the reason.
TROUBLE_AFTER_S = 5.0

#: librdkafka's callbacks are served this often while nothing else happens.
SERVE_S = 30.0

#: Beyond the producer's own timeout, until its last report must be there.
GRACE_S = 2.0


def pack_config(config: dict[str, object]) -> bytes:
    """A packet with everything the program has to know."""
    return CONFIG + json.dumps({"format": FORMAT, **config}).encode()


def pack_lease(number: int, cp: int, heartbeat_interval_ms: int, release: bytes) -> bytes:
    """One lease (or record) to release: what to append to which CP; b"": the one of this number is over."""
    return _LEASE.pack(number, cp, heartbeat_interval_ms, len(release)) + release


class Voice:
    """A producer, connected before it is needed."""

    def __init__(self, topic: str, folder: str, properties: dict[str, Any]) -> None:
        """Start to connect; folder is where confluent_kafka is installed."""
        # Its C module alone: the package around it would bring a hundred modules that are not needed here.
        package = ModuleType("confluent_kafka")
        package.__path__ = [folder]
        sys.modules["confluent_kafka"] = package
        from confluent_kafka.cimpl import KafkaException, Producer

        self._topic = topic
        self._kafka_error = KafkaException
        self._timeout_s = properties["message.timeout.ms"] / 1000 + GRACE_S
        self._released = 0
        #: librdkafka's last report on its connections, and on a record.
        self._cause = self._refusal = ""
        self._producer = Producer({**properties, "error_cb": self._failed})

    def _failed(self, error: Any) -> None:
        self._cause = error.str()

    @property
    def trouble(self) -> str:
        """Why it does not get through."""
        return ": ".join(filter(None, (self._refusal, self._cause))) or "no broker has answered"

    def serve(self) -> None:
        """Let librdkafka call its callbacks."""
        self._producer.poll(0)

    def has_met_cluster(self) -> bool:
        """Whether a broker has answered (waits for some milliseconds)."""
        self.serve()
        try:
            return bool(self._producer.cluster_id(0.05))
        except self._kafka_error:
            return False  # librdkafka passes the reason to its callback

    def append(self, last_will: list[tuple[int, bytes]]) -> int:
        """Append all, wait for the answers; how many were written. ``trouble`` says why not all."""
        until = time.monotonic() + self._timeout_s
        for cp, value in last_will:
            while not self._produce(cp, value) and time.monotonic() < until:
                self._producer.poll(0.1)
        while len(self._producer) > 0 and time.monotonic() < until:
            self._producer.poll(0.1)
        return self._released

    def _produce(self, cp: int, value: bytes) -> bool:
        """False: librdkafka's queue is full."""
        try:
            self._producer.produce(self._topic, value, b"", cp, self._answered)
        except BufferError:
            return False
        except self._kafka_error as error:
            self._refusal = str(error)
        return True

    def _answered(self, error: Any, _: object) -> None:
        if error is None:
            self._released += 1
        else:
            self._refusal = error.str()


class ExitWatch:
    """Waits for the end of one worker."""

    def __init__(self, pipe: int, worker: int) -> None:
        """pipe: our end of the connection; worker: the worker's pidfd."""
        self._pipe = pipe
        self._worker = worker
        self._poller = select.poll()
        os.set_blocking(pipe, False)
        self._poller.register(pipe, select.POLLIN)
        self._poller.register(worker, select.POLLIN)
        self._config: dict[str, Any] = {}
        #: By number: CP, HI, release.
        self._last_will: dict[int, tuple[int, int, bytes]] = {}
        self._at_end = False
        self._is_gone = False
        self._said_goodbye = False
        #: When nothing can be left to be released: set once one of the two signs is there.
        self._until = float("inf")
        self._voice: Voice | None = None
        self._is_ready = False
        self._look_s = FIRST_LOOK_S
        self._trouble_at = float("inf")

    def run(self) -> None:
        """Until the worker says goodbye or is gone, or its leases have run out."""
        self._tell({"hello": os.getpid()})
        while not self._said_goodbye:
            self._wait()
            if self._at_end and self._is_gone:
                self._speak()
                return
            if self._at_end or self._is_gone:
                now = time.monotonic()
                longest_ms = max((hi for _, hi, _ in self._last_will.values()), default=0)
                self._until = min(self._until, now + 2 * longest_ms / 1000)
                if now >= self._until:
                    return
            elif self._voice is None and self._config:
                self._open()

    def _wait(self) -> None:
        timeout_s = min(self._until - time.monotonic(), SERVE_S)
        if self._voice is not None and not self._is_ready:
            timeout_s = min(timeout_s, self._look_s)
        for fd, _ in self._poller.poll(max(0.0, timeout_s) * 1000):
            if fd == self._worker:
                self._is_gone = True
                self._poller.unregister(fd)
        # Always, so that what a dead worker sent last is read before it is judged.
        self._read()
        if self._voice is not None:
            self._look(self._voice)

    def _look(self, voice: Voice) -> None:
        if self._is_ready or self._is_gone:
            voice.serve()
            return
        self._look_s = min(2 * self._look_s, LAST_LOOK_S)
        if voice.has_met_cluster():
            self._is_ready = True
            self._tell({"ready": True})
        elif time.monotonic() >= self._trouble_at:
            self._trouble_at = float("inf")
            self._tell({"trouble": voice.trouble})

    def _open(self) -> None:
        try:
            if self._config["format"] != FORMAT:
                raise ValueError(f"the worker runs another release (format {self._config['format']}, ours is {FORMAT})")
            self._voice = Voice(self._config["topic"], self._config["folder"], self._config["properties"])
        except Exception as error:
            # Without a producer this process is useless. The worker gets the reason and logs it.
            self._tell({"trouble": f"{type(error).__name__}: {error}"})
            raise
        self._trouble_at = time.monotonic() + TROUBLE_AFTER_S

    # The pipe.

    def _read(self) -> None:
        while not self._at_end and not self._said_goodbye:
            try:
                packet = os.read(self._pipe, READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # the worker died without reading what we sent: reported once; the rest follows
            if not packet:
                self._at_end = True
                self._poller.unregister(self._pipe)
            elif packet[:1] == CONFIG:
                self._config = json.loads(packet[1:])
                _secrets[:] = self._config.get("secrets", ())  # an older worker sends none
            elif packet[:1] == LAST_WILL:
                self._take(packet)
            elif packet[:1] == ASK:
                self._tell({"here": True})
            elif packet[:1] == GOODBYE:
                self._said_goodbye = True

    def _take(self, packet: bytes) -> None:
        at = len(LAST_WILL)
        while at < len(packet):
            number, cp, heartbeat_interval_ms, length = _LEASE.unpack_from(packet, at)
            at += _LEASE.size
            if length:
                self._last_will[number] = (cp, heartbeat_interval_ms, packet[at : at + length])
            else:
                self._last_will.pop(number, None)
            at += length

    def _tell(self, message: dict[str, object]) -> None:
        try:
            safe = {name: without_secrets(told) if isinstance(told, str) else told for name, told in message.items()}
            os.write(self._pipe, json.dumps(safe).encode())
        except OSError:
            return  # the worker is gone, or has not read for long: there is no reader

    # The end.

    def _speak(self) -> None:
        if not self._last_will or not self._config:
            return
        if self._voice is None:
            self._open()
        assert self._voice is not None
        if not self._is_ready:
            # A record produced before the producer has connected would wait for half a second more.
            self._voice.has_met_cluster()
        entries = [(cp, release) for _, (cp, _, release) in sorted(self._last_will.items())]
        released = self._voice.append(entries)
        name, count = self._config["name"], f"{released} of {len(entries)}"
        what, rest = f"{count} leases released", "the others fall free by themselves"
        if LEAVE in self._last_will:
            what = f"{count} records written in its name: what it had done, and that it leaves its group"
            rest = "without them the others wait for its session"
        why = f" ({self._voice.trouble}); {rest}" if released < len(entries) else ""
        say(f"{name} died without a goodbye: {what}{why}")


#: What no line may show: passwords, keys, tokens of the configuration.
_secrets: list[str] = []


def without_secrets(text: str) -> str:
    """The text as people and logs may see it: librdkafka names the URL that it asks for a token."""
    for secret in _secrets:
        text = text.replace(secret, "[hidden]")
    return text


def say(text: str) -> None:
    """One line for people, to where the worker's lines went."""
    text = without_secrets(text)
    try:
        os.write(2, f"kafka-marshal watchdog: {text}\n".encode())
    except OSError:
        return  # there is no reader any more


def report(kind: type[BaseException], error: BaseException, _: object) -> None:
    """What ends the program, in one line."""
    free = "The leases of a worker that dies now fall free after 2 heartbeat intervals, its pieces after its session"
    say(f"ends: {kind.__name__}: {error}. {free}")


def main(pipe: int, worker: int) -> None:
    """Leave the worker's family, then watch."""
    # A grandchild: the worker never has to reap us, nor does our end disturb what it knows of its children.
    if os.fork() > 0:
        os._exit(0)
    # A service manager sends this to all of its processes; we end when the worker has.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = report
    ExitWatch(pipe, worker).run()
    # Without Python's and librdkafka's leisurely ends: everything is answered for.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[-2]), int(sys.argv[-1]))
