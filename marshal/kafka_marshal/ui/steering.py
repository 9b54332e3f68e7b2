"""Steering from the page: commands that change something, each in its own process.

Nothing here knows how to change a group. An action becomes a command line; its dry run is shown, and the user confirms
the same command without --dry-run.
"""

from __future__ import annotations

import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

ACTIONS: Final = ("pause", "resume", "reposition", "evict", "drain", "redrive", "discard", "redo")

#: An older dry run is outdated (s).
PLAN_LIVES_S: Final = 300.0

#: The longest time of a dry run (s).
DRY_RUN_S: Final = 60.0

#: The most lines of output of each job, and the most jobs.
MOST_LINES: Final = 200
MOST_JOBS: Final = 20


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value or len(value) > 255 or "\0" in value:
        raise ValueError(f"{name}: a text of 1 to 255 characters is wanted, not {value!r}. Nothing was changed.")
    return value


def _partition(body: Mapping[str, Any]) -> int:
    value = body.get("partition")
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"partition: a number is wanted, not {value!r}. Nothing was changed.")
    return value


def _message(body: Mapping[str, Any]) -> str:
    offset = body.get("offset")
    if type(offset) is not int or not 0 <= offset < 2**62:
        raise ValueError(f"offset: a number is wanted, not {offset!r}. Nothing was changed.")
    return f"{_text(body, 'topic')}:{_partition(body)}:{offset}"


def _places(body: Mapping[str, Any]) -> list[str]:
    """One partition, or all those of some topics."""
    if body.get("topic") is not None:
        return [f"{_text(body, 'topic')}:{_partition(body)}"]
    topics = body.get("topics")
    if not isinstance(topics, list) or not topics:
        raise ValueError(f"topics: a list of names is wanted, not {topics!r}. Nothing was changed.")
    return [_text({"topics": each}, "topics") for each in topics]


def words_of(action: str, body: Mapping[str, Any], *, dry_run: bool) -> list[str]:
    """The command's name, options and arguments for an action. Raises ValueError.

    Options have their values in the same word, and names come after `--`, so no name can become an option.
    """
    group = _text(body, "group")
    dry = ["--dry-run"] if dry_run else ["--yes"]
    force = ["--force"] if body.get("force") is True else []
    match action:
        case "pause":
            return ["release-group", *dry, f"--expires={_text(body, 'expires')}", "--", group]
        case "resume":
            return ["release-group", "--resume", *dry, "--", group]
        case "reposition":
            where = [f"--to={_text(body, 'to')}"]
            if body.get("topic") is not None:
                where.append(f"--partition={_text(body, 'topic')}:{_partition(body)}")
            return ["release-group", *dry, *force, *where, "--", group]
        case "evict" if body.get("member") is not None:
            return ["evict", *dry, *force, f"--member={_text(body, 'member')}", "--", group]
        case "evict":
            return ["evict", *dry, *force, "--", group, _text(body, "topic"), str(_partition(body))]
        case "drain":
            return ["drain", *(["--dry-run"] if dry_run else []), "--", group, _text(body, "member")]
        case "redrive":
            return ["redrive", *(["--dry-run"] if dry_run else []), "--", group, _message(body)]
        case "discard":
            return ["discard", *dry, "--", group, _message(body)]
        case "redo":
            key = [f"--key={_text(body, 'key')}"] if body.get("key") else []
            return ["redo", *dry, f"--time={_text(body, 'time')}", *key, "--", group, *_places(body)]
        case _:
            raise ValueError(f"there is no action {action!r}; there are {', '.join(ACTIONS)}. Nothing was changed.")


@dataclass(slots=True)
class CommandRun:
    """One confirmed command."""

    id: str
    action: str
    group: str
    command: str
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    #: The exit status; None: it runs.
    status: int | None = None

    def json(self) -> dict[str, object]:
        """The job as JSON."""
        return {
            "id": self.id,
            "action": self.action,
            "group": self.group,
            "command": self.command,
            "lines": list(self.lines),
            "status": self.status,
        }


class Steering:
    """Plans and jobs of one server. Any thread may call it."""

    def __init__(self, reach: Sequence[str]) -> None:
        """reach: the options with which the command reaches this log."""
        self._reach = list(reach)
        #: It permits steering, and is printed only where the server was started.
        self.token: str = secrets.token_urlsafe(24)
        self._plans: dict[str, tuple[float, str, dict[str, Any]]] = {}
        self.jobs: dict[str, CommandRun] = {}
        self._lock = threading.Lock()

    def allows(self, token: str) -> bool:
        """Whether this is the token."""
        return secrets.compare_digest(token.encode(), self.token.encode())

    def plan(self, action: str, body: Mapping[str, Any]) -> dict[str, object]:
        """The dry run of an action, and the plan's id to confirm it by (*blocking*). Raises ValueError."""
        wanted = dict(body)
        argv = words_of(action, wanted, dry_run=True)
        try:
            done = subprocess.run(
                self._argv(argv),
                capture_output=True,
                text=True,
                timeout=DRY_RUN_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"the dry run took longer than {DRY_RUN_S:g} s. Nothing was changed.") from None
        plan = secrets.token_urlsafe(12)
        now = time.monotonic()
        with self._lock:
            self._plans = {key: each for key, each in self._plans.items() if each[0] > now - PLAN_LIVES_S}
            if done.returncode == 0:
                self._plans[plan] = (now, action, wanted)
        return {
            "plan": plan if done.returncode == 0 else None,
            "command": self._shown(words_of(action, wanted, dry_run=False)),
            "status": done.returncode,
            "out": done.stdout,
            "err": done.stderr,
        }

    def run(self, plan: str) -> CommandRun:
        """Carry out what was planned, once. Raises ValueError."""
        with self._lock:
            found = self._plans.pop(plan, None)
        if found is None or found[0] < time.monotonic() - PLAN_LIVES_S:
            raise ValueError("this was not planned, was carried out already, or is too old: plan it again.")
        _, action, body = found
        argv = words_of(action, body, dry_run=False)
        paused = self._paused_by_us(body["group"]) if action == "resume" else None
        if paused is not None:  # our own pause: its command ends it, and cleans up
            paused.process.send_signal(signal.SIGINT)
            return paused
        process = subprocess.Popen(
            self._argv(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C at the server ends them in order, see `close`
        )
        job = CommandRun(plan, action, body["group"], self._shown(argv), process)
        with self._lock:
            self.jobs[job.id] = job
            for old in [each.id for each in self.jobs.values() if each.status is not None][:-MOST_JOBS]:
                del self.jobs[old]
        threading.Thread(target=self._hear, args=(job,), name=f"kafka-marshal-job-{job.id}", daemon=True).start()
        return job

    def close(self) -> None:
        """End running jobs as Ctrl-C does: pauses end, groups resume (*blocking*)."""
        running = [job for job in self.jobs.values() if job.status is None]
        for job in running:
            job.process.send_signal(signal.SIGINT)
        for job in running:
            try:
                job.process.wait(30)
            except subprocess.TimeoutExpired:
                job.process.kill()

    def _paused_by_us(self, group: str) -> CommandRun | None:
        found = [job for job in self.jobs.values() if job.action == "pause" and job.group == group]
        return next((job for job in found if job.status is None), None)

    def _argv(self, words: list[str]) -> list[str]:
        return [sys.executable, "-m", "kafka_marshal", words[0], *self._reach, *words[1:]]

    def _shown(self, words: list[str]) -> str:
        return shlex.join(["kafka-marshal", words[0], *self._reach, *words[1:]])

    @staticmethod
    def _hear(job: CommandRun) -> None:
        assert job.process.stdout is not None
        for line in job.process.stdout:
            job.lines.append(line.rstrip("\n"))
            del job.lines[:-MOST_LINES]
        job.status = job.process.wait()
