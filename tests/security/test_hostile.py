"""Names from the log are shown without effect on a terminal, a page, a log, or a shell they are pasted into."""

from __future__ import annotations

import ast
import json
import logging
import re
import shlex
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer

from kafka_marshal.logs import log
from kafka_marshal.observe.problems import problems_of
from kafka_marshal.observe.rows import GroupRow
from kafka_marshal.secret import visible
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    Heartbeat,
    JoinGroup,
    Record,
    ReleaseGroup,
    encode,
    route_group,
    route_lease,
)
from tests.cli.harness import Command, Terminal
from tests.test_house_rules import MODULES, named, tree_of

#: E2 allows all but control characters in an id: this one affects a shell, a browser, rich, printf and a reader.
NASTY = "\u202e\u200b\u2028\u00a0'\"`$(reboot);<script>alert(1)</script>[red]{0}%s\\"
#: Must never reach a terminal unescaped.
UNSEEN = ("\u202e", "\u200b", "\u2028", "\u00a0", "\x1b]", "\x07", "\x9b")

GROUP, CLIENT, INSTANCE = f"g{NASTY}", f"c{NASTY}", f"i{NASTY}"
TEAM = f"team{NASTY}"
WHO = (INSTANCE, CLIENT, GROUP)


class Hostile(NamedTuple):
    """A coordination topic with records that E2 allows, and others."""

    bootstrap: str
    topic: str


@pytest.fixture
def hostile(coordination_topic: Any, topic_factory: Callable[..., str]) -> Iterator[Hostile]:
    bootstrap, topic = coordination_topic.bootstrap, coordination_topic.name
    data = topic_factory(1)
    producer = Producer({"bootstrap.servers": bootstrap})
    cps = len(producer.list_topics(topic).topics[topic].partitions)

    def append(record: Record | bytes, cp: int) -> None:
        producer.produce(topic, record if isinstance(record, bytes) else encode(record), b"", cp)

    lease = route_lease(data, 0, cps)
    append(ClaimingPartition(*WHO, data, 0, 60_000), lease)
    append(ClaimingPartition(f"2{INSTANCE}", f"2{CLIENT}", GROUP, data, 0, 60_000), lease)
    append(ClaimingPartition(*WHO, f"no{NASTY}", 0, 60_000), route_lease(f"no{NASTY}", 0, cps))
    append(Heartbeat(*WHO, data, 0, 2**40, 10**9), lease)
    append(b"\x1b]0;pwned\x07", lease)
    append(b"\x96\x01\x02\xa9\x1b]0;p\x07\x9b1m\xa1c\xa1g\xa1t", lease)
    append(ReleaseGroup(INSTANCE, CLIENT, f"paused{NASTY}", 2**60), lease)
    home = route_group(TEAM, cps)
    for cp in range(cps):
        append(ConfigureGroup(INSTANCE, CLIENT, TEAM, ()), cp)
    append(JoinGroup(INSTANCE, CLIENT, TEAM, "", 0, 60_000, "sticky", False, "", ((data, 1),)), home)
    entry = CommitEntry(data, 0, through=1, metadata=f"\x1b]0;m\x07{NASTY}")
    append(CommitOffsets(INSTANCE, CLIENT, TEAM, f"{TEAM}-x", 0, False, (entry,)), home)
    assert producer.flush(10) == 0
    yield Hostile(bootstrap, topic)


OFTEN = [
    ("status", "--members"),
    ("check",),
    ("group", TEAM),
    ("log",),
    ("evict", GROUP, f"no{NASTY}", "0", "--dry-run"),
    ("evict", TEAM, "--member", CLIENT, "--dry-run"),
    ("export-group", TEAM, "--dry-run"),
]
#: Other commands, which print with the same functions.
SELDOM = [
    ("status",),
    ("status", "--group", GROUP),
    ("lag",),
    ("groups",),
    ("group", GROUP),
    ("log", "--group", TEAM),
    ("who", GROUP, f"no{NASTY}", "0"),
    ("drain", GROUP, f"nobody{NASTY}"),
    ("release-group", GROUP, "--to", "earliest", "--dry-run"),
    ("release-group", f"paused{NASTY}", "--expires", "1s", "--yes"),
    ("forget-group", f"nobody{NASTY}", "--yes"),
    ("convert-group", GROUP, "--to", "coordinated", "--dry-run"),
    ("import-group", TEAM, "--dry-run"),
    ("skip", GROUP, f"no{NASTY}:0", "--dry-run"),
    ("upgrade", "--dry-run"),
    ("prune", "--dry-run"),
]


@pytest.mark.parametrize("commands", [OFTEN, pytest.param(SELDOM, marks=pytest.mark.campaign)], ids=["often", "seldom"])
def test_commands_show_names_and_do_nothing_else(
    hostile: Hostile, command: Command, commands: list[tuple[str, ...]]
) -> None:
    reach = ("--bootstrap", hostile.bootstrap, "--topic", hostile.topic, "--timeout", "5")
    for args in commands:
        ran = command(*args, *reach)
        assert ran.status in (0, 1, 2), (args, ran.err)
        assert "report it" not in ran.err, (args, ran.err)
        shown = ran.out + ran.err
        assert [each for each in UNSEEN if each in shown] == [], args
        if args[0] not in ("group", "log", "evict"):
            continue
        as_json = command(*args, "--json", *reach)
        assert [each for each in UNSEEN if each in as_json.out + as_json.err] == [], args
        for line in as_json.out.splitlines() if args[0] == "log" else [as_json.out] * bool(as_json.out.strip()):
            json.loads(line)


def test_a_terminal_gets_no_sequence_of_theirs(hostile: Hostile, terminal: Callable[..., Terminal]) -> None:
    reach = ("--bootstrap", hostile.bootstrap, "--topic", hostile.topic)
    shown = terminal("log", *reach, columns=200).finish().decode(errors="replace")
    assert "[red]{0}%s" in shown.replace("\r\n", "")
    assert [each for each in UNSEEN if each in shown] == []


def test_a_suggested_command_can_be_pasted() -> None:
    """A group's name that contains a command stays one word."""
    group = GroupRow("x; touch y", [], [], 0, [], "coordinated", state="READY")
    texts = [problem.text for problem in problems_of(group)]
    for text in texts:
        for suggested in re.findall(r"kafka-marshal \S+ (.*)", text):
            assert shlex.split(suggested)[0] == "x; touch y"


#: Calls that return shell words.
QUOTING = {"quote", "shlex.quote", "topic_option", "options.reach"}
#: Fixed words; and a topic that is being read, so that Kafka has checked its name.
SAFE = {"other", "to", "where", "topic"}
SUGGESTED = re.compile(r"kafka-marshal (?:[a-z]+-?)+ (?:[^.;:()]*)$")


def unquoted(node: ast.JoinedStr) -> Iterator[str]:
    """Names in a suggested command that would be several words to a shell if they contained a blank."""
    said = ""
    for part in node.values:
        if isinstance(part, ast.Constant):
            said += str(part.value)
        elif isinstance(part, ast.FormattedValue):
            value = part.value
            is_quoted = isinstance(value, ast.Call) and ast.unparse(value.func) in QUOTING
            if SUGGESTED.search(said) and not is_quoted and ast.unparse(value) not in SAFE and not said.endswith(":"):
                yield f"{said[-60:]}{{{ast.unparse(value)}}}"
            said += "X"


def is_format_of_names(node: ast.Call) -> bool:
    """Whether a log line's format contains a name, which may contain a %s."""
    is_log = isinstance(node.func, ast.Name | ast.Attribute) and ast.unparse(node.func).rpartition(".")[2] == "log"
    return is_log and len(node.args) > 3 and isinstance(node.args[2], ast.JoinedStr)


def test_names_in_suggested_commands_are_quoted_and_none_is_a_format() -> None:
    found = []
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                found += [f"{named(path)}:{node.lineno}: {each}" for each in unquoted(node)]
            elif isinstance(node, ast.Call) and is_format_of_names(node):
                found.append(f"{named(path)}:{node.lineno}: the format of a log line")
    assert found == [], "\n".join(found)


def test_a_log_line_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log(logging.WARNING, "x", "%s took %s from %r: %s, %d", CLIENT, GROUP, INSTANCE, ValueError("a\nb\x1b[2J"), 3)
    log(logging.WARNING, "x", f"{CLIENT} took it")
    one, other = (record.getMessage() for record in caplog.records)
    assert one.isprintable() and other.isprintable()
    assert one.endswith("a\\nb\\x1b[2J, 3")
    assert other == f"{visible(CLIENT)} took it"
