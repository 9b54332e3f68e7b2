"""Walks a page of the docs: writes its files and types its commands into one shell, in order.

    python -m tests.docs.walk docs/first-hour.md [--bootstrap HOST:PORT] [--python .venv/bin/python] [--rewrite]

A block of Python that begins with ``# file: NAME`` is written to that file. In a block of ``console`` each line that
begins with ``$`` is typed; the following lines are its output, except for numbers, durations and the width of columns.
A line ``…`` stands for any lines. Commands that only read are repeated until they show that output, as workers need
time. --rewrite writes the real output into the page, and the seconds of each step to standard error. Without
--bootstrap the page's own broker is started, and no names are replaced.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka.admin import AdminClient

from kafka_marshal.testing.layout import free_ports
from tests.cli.harness import Terminal

ROOT = Path(__file__).parents[2]

#: A fence: whether its output varies, its language, and its body.
FENCE = re.compile(r"^(<!-- varies: [^\n]*\n)?```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Commands that may be repeated until they show the page's output.
READS = re.compile(
    r"kafka-marshal (status|check|lag|groups?|who|log|dead-letters|open-messages|show)\b"
    r"|curl |tail |head |cat |grep |promtool "
)
PROMPT = "@ready@ "
#: Lines that start the page's broker: the walk already has one.
BROKER = ("kafka-marshal broker", "broker.log")
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
SPAN = re.compile(r"\b(?:over )?\d+(?:\.\d+)? (?:ms|s|min|h|d)\b(?: \d+ (?:ms|s|min|h)\b)?")
LIMIT_S = 60.0
#: Time between two commands while a page is written.
PACE_S = 3.0


@dataclass(frozen=True)
class Step:
    """A command, its output in the page, and the output's place in the text."""

    command: str
    shown: str
    #: Its output differs between runs, except the first line.
    varies: bool
    begin: int
    end: int


def steps(text: str) -> Iterator[Step]:
    """All commands of a page, in order."""
    for fence in FENCE.finditer(text):
        if fence[2] != "console":
            continue
        for found in re.finditer(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", fence[3], re.MULTILINE):
            at = fence.start(3)
            yield Step(found[1], found[2], bool(fence[1]), at + found.start(2), at + found.end(2))


def files(text: str) -> Iterator[tuple[str, str]]:
    """(name, content) of a page's files."""
    for fence in FENCE.finditer(text):
        if match := re.match(r"# file: (\S+)\n", fence[3]):
            yield match[1], fence[3]


def plain(text: str) -> list[str]:
    """Lines to compare, without what differs between runs, such as each worker's number of partitions."""
    lines: list[str] = []
    for line in text.splitlines():
        line = re.sub(r"admin-[\w-]+", "admin", line.replace("partitions", "partition"))
        # Other numbers vary between runs; a level and a release are facts.
        line = re.sub(r"(?<!level )(?<![\d.])\d[\d:T.,+Z-]*(?: \d[\d:T.,+Z-]*)*", "0", SPAN.sub("-", line))
        line = " ".join(re.sub(r"[ \t]*-{3,}[ \t]*", " - ", line).split())
        line = re.sub(r"0(?: 0)+", "0", line)
        said_by_the_shell = line.startswith(("[0]", "bash: "))
        if line and not said_by_the_shell and lines[-1:] != [line]:
            lines.append(line)
    return lines


def matches(step: Step, shown: str) -> bool:
    """Whether a page's output matches a terminal's."""
    if "grep -c" in step.command:  # it waits for that number of lines
        return shown.strip().isdigit() and int(shown) >= int(step.shown)
    if step.varies:
        return plain(step.shown)[:1] == plain(shown)[:1]
    pattern = "".join(r"(?:.*\n)*?" if line == "…" else f"{re.escape(line)}\n" for line in plain(step.shown))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in plain(shown))) is not None


class Walk:
    """A shell in a temporary folder, on a Kafka where the docs' topic names are replaced by unique ones."""

    def __init__(self, folder: Path, page: str, names: Mapping[str, str], python: str | None = None) -> None:
        self._names = names
        self._host = socket.gethostname()
        shim = folder / "bin"
        shim.mkdir()
        topic = names.get("__marshal", "__marshal")
        interpreter = python or sys.executable
        self._script(shim / "kafka-marshal", f'exec {interpreter} -m kafka_marshal --topic {topic} "$@"')
        self._script(shim / "python", f'exec {interpreter} "$@"')
        for name, content in files(page):
            (folder / name).write_text(self._here(content).replace("group_id=", f'topic="{topic}", group_id=', 1))
        self._shell = Terminal("--norc", "--noprofile", "--noediting", argv=["bash"], columns=100)
        paths = "" if python else os.pathsep.join((str(ROOT / "marshal"), str(ROOT)))
        self._type(f"stty -echo; cd {folder}; export PYTHONPATH={paths} NO_COLOR=1 PATH={shim}:$PATH; PS1='{PROMPT}'")

    @staticmethod
    def _script(path: Path, line: str) -> None:
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)

    def _here(self, text: str) -> str:
        for name, here in self._names.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", here, text)
        return text

    def _as_on_the_page(self, text: str) -> str:
        for name, here in self._names.items():
            text = text.replace(here, name)
        return text.replace(self._host, "host-a")

    def _type(self, line: str, answers: int = 0) -> str:
        """Type a line; returns the output until the next prompt."""
        before = len(self._shell.shown)
        self._shell.type(line.encode() + b"\n")
        for _ in range(answers):
            asked = len(self._shell.shown)
            self._shell.read_until(lambda shown, asked=asked: b"[y/N]" in shown[asked:], LIMIT_S)  # type: ignore[misc]
            time.sleep(0.2)  # what is typed before the question waits for its answer is dropped
            self._shell.type(b"y\n")
            self._shell.shown += b"y\r\n"  # not echoed
        self._shell.read_until(lambda shown: shown[before:].endswith(PROMPT.encode()), LIMIT_S)
        shown = re.sub(r" *\r?\n", "\n", ANSI.sub("", self._shell.shown[before:].decode(errors="replace")))
        return shown.removesuffix(PROMPT)

    def step(self, step: Step, *, compare: bool = True) -> str:
        """Type a command, repeated if it only reads until it shows the page's output; returns its last output."""
        if self._names and any(word in step.command for word in BROKER):
            return step.shown
        command, answers = self._here(step.command), step.shown.count("[y/N]")
        until = time.monotonic() + LIMIT_S
        while True:
            shown = self._as_on_the_page(self._type(command, answers))
            if not compare or matches(step, shown):
                return shown
            assert READS.match(step.command) and time.monotonic() < until, (
                f"$ {command}\nthe page shows:\n{step.shown}\nthe terminal shows:\n{shown}"
            )
            time.sleep(0.3)

    def close(self) -> None:
        """End the shell and everything that it started."""
        self._type("trap '' HUP; kill -9 $(jobs -p) 2>/dev/null; wait 2>/dev/null")
        self._shell.close()


def names_for_a_walk(bootstrap: str) -> dict[str, str]:
    """Names in the docs → unique names of the same length, so that tables fit."""
    names = {
        name: (uuid.uuid4().hex * 2)[: len(name)] for name in ("__marshal", "flights", "delays", "billing", "orders")
    }
    names = {name: f"t{here[1:]}" for name, here in names.items()} | {"127.0.0.1:9092": bootstrap}
    return names | dict(zip(("9401", "9402", "9090", "9450"), map(str, free_ports(4)), strict=True))


def remove_topics(bootstrap: str, names: Mapping[str, str]) -> None:
    """Remove all topics of a walk."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    there = admin.list_topics(timeout=10).topics
    ours = tuple(name for name in names.values() if not name[0].isdigit())
    wanted = [topic for topic in there if topic.startswith(ours)]
    for done in admin.delete_topics(wanted).values() if wanted else ():
        done.result(20)


def walk(
    page: Path,
    folder: Path,
    bootstrap: str | None,
    *,
    python: str | None = None,
    skip: Callable[[str], bool] = lambda command: False,
    rewrite: bool = False,
) -> str:
    """Walk a page; returns its text, with the real output if rewriting."""
    text = page.read_text(encoding="utf-8")
    names = names_for_a_walk(bootstrap) if bootstrap else {}
    walked = Walk(folder, text, names, python)
    new, at = "", 0
    try:
        for step in steps(text):
            if skip(step.command):
                continue
            if rewrite and READS.match(step.command):
                time.sleep(PACE_S)
            began = time.monotonic()
            shown = walked.step(step, compare=not rewrite)
            if rewrite:
                sys.stderr.write(f"{time.monotonic() - began:7.1f} s  {step.command}\n{shown}\n")
                new, at = new + text[at : step.begin] + shown, step.end
    finally:
        walked.close()
        if bootstrap:
            remove_topics(bootstrap, names)
    return new + text[at:]


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--bootstrap")
    parser.add_argument("--python")
    parser.add_argument("--rewrite", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="walk-"))
    shutil.copytree(ROOT / "docs" / "monitoring", folder, dirs_exist_ok=True)
    text = walk(options.page, folder, options.bootstrap, python=options.python, rewrite=options.rewrite)
    if options.rewrite:
        options.page.write_text(text, encoding="utf-8")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
