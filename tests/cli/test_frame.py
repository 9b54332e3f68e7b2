"""Common to all commands: options before and after their name, exit codes, errors without tracebacks, completion."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
import pytest

from kafka_marshal.cli import app, change, failures
from kafka_marshal.cli.change import carry_out
from kafka_marshal.cli.connection import name_the_topic
from kafka_marshal.cli.failures import DONE, NO
from kafka_marshal.cli.options import Options, PartitionTarget, parsed, read_properties
from kafka_marshal.cli.output import fields_of
from kafka_marshal.errors import (
    AdminError,
    AuthenticationError,
    ConfigurationError,
    KafkaUnavailableError,
    TopicMissingError,
)
from kafka_marshal.observe.problems import problems_of
from kafka_marshal.observe.rows import GroupRow, LeaseRow, WorkerRow
from kafka_marshal.observe.text import near
from kafka_marshal.observe.view import why_no_share
from rationalizer import ClaimingPartition
from rationalizer.dump import DumpError
from rationalizer.groups.group import Group, Member, Settings
from tests.cli.harness import ARGV, Command, Log, Terminal, process

#: Nothing listens here.
NOWHERE = "127.0.0.1:1"


@pytest.mark.parametrize("name", app.COMMANDS)
def test_every_command_of_the_list_is_there_and_helps(command: Command, name: str) -> None:
    ran = command(name, "--help")
    assert (ran.status, ran.err) == (0, "")
    assert f"kafka-marshal {name}" in ran.out
    assert "--bootstrap" in ran.out
    found = app.root.get_command(click.Context(app.root), name)
    assert found is not None
    assert found.help


def test_no_two_options_of_a_command_share_a_name(command: Command) -> None:
    for name in app.COMMANDS:
        found = app.root.get_command(click.Context(app.root), name)
        assert found is not None
        names = [opt for param in found.params for opt in param.opts]
        assert len(names) == len(set(names)), name


def test_help_does_not_load_the_kafka_client() -> None:
    code = (
        "import sys; from kafka_marshal.cli import main; "
        "codes = [main([*a, '--help']) for a in ([], ['status'], ['lag'], ['log'], ['who'], ['release-group'])]; "
        "print(sum(codes), 'confluent_kafka' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert done.stderr.split() == [b"0", b"False"]


def test_alone_it_prints_its_help(command: Command) -> None:
    ran = command()
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == command("--help").out
    assert ran.out.startswith("Usage: kafka-marshal")


def test_the_version(command: Command) -> None:
    ran = command("--version")
    assert ran.status == 0
    assert ran.out.startswith("kafka-marshal, version ")


def test_an_unknown_command_suggests_one(command: Command) -> None:
    ran = command("replya")
    assert ran.status == 2
    assert "Did you mean 'replay'" in ran.err
    assert command("\x1b[31m").err.count("\x1b") == 0


@pytest.mark.parametrize(
    "args",
    [
        ["replay"],
        ["--nonsense"],
        ["replay", "x", "--nonsense"],
        ["status", "--timeout", "soon"],
        ["status", "--timeout", "0"],
        ["who", "g", "t", "minus"],
        ["who", "g", "t", "-1"],
        ["who", "g", "t", "0", "--at", "then", "--bootstrap", NOWHERE],
        ["who", "g", "t", "0", "--at", "now", "--offset", "3", "--bootstrap", NOWHERE],
        ["who", "g", "t", "0", "--at", "2999-01-01", "--bootstrap", NOWHERE],
        ["release-group", "g", "--to", "2999-01-01", "--bootstrap", NOWHERE],
        ["release-group", "g", "--partition", "t:0=2999-01-01", "--bootstrap", NOWHERE],
        ["log", "--follow", "--from-dump", "x"],
        ["release-group", "g", "--to", "sideways"],
        ["release-group", "g", "--partition", "t:x=1"],
        ["release-group", "g", "--partition", "t:1"],
        ["release-group", "g", "--resume", "--to", "latest"],
        ["release-group", "g", "--resume", "--dry-run", "--partition", "t:1=2"],
        ["ui", "--allow-steering", "--dump", __file__],
        ["ui", "--dump", "/nowhere/at/all"],
        ["ui", "--port", "70000"],
        ["completion", "powershell"],
        ["completion"],
        ["broker", "--brokers", "2"],
        ["status", "--config", "/nowhere/at/all"],
    ],
)
def test_wrong_use_ends_with_2_and_says_what_is_wrong(command: Command, args: list[str]) -> None:
    ran = command(*args)
    assert ran.status == 2
    assert ran.err.partition("\n")[2 if ran.err.startswith("--at") else 0].startswith("error: ")
    assert "Traceback" not in ran.err
    assert "\\n" not in ran.err
    assert ran.out == ""


def test_no_kafka_named_is_wrong_use_and_names_the_ways(command: Command) -> None:
    ran = command("status")
    assert ran.status == 2
    assert "--bootstrap" in ran.err
    assert "KAFKA_MARSHAL_BOOTSTRAP" in ran.err


@pytest.mark.parametrize(
    "args",
    [
        ["init"],
        ["init", "--check"],
        ["status"],
        ["check"],
        ["lag"],
        ["log"],
        ["who", "g", "t", "0"],
        ["dump"],
        ["dead-letters", "t"],
        ["open-messages", "g"],
        ["redrive", "g", "--all"],
        ["evict", "g", "t", "0", "--yes"],
        ["forget-group", "g", "--yes"],
        ["release-group", "g", "--to", "earliest", "--yes"],
        ["release-group", "g", "--resume", "--yes"],
    ],
)
def test_kafka_out_of_reach_ends_with_3_and_prints_nothing_else(command: Command, args: list[str]) -> None:
    ran = command("--bootstrap", NOWHERE, "--timeout", "0.3", *args)
    assert ran.status == 3, ran.err
    assert NOWHERE in ran.err
    assert "Traceback" not in ran.err
    assert ran.out == ""


def options_seen(monkeypatch: pytest.MonkeyPatch, *args: str) -> Options:
    """The options that a command gets."""
    seen: list[Options] = []

    @app.command("probe")
    @click.pass_obj
    def probe(options: Options) -> None:
        seen.append(options)

    monkeypatch.setattr(app.root, "get_command", lambda ctx, name: probe)
    monkeypatch.setitem(app.COMMANDS, "probe", ("", ""))
    assert app.run(args) == 0
    return seen[0]


def test_options_go_before_and_after_the_name_and_the_latter_prevails(
    monkeypatch: pytest.MonkeyPatch, environment: None
) -> None:
    before = options_seen(monkeypatch, "--bootstrap", "a:1", "--json", "--topic", "t", "--timeout", "3", "probe")
    assert (before.bootstrap, before.json, before.topic, before.timeout) == ("a:1", True, "t", 3.0)
    after = options_seen(monkeypatch, "probe", "--bootstrap", "a:1", "--json", "--topic", "t", "--timeout", "3")
    assert after == before
    both = options_seen(monkeypatch, "--bootstrap", "a:1", "--topic", "t", "probe", "--bootstrap", "b:2")
    assert (both.bootstrap, both.topic, both.json) == ("b:2", "t", False)


def test_the_environment_names_kafka_unless_an_option_does(monkeypatch: pytest.MonkeyPatch, environment: None) -> None:
    monkeypatch.setenv("KAFKA_MARSHAL_BOOTSTRAP", "env:1")
    assert options_seen(monkeypatch, "probe").bootstrap == "env:1"
    assert options_seen(monkeypatch, "--bootstrap", "a:1", "probe").bootstrap == "a:1"
    assert options_seen(monkeypatch, "probe", "--bootstrap", "a:1").bootstrap == "a:1"
    monkeypatch.setenv("KAFKA_MARSHAL_DEBUG", "1")
    assert options_seen(monkeypatch, "probe").debug


# -- --config ------------------------------------------------------------------------------------------------


def test_a_properties_file_is_read_as_kafkas_tools_read_it(tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_text(
        "# comment\n! another\n\nsecurity.protocol=SASL_SSL\n  sasl.username = me \nsasl.password=a=b#c\n"
        "bootstrap.servers=x:1,y:2\n"
    )
    assert read_properties(str(path)) == {
        "security.protocol": "SASL_SSL",
        "sasl.username": "me",
        "sasl.password": "a=b#c",
        "bootstrap.servers": "x:1,y:2",
    }
    servers, properties = Options(config_file=str(path)).connection()
    assert servers == "x:1,y:2"
    assert "bootstrap.servers" not in properties
    assert Options(config_file=str(path), bootstrap="z:3").connection()[0] == "z:3"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_properties_file_from_any_editor_is_read(tmp_path: Path, encoding: str, end: str) -> None:
    path = tmp_path / "client.properties"
    path.write_bytes(end.join(["bootstrap.servers=x:1", "sasl.username=Zoë", ""]).encode(encoding))
    assert read_properties(str(path)) == {"bootstrap.servers": "x:1", "sasl.username": "Zoë"}


def test_a_properties_file_in_another_encoding_is_wrong_use(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    for raw in ("acks=all".encode("utf-16-le"), "a=Zoë".encode("latin-1"), b"\xff\xfea"):
        path.write_bytes(raw)
        ran = command("status", "--bootstrap", NOWHERE, "--config", path)
        assert (ran.status, "Save it as UTF-8." in ran.err) == (2, True)


ALL_CLOSED = "<&- >&- 2>&-"


@pytest.mark.parametrize(
    ("closed", "args", "status"),
    [
        (ALL_CLOSED, ["--version"], 0),
        (">&-", ["--help"], 0),
        (ALL_CLOSED, ["completion", "bash"], 0),
        *((closed, ["replay", "DUMP"], 0) for closed in (">&-", "2>&-", "<&-", ALL_CLOSED)),
        (">&-", ["who", "g", "t", "0", "--from-dump", "DUMP"], 0),
        (ALL_CLOSED, ["log", "--json", "--from-dump", "DUMP"], 0),
        ("2>&-", ["status", "--bootstrap", NOWHERE, "--timeout", "0.2"], 3),
        (ALL_CLOSED, ["status", "--bootstrap", NOWHERE, "--timeout", "0.2"], 3),
        ("2>&-", ["nonsense"], 2),
    ],
)
def test_closed_standard_streams_end_nothing(tmp_path: Path, closed: str, args: list[str], status: int) -> None:
    log = Log()
    log.add(ClaimingPartition("i", "c", "g", "t", 0, 1000), 1000)
    (tmp_path / "dump").write_bytes(log.dump)
    given = [str(tmp_path / "dump") if arg == "DUMP" else arg for arg in args]
    line = f"{shlex.join([*ARGV, *given])} {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=False, timeout=60)
    assert done.returncode == status, done.stderr
    assert b"Traceback" not in done.stderr


def test_how_a_time_was_read_is_said_where_it_depends_on_the_moment(command: Command, tmp_path: Path) -> None:
    log = Log()
    log.add(ClaimingPartition("i", "c", "g", "t", 0, 1000), 1_700_000_000_000)
    (tmp_path / "dump").write_bytes(log.dump)
    for args, said in (
        (
            ["who", "g", "t", "0", "--at", "2023-11-15 00:00"],
            "--at 2023-11-15 00:00 is 2023-11-15T00:00:00.000+00:00, ",
        ),
        (["log", "--since", "1d"], "--since 1d is 20"),
        (["who", "g", "t", "0", "--at", "2023-11-15T00:00Z"], ""),
        (["log", "--since", "10m", "--json"], ""),
    ):
        ran = command(*args, "--from-dump", tmp_path / "dump")
        assert ran.err.startswith(said) if said else ran.err == "", args


def test_the_broker_gets_as_much_time_as_it_is_given(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float | None] = []

    def run_broker(*_: object, progress: Callable[[str], None], start_timeout_s: float | None) -> None:
        given.append(start_timeout_s)
        progress("starting 1 broker")

    monkeypatch.setattr("kafka_marshal.testing.run_broker", run_broker)
    assert command("broker", "--timeout", 120).err == "starting 1 broker (0.0 s)\n"
    command("broker")
    assert given == [120.0, None]


@pytest.mark.parametrize("line", ["hunter2", "=hunter2"])
def test_a_bad_line_is_named_but_not_shown_for_it_may_be_a_password(
    command: Command, tmp_path: Path, line: str
) -> None:
    path = tmp_path / "client.properties"
    path.write_text(f"acks=all\n{line}\n")
    ran = command("status", "--bootstrap", NOWHERE, "--config", path)
    assert ran.status == 2
    assert "line 2" in ran.err
    assert "hunter2" not in ran.err


def test_a_file_that_is_no_text_is_wrong_use(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "client.properties"
    path.write_bytes(b"\xff\xfe=1")
    assert command("status", "--bootstrap", NOWHERE, "--config", path).status == 2


@pytest.mark.parametrize("line", ["no.such.property=1", "acks=1", "group.id=mine", "security.protocol=smoke"])
def test_properties_that_can_not_work_are_wrong_use(command: Command, tmp_path: Path, line: str) -> None:
    path = tmp_path / "client.properties"
    path.write_text(line)
    ran = command("status", "--bootstrap", NOWHERE, "--config", path, "--timeout", "0.3")
    assert ran.status == 2
    assert line.partition("=")[0] in ran.err


# -- errors --------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def replaying(*args: object) -> None:
        raise error

    monkeypatch.setattr("rationalizer.dump.Replay", replaying)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (DumpError(3, "no"), 2),
        (ConfigurationError("no"), 2),
        (KafkaUnavailableError("no"), 3),
        (AuthenticationError("no"), 3),
        (TopicMissingError("no"), 1),
        (AdminError("no"), 1),
        (failures.CommandError("no", 1), 1),
        (PermissionError(13, "Permission denied", "file"), 2),
        (KeyError("no"), 70),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(32, "Broken pipe"), 141),
    ],
)
def test_every_kind_of_error_has_its_status(
    command: Command, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    failing(monkeypatch, error)
    ran = command("replay", os.devnull)
    assert ran.status == status
    assert "Traceback" not in ran.err
    assert bool(ran.err) == (status != 141)


def test_an_error_from_the_log_can_not_reach_the_terminal(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, AdminError("held by \x1b]0;x\x07 and \u202e"))
    ran = command("replay", os.devnull)
    assert "\\x1b]0;x\\x07 and \\u202e" in ran.err
    assert all(line.isprintable() for line in ran.err.splitlines())


def test_notes_of_an_error_are_reported(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    error = KeyboardInterrupt()
    error.add_note("The pause may last.")
    failing(monkeypatch, error)
    assert "The pause may last." in command("replay", os.devnull).err


def test_debug_shows_the_traceback(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyError("\x1b[31m"))
    ran = command("--debug", "replay", os.devnull)
    assert "Traceback" in ran.err
    assert "\x1b" not in ran.err


def test_output_goes_out_whatever_the_encoding() -> None:
    log = Log()
    log.add(ClaimingPartition("i", "Zürich", "g", "東京", 0, 1000), 1000)
    for args in (["log"], ["who", "g", "東京", "0"]):
        done = process(*args, "--from-dump", "-", input=log.dump, env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0, done.stderr
        assert b"rich" in done.stdout


def test_no_colour_without_a_terminal(command: Command) -> None:
    assert "\x1b" not in command("nonsense").err


# -- completion, and the extra -------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_for_every_shell(command: Command, shell: str) -> None:
    ran = command("completion", shell)
    assert ran.status == 0
    assert "_KAFKA_MARSHAL_COMPLETE" in ran.out
    assert "kafka-marshal" in ran.out


def complete(*words: str) -> list[str]:
    done = subprocess.run(
        ARGV,
        env={
            **os.environ,
            "_KAFKA_MARSHAL_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        },
        capture_output=True,
        check=True,
        timeout=60,
    )
    return [line.partition(",")[2] for line in done.stdout.decode().splitlines()]


def test_what_is_completed() -> None:
    assert set(complete("kafka-marshal", "re")) == {"replay", "release-group", "redo", "redrive"}
    assert "--until" in complete("kafka-marshal", "replay", "--u")
    assert "--bootstrap" in complete("kafka-marshal", "status", "--b")


def test_without_click_it_says_which_extra_to_install() -> None:
    code = (
        "import sys; sys.modules['click'] = None; from kafka_marshal.cli import main; sys.exit(main(['replay', 'x']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=60)
    assert done.returncode == 2
    assert b"pip install 'kafka-marshal[cli]'" in done.stderr
    assert b"Traceback" not in done.stderr


def test_without_rich_it_says_which_extra_to_install(tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    log = Log()
    log.add(ClaimingPartition("i", "c", "g", "t", 0, 1000), 1000)
    (tmp_path / "dump").write_bytes(log.dump)
    code = "import sys; sys.modules['rich'] = None; from kafka_marshal.cli import main; sys.exit(main(sys.argv[1:]))"
    asked = ["who", "g", "t", "0", "--from-dump", str(tmp_path / "dump")]  # draws a table on a terminal
    opened = terminal(*asked, argv=[sys.executable, "-c", code])
    assert b"pip install 'kafka-marshal[cli]'" in opened.finish()
    assert opened.process.returncode == 2
    assert b"Traceback" not in opened.shown


@pytest.mark.parametrize("name", ["a b", "..", "é", "x" * 250])
def test_a_name_that_no_topic_can_have_is_refused_before_anybody_is_asked(command: Command, name: str) -> None:
    ran = command("status", "--bootstrap", NOWHERE, "--topic", name)
    assert ran.status == 2
    assert f"no topic can be called {name!r}" in ran.err


# -- The frame of commands that change something: what it plans, shows, asks, does, and says ----------------------


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs the frame; its exit status, and its steps."""

    def run(
        options: Options, *, answer: bool = True, shows: bool = True, question: str = "sure?"
    ) -> tuple[int, list[str]]:
        done: list[str] = []

        def step(name: str, value: str) -> str:
            done.append(name)
            return value

        monkeypatch.setattr(change, "ask", lambda question, yes: yes or bool(step(question, "1" if answer else "")))
        status = carry_out(
            options,
            lambda: step("plan", "planned"),
            show=(lambda planned: done.append(f"show {planned}")) if shows else None,
            question=question,
            do=lambda: step(options.if_interrupted, "done"),
            if_interrupted="do",
            say=lambda found, is_done: done.append(f"say {found} {is_done}"),
            json=lambda found, is_done: done.append(f"json {found} {is_done}"),
            status=lambda found: DONE if found == "done" else 7,
        )
        return status, done

    return run


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (Options(), ["plan", "show planned", "sure?", "do", "say done True"]),
        (Options(yes=True), ["do", "say done True"]),
        (Options(yes=True, json=True), ["do", "json done True"]),
        (Options(json=True), ["plan", "sure?", "do", "json done True"]),
    ],
)
def test_it_shows_the_plan_and_asks_unless_yes_is_said(
    steps: Callable[..., tuple[int, list[str]]], options: Options, wanted: list[str]
) -> None:
    assert steps(options) == (DONE, wanted)


@pytest.mark.parametrize("yes", [False, True])
def test_a_dry_run_ends_before_the_question(steps: Callable[..., tuple[int, list[str]]], yes: bool) -> None:
    assert steps(Options(dry_run=True, yes=yes)) == (7, ["plan", "show planned", "say planned False"])
    assert steps(Options(dry_run=True, json=True, yes=yes)) == (7, ["plan", "json planned False"])


def test_no_is_an_answer(steps: Callable[..., tuple[int, list[str]]], capsys: pytest.CaptureFixture[str]) -> None:
    assert steps(Options(), answer=False) == (NO, ["plan", "show planned", "sure?"])
    assert capsys.readouterr().err == "Nothing was changed.\n"


def test_without_a_question_it_is_done_at_once(steps: Callable[..., tuple[int, list[str]]]) -> None:
    assert steps(Options(), shows=False, question="") == (DONE, ["do", "say done True"])


def test_fields_have_their_order_and_names() -> None:
    each = PartitionTarget("t", 3, None)
    found = fields_of(each, "partition from=topic position")
    assert list(found.items()) == [("partition", 3), ("from", "t"), ("position", None)]


def test_an_option_that_cannot_be_parsed_says_why_and_what_else_it_may_be() -> None:
    def parse(_: Options, option: str, text: str) -> int:
        return int(text) if text.isdigit() else int(f"{option} {text}")

    context = click.Context(click.Command("c"), obj=Options())
    callback = parsed(parse, ", or never")
    parameter = click.Option(["--at"])
    assert callback(context, parameter, None) is None
    assert callback(context, parameter, "7") == 7
    with pytest.raises(click.BadParameter, match=r"'--at x', or never$"):
        callback(context, parameter, "x")


# -- Messages about workers that hold nothing, and about unknown names --------------------------------------------


A = ("host/17/1.0/x", "a", "g")

IDLE = WorkerRow("g", "a", A[0], 4_000)


@pytest.mark.parametrize(
    ("changed", "doing"),
    [
        ({}, "silent for 4.0 s; others took over what it held"),
        ({"waits": True}, "waits for a partition"),
        ({"waits": True, "silence_ms": 15_000}, "silent for 15 s; it waited for a partition"),
        ({"waits": True, "silence_ms": 15_000, "interval_ms": 6_000}, "waits for a partition"),
        ({"released_ms": 3_000}, "released all it held 3.0 s ago"),
        (
            {"released_ms": 3_000, "asked_ms": 9_000},
            "asked to hand over 9.0 s ago: claims nothing until it is restarted",
        ),
        ({"is_member": True}, "a member; there is no partition for it"),
        (
            {"is_member": True, "no_share": "only some share flights"},
            "a member; there is no partition for it, and no share of keys: only some share flights",
        ),
        ({"refused": "X"}, "the log rejected it: X"),
        (
            {"evictor": "ann", "evicted_ms": 3_000, "was_alive": True, "asked_ms": 9_000},
            "evicted by ann 3.0 s ago; claims nothing until its handler returns",
        ),
        (
            {"evictor": "ann", "evicted_ms": 3_000, "was_alive": True, "is_coordinated": True},
            "evicted by ann 3.0 s ago; joins again after three sessions, once its handler returns",
        ),
        ({"evictor": "ann", "evicted_ms": 3_000}, "evicted by ann 3.0 s ago; silent for 4.0 s"),
    ],
)
def test_what_one_that_holds_nothing_does(changed: dict[str, bool | int | str], doing: str) -> None:
    assert replace(IDLE, **changed).doing == doing  # type: ignore[arg-type]


def test_a_member_without_a_share_of_keys_says_why() -> None:
    group = Group("g")
    group.settings = Settings(accept_range_fetch=("flights", "orders"))
    for slot, (client, topics, shares) in enumerate(
        [("a", {"flights", "x"}, False), ("b", {"flights"}, True), ("c", {"x"}, True), ("d", {"x"}, False)]
    ):
        member = group.clients[client] = Member(slot, client)
        member.topics, member.allow_key_share = frozenset(topics), shares
    assert [why_no_share(group, client) for client in "abcde"] == [
        "only members with allow_key_share=True share flights",
        "",
        "the group's setting accept_range_fetch names none of its topics",
        "",
        "",
    ]
    assert why_no_share(None, "a") == ""


def test_a_group_without_a_holder_names_the_workers_that_may_run() -> None:
    free = LeaseRow("g", "t", 0, cp=0, log_start=0, log_end=1_605)
    left = GroupRow("g", [free], silent_ms=35_000, heard=[replace(IDLE, released_ms=4_000)])
    (problem,) = problems_of(left)
    assert problem.text == (
        "1 partition without a holder (t 0), 1,605 messages waiting. No worker holds anything of the group; "
        "a (host:17) released all it held 4.0 s ago. Last seen 35 s ago. Start its workers: they "
        "continue at its positions"
    )
    evicted = replace(IDLE, evictor="ann", evicted_ms=3_000, was_alive=True)
    (problem,) = problems_of(replace(left, heard=[evicted]))
    assert "a (host:17) evicted by ann 3.0 s ago; claims nothing until its handler returns" in problem.text


@pytest.mark.parametrize("kind", ["claimed", "coordinated"])
def test_the_remedy_is_by_age_and_lag(kind: str) -> None:
    """Dropping the positions of a group whose members have just died would do more harm than the problem."""
    waiting = LeaseRow("my g", "t", 0, cp=0, stable=4, log_start=0, log_end=10, kind=kind)
    state = {"kind": kind, "state": "READY" if kind == "coordinated" else None}
    young = GroupRow("my g", [waiting], silent_ms=35_000, **state)  # type: ignore[arg-type]
    (problem,) = problems_of(young)
    assert "forget-group" not in problem.text
    assert problem.text.endswith("Last seen 35 s ago. Start its workers: they continue at its positions")
    (problem,) = problems_of(replace(young, silent_ms=86_400_001, silent_at_least=True))
    assert problem.text.endswith(
        "Last seen over 1 d ago. Start its workers: they continue at its positions. If it is over: kafka-marshal "
        "forget-group 'my g' (its positions are lost then)"
    )
    done = replace(waiting, stable=9)
    assert problems_of(replace(young, leases=[done])) == [], "nobody is left, and all is done"
    asks = replace(IDLE, waits=True, silence_ms=100)
    assert [each.kind for each in problems_of(replace(young, leases=[done], heard=[asks]))] == ["no_holder"]
    never = LeaseRow("my g", "t", 1, log_start=0, log_end=3, kind=kind)
    assert [each.kind for each in problems_of(replace(young, leases=[done, never]))] == ["no_holder"]


def test_the_last_worker_that_is_gone_is_to_be_restarted() -> None:
    held = LeaseRow("g", "t", 0, cp=0, client="a", instance=A[0], heartbeat_interval_ms=1_000, log_start=0, log_end=9)
    gone = replace(held, silence_ms=5_000)
    (problem,) = problems_of(GroupRow("g", [gone]))
    assert problem.text == (
        "a (host:17) is gone: silent for 5.0 s. It holds 1 partition (t 0), 9 waiting. No other worker is alive: "
        "start one, it continues at their positions"
    )
    other = replace(gone, partition=1, client="b", instance="host/18/1.0/x", silence_ms=100)
    (problem,) = problems_of(GroupRow("g", [gone, other]))
    assert problem.text.endswith("It holds 1 partition (t 0)")


def test_how_many_shall_be_alive() -> None:
    """Counts holders, members and waiting clients, not those that left or were evicted."""
    free = LeaseRow("g", "t", 0, cp=0, log_start=0, log_end=0)
    asks, silent = replace(IDLE, waits=True, silence_ms=100), replace(IDLE, client="b", waits=True, silence_ms=60_000)
    member = replace(IDLE, client="c", is_member=True)
    group = GroupRow("g", [free], heard=[asks, silent, member])
    assert group.living == 2
    (problem,) = [each for each in problems_of(group, min_members=3) if each.kind == "members"]
    assert (problem.text, problem.amount) == ("2 members alive, fewer than 3", 2)
    assert all(each.kind != "members" for each in problems_of(group, min_members=2))


def test_who_holds_something_is_not_idle_and_says_that_it_was_asked() -> None:
    lease = LeaseRow(
        "g", "t", 0, cp=0, client="a", instance=A[0], heartbeat_interval_ms=1_000, silence_ms=0, log_start=0, log_end=0
    )
    group = GroupRow("g", [lease], heard=[replace(IDLE, asked_ms=9_000), replace(IDLE, client="b")])
    assert [run.client for run in group.idle] == ["b"]
    assert [(member.client, member.asked_ms) for member in group.members] == [("a", 9_000)]
    started_again = GroupRow("g", [replace(lease, instance="host/19/1.0/y")], heard=[replace(IDLE, asked_ms=9_000)])
    assert [member.asked_ms for member in started_again.members] == [None]


def test_a_name_like_several_others_is_no_reason_to_guess() -> None:
    assert near("delay", ["delays", "flights"]) == "; did you mean 'delays'?"
    assert near("w-9", ["w-2", "w-1"]) == "; did you mean 'w-1' or 'w-2'?"
    assert near("w-9", [f"w-{n}" for n in range(8)]).endswith("'w-3' or …?")
    assert near("zz", ["delays"]) == ""
    assert near("zz", []) == ""


class Topics:
    """A cluster that has these topics; None: it does not answer."""

    def __init__(self, *names: str | None) -> None:
        self._names = names

    def topics(self, timeout_s: float) -> dict[str, None]:
        if None in self._names:
            raise KafkaUnavailableError("no answer")
        return {str(name): None for name in self._names}


@pytest.mark.parametrize(
    ("topics", "notes"),
    [
        (("__marshal", "__marshal_snapshots"), ["There is a topic of a similar name; did you mean '__marshal'?"]),
        (("flights",), []),
        ((None,), []),
    ],
)
def test_a_mistyped_coordination_topic_comes_with_the_one_that_may_be_meant(
    topics: tuple[str | None, ...], notes: list[str]
) -> None:
    """The topic that `init` would create beside it would assign the same work a second time."""
    error = TopicMissingError("no such topic")
    name_the_topic(error, Topics(*topics), Options(topic="__marshal_snapshot"))  # type: ignore[arg-type]
    assert getattr(error, "__notes__", []) == notes
