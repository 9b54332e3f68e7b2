"""The parent's side of :mod:`kafka_marshal.testing.supervisor`: named processes that end when this one does."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kafka_marshal.testing import supervisor
from kafka_marshal.testing.errors import LocalBrokerError


class Processes:
    """Processes started by a supervisor, which kills them and removes their folder when this process ends.

    Any thread may call any method; a forked child may call none.
    """

    def __init__(self, folder: Path, *, keep: bool) -> None:
        """Start the supervisor. folder exists; unless keep, it is removed at any end.

        Raises:
            LocalBrokerError: another supervisor uses the folder, or none could be started.
        """
        self._lock = threading.Lock()
        self._pending = b""
        self._pids: dict[str, int] = {}
        self._exits: dict[str, int] = {}
        self._failures: dict[str, str] = {}
        self._first_event: str | None = None
        program = [sys.executable, "-I", "-S", supervisor.__file__]
        self._supervisor = subprocess.Popen(
            [*program, str(os.getpid()), str(folder), "keep" if keep else "remove"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C must not reach it
        )
        self._wait(lambda: self._first_event is not None, 30.0)
        first_event = self._answer()
        if first_event != "ready":
            reason = "another broker is using it" if first_event == "locked" else "its supervisor did not start"
            self.end()
            raise LocalBrokerError(
                f"A local Kafka can't run in {folder}: {reason}. Its data is as it was. Stop the other one, or name "
                "another folder."
            )

    def start(self, name: str, argv: Sequence[str], log: Path) -> None:
        """Start a process; its output is appended to log.

        Raises:
            LocalBrokerError: the system could not start it.
        """
        with self._lock:
            self._pids.pop(name, None)
            self._exits.pop(name, None)
            self._failures.pop(name, None)
        self._ask({"do": "start", "name": name, "argv": list(argv), "log": str(log)})
        if not self._wait(lambda: name in self._pids or name in self._failures, 30.0):
            raise LocalBrokerError(f"The supervisor did not start {argv[0]} within 30 s. Nothing runs.")
        if name in self._failures:
            raise LocalBrokerError(f"Could not start {argv[0]}: {self._failures[name]}. Nothing runs.")

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process, if it still runs."""
        self._ask({"do": "signal", "name": name, "signal": int(number)})

    def exit_status(self, name: str, timeout_s: float = 0.0) -> int | None:
        """Wait up to timeout_s for a process to end; returns its status (minus the signal that killed it) or None."""
        self._wait(lambda: name in self._exits, timeout_s)
        return self._exits.get(name)

    def pid(self, name: str) -> int:
        """The latest process id of name."""
        return self._pids[name]

    def end(self, grace_s: float = 0.0) -> None:
        """Kill everything (after grace_s seconds for a clean end), remove the folder unless it is kept, and wait."""
        assert self._supervisor.stdin is not None
        if self._supervisor.stdin.closed:
            return
        try:
            self._ask({"do": "end", "grace_s": grace_s})
        except LocalBrokerError:
            pass  # it has already ended, and its processes with it
        finally:
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(grace_s + 30.0)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        assert self._supervisor.stdout is not None
        self._supervisor.stdout.close()

    def _answer(self) -> str | None:
        return self._first_event

    def _ask(self, request: dict[str, object]) -> None:
        assert self._supervisor.stdin is not None
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                self._supervisor.stdin.write(line)
                self._supervisor.stdin.flush()
            except (OSError, ValueError) as error:
                raise LocalBrokerError(
                    "The supervisor of the local Kafka is gone, and its brokers with it. Start a new one."
                ) from error

    def _wait(self, met: Callable[[], bool], timeout_s: float) -> bool:
        """Read events until met() or the time-out."""
        until = time.monotonic() + timeout_s
        assert self._supervisor.stdout is not None
        stdout = self._supervisor.stdout
        while True:
            with self._lock:
                if stdout.closed:
                    return met()
                # Short slices, so that threads waiting for different events take turns.
                left = max(0.0, min(until - time.monotonic(), 0.05)) if not met() else 0.0
                if select.select([stdout], [], [], left)[0] and not self._take_in(stdout.fileno()):
                    return met()
                if met():
                    return True
            if time.monotonic() >= until:
                return False

    def _take_in(self, fd: int) -> bool:
        """Read available events; False if the supervisor has ended."""
        chunk = os.read(fd, 65536)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            event = json.loads(line)
            kind, name = event["event"], event.get("name")
            if kind == "started":
                self._pids[name] = event["pid"]
            elif kind == "exited":
                self._exits[name] = event["status"]
            elif kind == "failed":
                self._failures[name] = event["error"]
            else:
                self._first_event = kind
        return bool(chunk)
