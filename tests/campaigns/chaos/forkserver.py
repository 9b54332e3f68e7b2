"""Starts workers by fork, with everything imported: in a tenth of a second instead of one.

``python -m tests.campaigns.chaos.forkserver LOG MODULE``, where MODULE has ``Job`` and ``run``. It has one thread and
no connection, so that its children may make their own. Lines of JSON in: ``{"spawn": {…a Job}}``, ``{"signal": number,
"pid": pid}``. Out: ``{"ready": true}``, then ``{"started": client_id, "pid"}``, ``{"exited": pid, "status"}`` (minus
the signal that killed it). When its standard input closes, because its parent has ended or closed it, it kills what
still runs and ends; its children end with it, too.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.testing import supervisor

#: Imported before the first fork.
_WARM = KafkaCluster


def _spawn(job: Any, run: Callable[[Any], int], log: Path) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        supervisor.die_with_parent()
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


class _ForkServer:
    def __init__(self, log: Path, module: Any) -> None:
        self.log = log
        self.module = module
        self.children: set[int] = set()

    def obey(self, request: dict[str, object]) -> bool:
        """Start or signal a worker. A signal to an ended one has no effect."""
        match request:
            case {"spawn": dict() as job}:
                pid = _spawn(self.module.Job(**job), self.module.run, self.log)
                self.children.add(pid)
                supervisor.tell({"started": job["client_id"], "pid": pid})
            case {"signal": int() as number, "pid": int() as pid} if pid in self.children:
                os.kill(pid, number)
        return True

    def reap(self) -> None:
        """Report ended workers."""
        for pid in list(self.children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.children.discard(pid)
                supervisor.tell({"exited": pid, "status": os.waitstatus_to_exitcode(status)})

    def end(self) -> None:
        """Kill what still runs."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main() -> int:
    """Run the fork server; returns its exit status."""
    parent = os.getppid()
    wake = supervisor.wake_on_exit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent
    server = _ForkServer(Path(sys.argv[1]), importlib.import_module(sys.argv[2]))
    gc.collect()
    gc.freeze()  # so that a child's garbage collector does not copy pages that it never uses
    try:
        supervisor.tell({"ready": True})
        supervisor.serve(parent, wake, server.reap, server.obey)
    finally:
        server.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
