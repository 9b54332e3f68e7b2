"""Starts workers by fork, with everything imported: a tenth of a second and not a whole one for each.

``python -m tests.campaigns.chaos.forkserver LOG``; it has one thread and no connection, so that its children may make
their own. Lines of JSON in: ``{"spawn": {…a Job}}``, ``{"signal": number, "pid": pid}``. Out: ``{"started": client_id,
"pid"}``, ``{"exited": pid, "status"}`` (minus the signal that killed it). When its standard input closes, because its
parent is gone or has closed it, it kills what still runs and ends; its children end with it, too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import selectors
import signal
import sys
from pathlib import Path

from kafka_marshal.adapters.kafka import KafkaCluster
from tests.campaigns.chaos.worker import Job, run

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1

#: Loaded before the first fork.
_WARM = KafkaCluster


def _tell(**event: object) -> None:
    os.write(1, json.dumps(event).encode() + b"\n")


def _spawn(job: Job, log: Path, libc: ctypes.CDLL) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        nothing = os.open(os.devnull, os.O_RDWR)
        lines = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(nothing, 0)
        os.dup2(lines, 1)
        os.dup2(lines, 2)
        logging.basicConfig(
            level=logging.WARNING,
            format=f"%(asctime)s {job.client_id} {os.getpid()} %(levelname)s %(message)s",
            force=True,
        )
        status = run(job)
    finally:
        os._exit(status)


class _Zygote:
    def __init__(self, log: Path) -> None:
        self.log = log
        self.children: set[int] = set()
        self.libc = ctypes.CDLL(None, use_errno=True)

    def serve(self, wake: int) -> None:
        """Until standard input closes."""
        pending = b""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select()}
                if wake in ready:
                    os.read(wake, 4096)
                self.reap()
                if 0 in ready:
                    chunk = os.read(0, 65536)
                    if not chunk:
                        return
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        self.obey(json.loads(line))

    def obey(self, request: dict[str, object]) -> None:
        """Start or signal a worker. A signal to one that is gone goes nowhere."""
        match request:
            case {"spawn": dict() as job}:
                pid = _spawn(Job(**job), self.log, self.libc)
                self.children.add(pid)
                _tell(started=job["client_id"], pid=pid)
            case {"signal": int() as number, "pid": int() as pid} if pid in self.children:
                os.kill(pid, number)

    def reap(self) -> None:
        """Tell of those that have ended."""
        for pid in list(self.children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.children.discard(pid)
                _tell(exited=pid, status=os.waitstatus_to_exitcode(status))

    def end(self) -> None:
        """Kill what still runs."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> int:
    """The process, from its first line to its exit status."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the parent
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    zygote = _Zygote(Path(sys.argv[1]))
    gc.collect()
    gc.freeze()  # so that a child's collector does not copy the pages of what it never looks at
    try:
        zygote.serve(reader)
    finally:
        zygote.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
