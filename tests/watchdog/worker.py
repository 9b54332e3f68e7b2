"""A worker with a watchdog that takes commands on stdin, one JSON line each, and answers on stdout.

It acts as a user's program does: through the public API and the operating system.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from kafka_marshal import Batches, ClaimedLease, Group, Keys, Marshal

arguments = json.loads(sys.argv[1])


def say(**what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


class LogToTest(logging.Handler):
    """Passes log lines to the test."""

    def emit(self, record: logging.LogRecord) -> None:
        say(log=record.getMessage())


logging.getLogger("kafka_marshal").addHandler(LogToTest())

marshal = Marshal(
    arguments["bootstrap"],
    group_id=arguments["group"],
    client_id=arguments["client_id"],
    topic=arguments["coordination"],
    heartbeat_interval=(arguments["hi"]) / 1000,
    config=arguments.get("config"),
    watchdog=True,
)
leases: dict[int, ClaimedLease] = {}


def consume() -> None:
    with marshal.consumer([arguments["topic"]]) as consumer:
        for _ in consumer:
            pass


def assign(wanted: dict[tuple[str, int], list[tuple[int, int]]]) -> None:
    """Work on these keys; prints the messages handled."""
    with marshal.consumer(mode=Keys(wanted)) as consumer:
        for message in consumer:
            say(handled=[message.partition(), message.offset()])


def share() -> None:
    """Share partitions by batches, and keep each batch; prints the messages delivered."""
    with marshal.consumer([arguments["topic"]], mode=Batches()) as consumer:
        kept = []
        for batch in consumer.batches():
            kept.append(batch)
            for message in batch:
                say(handled=[message.partition(), message.offset()])


def join(session_ms: int) -> None:
    """Join a coordinated group; prints the messages handled."""
    with marshal.consumer([arguments["topic"]], mode=Group(session_timeout=session_ms / 1000)) as consumer:
        for message in consumer:
            say(handled=[message.partition(), message.offset()])


def watchdog_fds() -> list[int]:
    """Our descriptors that are packet sockets: the connection to the watchdog."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    seqpacket = {line[6] for line in lines if line[4] == "0005"}
    links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)}
    return [fd for fd, link in links.items() if link.startswith("socket:[") and link[8:-1] in seqpacket]


def _exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def close_pipe(path: str) -> None:
    """Close the descriptor, as a daemon that closes all does, and reuse its number."""
    [fd] = watchdog_fds()
    os.close(fd)
    other = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(other, fd)


def fork(then: list[str]) -> int:
    """Fork a child that runs until it is killed, or that becomes another program."""
    child = os.fork()
    if child == 0:
        if then:
            os.execvp(then[0], then)
        while True:
            signal.pause()
    return child


def out_of_memory() -> None:
    """Let an allocation fail uncaught. (The kernel's OOM killer sends an ordinary SIGKILL.)"""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**24, size + 2**24))
    hoard = []
    while True:
        hoard.append(bytearray(2**20))


def do(what: str, value: Any) -> object:
    match what:
        case "claim":
            for partition in value:
                leases[partition] = marshal.claim(arguments["topic"], partition)
            return {str(partition): lease.epoch for partition, lease in leases.items()}
        case "release":
            leases.pop(value).release()
        case "assign":
            wanted = {(arguments["topic"], number): [tuple(span) for span in spans] for number, spans in value}
            threading.Thread(target=assign, args=[wanted], daemon=True).start()
        case "consume":
            threading.Thread(target=consume, daemon=True).start()
        case "share":
            threading.Thread(target=share, daemon=True).start()
        case "join":
            threading.Thread(target=join, args=[value], daemon=True).start()
        case "look":
            watchdog = marshal.watchdog
            assert watchdog is not None
            untold = len(watchdog.last_will.untold)
            told = len(watchdog.last_will.leases.keys() - watchdog.last_will.untold.keys())
            return {"pid": watchdog.pid, "ready": watchdog.is_ready, "untold": untold, "told": told}
        case "fork":
            return fork(value)
        case "spawn":
            return subprocess.Popen(value, close_fds=False).pid
        case "daemonise":
            if (child := os.fork()) > 0:
                say(done=child)
                os._exit(0)
            signal.pause()
        case "exec":
            os.execvp(value[0], value)
        case "close_pipe":
            close_pipe(value)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "exit":
            os._exit(3)
        case "raise":
            raise RuntimeError("a fault in the user's own code")
        case "out of memory":
            out_of_memory()
        case "close":
            marshal.close()
        case "terminate":
            marshal.terminate()
        case _:
            raise AssertionError(what)
    return None


for line in sys.stdin:
    (command, argument) = json.loads(line)
    say(done=do(command, argument))
