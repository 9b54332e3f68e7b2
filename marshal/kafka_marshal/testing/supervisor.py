"""Runs a local cluster's processes, and ends them when its parent ends in any way.

This file runs as a program (standard library only, without its package). It reads its standard input, a pipe whose
other end only its parent holds: when the parent ends, even by kill -9, the pipe closes, and everything started here is
killed and the data removed. (PR_SET_PDEATHSIG alone is not enough: it fires when the *thread* that forked ends.) It
also checks whether it was reparented, as a forked sibling may hold a copy of the pipe.

Lines of JSON in: ``{"do": "start", "name", "argv", "log"}``, ``{"do": "signal", "name", "signal"}``,
``{"do": "end", "grace_s"}``. Lines out: ``{"event": "ready" | "locked"}`` first, then ``{"event": "started",
"name", "pid"}``, ``{"event": "failed", "name", "error"}``, ``{"event": "exited", "name", "status"}``.

Arguments: the parent's process id, the cluster's folder, "keep" or "remove".
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Interval of checks of parent and children when nothing else wakes us.
LOOK_EVERY_S = 0.5
#: Time for brokers with kept data to close it cleanly after the parent has ended.
ORPHAN_GRACE_S = 10.0
#: Held while the supervisor runs: distinguishes a folder in use from one left behind.
LOCK_FILE = ".supervisor.lock"

_PR_SET_PDEATHSIG = 1


class Supervisor:
    """The processes of one cluster, by name."""

    def __init__(self, folder: Path, keep: bool) -> None:
        self.folder = folder
        self.keep = keep
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.grace_s: float = ORPHAN_GRACE_S if keep else 0.0

    def obey(self, request: dict[str, Any]) -> bool:
        """Start or signal one process; False on a request to end."""
        if request["do"] == "end":
            self.grace_s = request["grace_s"]
            return False
        name = request["name"]
        if request["do"] == "start":
            try:
                with open(request["log"], "ab") as log:
                    child = subprocess.Popen(
                        request["argv"],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        cwd=self.folder,
                        preexec_fn=die_with_parent,
                    )
            except (OSError, subprocess.SubprocessError) as error:
                tell({"event": "failed", "name": name, "error": str(error)})
                return True
            self.children[name] = child
            tell({"event": "started", "name": name, "pid": child.pid})
        elif name in self.children:
            # Not reaped yet, so that no other process can have its id.
            self.children[name].send_signal(request["signal"])
        return True

    def reap(self) -> None:
        """Report ended children."""
        for name, child in list(self.children.items()):
            status = child.poll()
            if status is not None:
                del self.children[name]
                tell({"event": "exited", "name": name, "status": status})

    def end(self) -> None:
        """Kill what still runs, at once or after its grace time; remove the data unless it is kept."""
        if self.grace_s > 0:
            for child in self.children.values():
                child.send_signal(signal.SIGCONT)
                child.terminate()
            until = time.monotonic() + self.grace_s
            while time.monotonic() < until and any(child.poll() is None for child in self.children.values()):
                time.sleep(0.02)
        for child in self.children.values():
            child.kill()
        for child in self.children.values():
            child.wait()
        if not self.keep:
            shutil.rmtree(self.folder, ignore_errors=True)


def tell(event: dict[str, Any]) -> None:
    """Send an event to the parent, if it still reads."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")


def serve(parent: int, wake: int, reap: Callable[[], None], obey: Callable[[dict[str, Any]], bool]) -> None:
    """Process lines of standard input until obey returns False or the parent has ended.

    reap: called whenever a child may have ended; wake: see `wake_on_exit`.
    """
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while os.getppid() == parent:
            ready = {key.fd for key, _ in selector.select(LOOK_EVERY_S)}
            if wake in ready:
                os.read(wake, 4096)
            reap()
            if sys.stdin.fileno() not in ready:
                continue
            chunk = os.read(sys.stdin.fileno(), 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            if not all(obey(json.loads(line)) for line in lines):
                return


def wake_on_exit() -> int:
    """A pipe that becomes readable when a child has ended."""
    wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


def die_with_parent() -> None:
    """In a child: be killed when the process that forked it ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    """Run until the parent asks for the end or has ended."""
    parent, folder, fate = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    # Ctrl-C in a terminal is for the parent, which ends us. (We also lead another session.)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    with open(folder / LOCK_FILE, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell({"event": "locked"})
            return 1
        wake = wake_on_exit()
        supervisor = Supervisor(folder, fate == "keep")
        signal.signal(signal.SIGTERM, _leave)
        tell({"event": "ready"})
        try:
            serve(parent, wake, supervisor.reap, supervisor.obey)
        except _Leave:
            pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            supervisor.end()
    return 0


class _Leave(Exception):  # noqa: N818 - not an error
    """SIGTERM: end in order."""


def _leave(*_: object) -> None:
    raise _Leave


if __name__ == "__main__":
    sys.exit(main())
