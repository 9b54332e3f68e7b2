"""The parent of worker processes: starts them, restarts those that die, ends them in time, and answers for all."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Lock, Thread, current_thread, main_thread
from typing import IO, Any

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.metrics.server import Response, Server
from kafka_marshal.runner.child import formatter
from kafka_marshal.runner.settings import WorkerSettings
from kafka_marshal.secret import visible

#: The first and the longest wait before a restart, and after how long a process counts as healthy (s).
FIRST_S, LONGEST_S, HEALTHY_S = 0.5, 30.0, 60.0
#: How often the parent checks all (s); a member that reports nothing during this many checks is replaced.
LOOK_S, MOST_SILENT = 0.1, 600
#: How long a process may take for an answer, and for close() after its handlers have ended (s).
ANSWER_S, GOODBYE_S = 2.0, 10.0

_PROGRAM = "import sys; from kafka_marshal.runner.child import main; sys.exit(main())"
_CLEAR = "\r\x1b[K"


class Child:
    """One name, and the process that has it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        #: What the process reported last.
        self.facts: dict[str, Any] = {}
        self.starts: int = 0
        #: When it is started (monotonic), and by when it has to end.
        self.due: float = 0.0
        self.end_by: float = math.inf
        self._wait, self._begun, self._silent = FIRST_S, 0.0, 0
        self._reader = Thread()

    def start(self, packed: bytes, say: Callable[[str], None]) -> None:
        """Start the process. Raises OSError."""
        self._begun, self.end_by, self._silent, self.facts = time.monotonic(), math.inf, 0, {}
        ours, theirs = socket.socketpair()
        lines, output = map(os.fdopen, os.pipe(), ("rb", "wb"))
        argv = [sys.executable, "-c", _PROGRAM, self.name]
        passed = theirs.fileno(), lines.fileno()
        with theirs, output:  # in another session: Ctrl-C reaches the parent alone
            self.process = subprocess.Popen(
                [*argv, *map(str, passed)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=passed,
                start_new_session=True,
            )
        self.starts += 1
        self._reader = Thread(target=self._read_facts, args=(ours, self.facts), daemon=True)
        self._reader.start()
        Thread(target=_read_lines, args=(lines, say), daemon=True).start()
        with suppress(OSError):  # it has died: see ended()
            ours.sendall(packed)

    def _read_facts(self, process: socket.socket, facts: dict[str, Any]) -> None:
        with process, suppress(OSError, ValueError):  # it was killed, perhaps within a line
            for line in process.makefile():
                facts.update(json.loads(line))
                self._silent = 0

    def postpone(self) -> None:
        """Set when the next start is due: later each time, unless the last process lived long."""
        if time.monotonic() - self._begun >= HEALTHY_S:
            self._wait = FIRST_S
        self.due, self._wait = time.monotonic() + self._wait, min(2 * self._wait, LONGEST_S)

    def ended(self) -> int | None:
        """The status of a process that has ended since the last call; its facts stay until the next start."""
        if self.process is None or (status := self.process.poll()) is None:
            return None
        self._reader.join(ANSWER_S)  # what it said last
        self.process = None
        self.postpone()
        return status

    def end(self, within_s: float) -> None:
        """Ask the process to drain."""
        self.end_by = min(self.end_by, time.monotonic() + within_s)
        if self.process is not None:
            self.process.terminate()

    def checked(self) -> str:
        """Called every LOOK_S: why only another process helps; "": it works, starts, or ends already."""
        self._silent += 1
        if self.end_by < math.inf or "live" not in self.facts:
            return ""
        if not self.facts["live"]:
            return str(self.facts["text"])
        return f"it has said nothing for {MOST_SILENT * LOOK_S:.0f} s" if self._silent >= MOST_SILENT else ""

    @property
    def ready(self) -> bool:
        """Whether its member is ready."""
        return self.process is not None and bool(self.facts.get("ready"))

    def __str__(self) -> str:
        if self.process is None or "live" not in self.facts:
            return f"{self.name}: start {self.starts}"
        return f"{self.name}: {'ready' if self.ready else 'not ready'}; {self.facts['text']}"

    def get(self, path: str) -> Response | None:
        """What the process answers; None: nothing."""
        if self.process is None or "port" not in self.facts:
            return None
        connection = HTTPConnection("127.0.0.1", self.facts["port"], timeout=ANSWER_S)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return Response(HTTPStatus(answer.status), answer.read(), answer.headers["Content-Type"])
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()


def _read_lines(lines: IO[bytes], say: Callable[[str], None]) -> None:
    with lines:
        for line in lines:
            say(line.decode(errors="backslashreplace").rstrip("\n"))


def merged(pages: Iterable[str]) -> str:
    """One exposition of several: each family once. (The label ``client`` is another in each.)"""
    families: dict[str, dict[str, None]] = {}
    for page in pages:
        family = ""
        for line in page.splitlines():
            family = line.split(" ", 3)[2] if line.startswith("# ") else family
            families.setdefault(family, {})[line] = None
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


class Parent:
    """All processes of one Worker."""

    def __init__(self, worker: WorkerSettings) -> None:
        self.worker = worker
        self.children: list[Child] = [Child(name) for name in worker.members]
        self._limit = worker.drain + GOODBYE_S
        self._shown = sys.stdout.isatty() and not worker.json_logs
        self._packed = pickle.dumps((sys.path, worker.packed(), self._shown, worker.json_logs))
        self._formatter = formatter(worker.json_logs)
        self._print = Lock()
        #: Signals that have come. If the reader of standard output is gone, it ends as by one.
        self._signals: list[int] = []
        #: Whether a process was ever a member.
        self._has_worked = False
        self._looked = time.monotonic()
        self._done = math.nan

    # What it says.

    def say(self, name: str, text: str) -> None:
        """A line of the one log, on standard output."""
        if self.worker.json_logs:
            found: object = None
            with suppress(ValueError):
                found = json.loads(text)
            if not isinstance(found, dict):
                found = {"time": int(time.time() * 1000), "level": "INFO", "event": "output", "text": text}
            self._write(f"{json.dumps({'process': name, **found})}\n")
        else:
            self._write(f"{_CLEAR if self._shown else ''}{name} | {visible(text)}\n")

    def log(self, level: int, event: str, text: str) -> None:
        """A line of the parent."""
        found = {"levelno": level, "levelname": logging.getLevelName(level), "msg": text, "event": event}
        self.say(self.worker.name, self._formatter.format(logging.makeLogRecord(found)))

    def _write(self, text: str) -> None:
        with self._print:
            try:
                sys.stdout.write(text)
                sys.stdout.flush()
            except (OSError, ValueError):
                self._signals += [] if self._signals else [signal.SIGPIPE]

    # What it answers.

    def answer(self, path: str, _accept: str) -> Response | None:
        """The pages of a Marshal, of all processes; None: there is no such page."""
        if path in ("/livez", "/readyz"):  # a process that dies is replaced here: it makes the whole not ready
            is_live = time.monotonic() - self._looked < MOST_SILENT * LOOK_S
            well = is_live if path == "/livez" else all(child.ready for child in self.children)
            text = "".join(f"{child}\n" for child in self.children)
            return Response(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, text.encode())
        if path not in ("/metrics", "/lag"):
            return None
        found = (page for child in self.children if (page := child.get(path)) is not None)
        if path == "/lag":  # of the group: any member knows it
            return next(found, Response(HTTPStatus.SERVICE_UNAVAILABLE, b"no process answers\n"))
        pages = list(found)
        wrong = next((page for page in pages if page.status != HTTPStatus.OK), None)
        return wrong or Response(HTTPStatus.OK, merged(page.body.decode() for page in pages).encode())

    # What it does.

    def run(self) -> int:
        """Until SIGTERM or SIGINT, or until no process can ever work; returns the exit status (*blocking*)."""
        port, host = self.worker.port, self.worker.host
        with suppress(AttributeError):  # what it can't encode must not end it
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        server = None if port is None else Server(port, host, self.answer, "Nothing was started")
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lambda got, _: self._signals.append(got)) for number in numbers}
        try:
            if server is not None:
                self.log(logging.INFO, "serving", f"metrics and probes of all processes: {server.url}")
            status = self._watch()
        finally:
            drained = self._end()
            if server is not None:
                server.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return 141 if signal.SIGPIPE in self._signals else status or drained

    def _watch(self) -> int:
        changed, looks = _changed_at() if self.worker.reload else 0.0, 0
        while not self._signals:
            self._looked, looks = time.monotonic(), looks + 1
            for child in self.children:
                if status := self._look_after(child):
                    return status
            if self._shown and looks % 10 == 0:
                self._show_progress(10 * LOOK_S)
            if self.worker.reload and looks % 5 == 0 and (now := _changed_at()) != changed:
                changed = now
                self.log(logging.INFO, "reload", "a file has changed: all processes start again")
                for child in self.children:
                    child.due = 0.0
                    child.end(self._limit)
            time.sleep(LOOK_S)
        return 0

    def _look_after(self, child: Child) -> int:
        """Start, replace or kill a process, as it is due; an exit status if no process can ever work."""
        if child.process is None:
            if time.monotonic() >= child.due:
                try:
                    child.start(self._packed, partial(self.say, child.name))
                except OSError as error:
                    child.postpone()
                    self.log(logging.WARNING, "process_not_started", f"{child.name} can't be started: {error}")
            return 0
        is_planned = child.end_by < math.inf
        if (status := child.ended()) is None:
            self._has_worked = self._has_worked or "live" in child.facts
            if fault := child.checked():
                text = f"{child.name} is ended and started again, as only that helps: {fault}"
                self.log(logging.WARNING, "process_replaced", text)
                child.end(self._limit)
            self._kill_late(child)
        elif "refused" in child.facts:
            return self._refused(child)
        elif is_planned:
            child.due = 0.0 if self.worker.reload else child.due
        else:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            wait = f"it is started again in {max(0.0, child.due - time.monotonic()):.1f} s"
            text = f"{child.name} has ended ({how}). What was in flight comes again; {wait}"
            self.log(logging.WARNING, "process_ended", text)
        return 0

    def _refused(self, child: Child) -> int:
        """A process can't work: the exit status, or 0 if it may work later."""
        status, then = int(child.facts["status"]), "Nor could another process: all are ended"
        if self.worker.reload:
            status, child.due, then = 0, math.inf, "It is started again when a file changes"
        elif self._has_worked and child.facts["importing"]:
            status, then = 0, "It is started again, as others could work before"
        text = f"{child.name} can't work: {child.facts['refused']}. {then}"
        self.log(logging.ERROR, "process_refused", text)
        return status

    def _kill_late(self, child: Child) -> None:
        if child.process is not None and time.monotonic() >= child.end_by:
            text = f"{child.name} has not ended in time and is killed: what was in flight comes again"
            self.log(logging.WARNING, "process_killed", text)
            child.process.kill()
            child.process.wait()

    def _end(self) -> int:
        """Drain all within the limit; kill what is left, at once at a second signal. 1: not all ended well."""
        worst, before = 0, max(len(self._signals), 1)
        for child in self.children:
            child.end(self._limit)
        while any(child.process is not None for child in self.children):
            for child in self.children:
                if len(self._signals) > before:
                    child.end_by = 0.0
                self._kill_late(child)
                worst = 1 if child.ended() not in (None, 0, -signal.SIGTERM) else worst  # by it: not begun yet
            time.sleep(LOOK_S / 2)
        return worst

    def _show_progress(self, seconds: float) -> None:
        """One line at the bottom of a terminal."""
        facts = [child.facts for child in self.children if child.process is not None]
        before, self._done = self._done, sum(each.get("done", 0) for each in facts)
        rate = max(0.0, (self._done - before) / seconds)
        lag, restarts = sum(each.get("lag", 0) for each in facts), sum(child.starts - 1 for child in self.children)
        ready = f"{sum(child.ready for child in self.children)} of {len(self.children)} ready"
        self._write(f"{_CLEAR}{ready}, {rate:,.0f} messages/s, lag {lag:,}, {restarts} restarts")


def _changed_at() -> float:
    """When a Python file below the current folder was changed last (hidden folders and environments aside)."""
    newest = 0.0
    for folder, folders, files in os.walk("."):
        folders[:] = [name for name in folders if not name.startswith((".", "__")) and name != "site-packages"]
        for name in files:
            with suppress(OSError):
                newest = max(newest, Path(folder, name).stat().st_mtime) if name.endswith(".py") else newest
    return newest


@dataclass(frozen=True, kw_only=True)
class Worker(WorkerSettings):
    """Processes that work in a group with one handler; ``run()`` starts them, and returns when all have ended.

    ``handler``: a function at the top of a module, or ``"module:name"``. A coroutine function is awaited.

    ``name``: the members are NAME-1 … NAME-N, also after restarts, so that they take over what they held. Default: the
    name of this machine. It is unique in the group: two Workers of a group on one machine need different names.

    ``processes``, ``concurrency``: how many processes, and how many handlers at a time in each.

    ``drain`` (seconds): what handlers have to return after SIGTERM; what has not ended then is killed, and comes again.

    ``marshal``, ``consumer``, ``settings``: more arguments of ``Marshal``, of ``Marshal.consumer`` and of its ``run``.

    ``watchdog``: None: on, if this system supports it.

    ``port``, ``host``: serve ``/metrics``, ``/livez``, ``/readyz`` and ``/lag`` of all processes there.

    ``json_logs``: log as JSON. ``reload``: for development, start again when a Python file in this folder changes.
    """

    def run(self) -> int:
        """Start the processes, and restart those that die, until SIGTERM or Ctrl-C (*blocking*, in the main thread).

        Returns the exit status: 0 if all has ended in time, else what docs/running.md says. Raises ConfigurationError.
        """
        self.check()
        if current_thread() is not main_thread():
            raise ConfigurationError("Worker.run() needs the main thread, which gets signals. Nothing was started")
        return Parent(self).run()
