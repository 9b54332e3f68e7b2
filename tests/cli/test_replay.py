"""`replay`: section 9 of the protocol, byte for byte (D1-D4)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kafka_marshal.cli.log import Filter, LogLine, LogLines, in_order
from rationalizer import (
    ClaimingPartition,
    Heartbeat,
    ReleasingPartition,
    Tick,
    Upgrade,
    World,
    encode,
    route_lease,
)
from rationalizer.dump import DumpHeader, DumpLines, header_line
from tests.cli.harness import ARGV, Command, Log, Terminal, process, start

EXAMPLES = Path(__file__).parents[1] / "rationalizer" / "examples"
FOUND = sorted(path.name.removesuffix(".dump.jsonl") for path in EXAMPLES.glob("*.dump.jsonl"))
NAMES = FOUND


def test_the_examples_are_there() -> None:
    assert len(NAMES) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_outcomes_are_those_of_the_examples_byte_for_byte(name: str, command: Command) -> None:
    ran = command("replay", EXAMPLES / f"{name}.dump.jsonl")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out.encode() == (EXAMPLES / f"{name}.outcomes.jsonl").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_state_is_that_of_the_examples_byte_for_byte(name: str, command: Command) -> None:
    ran = command("replay", "--state", "-", stdin=(EXAMPLES / f"{name}.dump.jsonl").read_bytes())
    assert (ran.status, ran.err) == (0, "")
    wanted = (EXAMPLES / f"{name}.state.json").read_bytes()
    assert json.loads(ran.out) == json.loads(wanted)
    if not name.startswith(("group_", "checkpoint_", "sharing_", "redo_")):  # those have their keys in another order
        assert ran.out.encode() == wanted


def test_as_a_process_it_prints_the_same_bytes() -> None:
    data = (EXAMPLES / "digest.dump.jsonl").read_bytes()
    for arguments, wanted in (((), "outcomes.jsonl"), (("--state",), "state.json")):
        done = process("replay", *arguments, "-", input=data)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout == (EXAMPLES / f"digest.{wanted}").read_bytes()


def test_until_leaves_out_what_lies_above_and_no_other_partition(command: Command) -> None:
    dump = EXAMPLES / "digest.dump.jsonl"
    ran = command("replay", dump, "--until", "1:2")
    seen = [(line["partition"], line["offset"]) for line in map(json.loads, ran.lines)]
    assert ran.status == 0
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2)]
    state = command("replay", dump, "--state", "--until", "1:2", "--until", "0:0").json
    assert [each["next_offset"] for each in state["partitions"]] == [1, 3]


def test_until_named_twice_for_a_partition_both_hold(command: Command) -> None:
    ran = command("replay", EXAMPLES / "digest.dump.jsonl", "--until", "1:5", "--until", "1:0", "--until", "1:3")
    assert sum(json.loads(line)["partition"] == 1 for line in ran.lines) == 1


@pytest.mark.parametrize("until", ["1", "1:", ":1", "1:-1", "a:b", "1:2:3", "1.0:2", "²:1"])
def test_an_until_of_another_form_is_wrong_use(command: Command, until: str) -> None:
    ran = command("replay", EXAMPLES / "digest.dump.jsonl", "--until", until)
    assert ran.status == 2
    assert "PARTITION:OFFSET" in ran.err
    assert ran.out == ""


def test_an_until_of_a_partition_that_the_dump_lacks_is_wrong_use(command: Command) -> None:
    ran = command("replay", EXAMPLES / "digest.dump.jsonl", "--until", "7:1")
    assert ran.status == 2
    assert "partition 7" in ran.err


HEADER = b'{"topic": "__marshal", "partitions": 2, "format": 1}\n'
FIRST = b'{"partition": 1, "offset": 4, "timestamp": 1000, "value": null}\n'

BAD = {
    "empty": (b"", 1),
    "no header": (FIRST, 1),
    "other format": (b'{"topic": "t", "partitions": 2, "format": 2}\n', 1),
    "not JSON": (HEADER + FIRST + b"nonsense\n", 3),
    "no object": (HEADER + b"\n\n[]\n", 4),
    "offset again": (HEADER + FIRST + FIRST, 3),
    "partition too large": (HEADER + FIRST.replace(b'"partition": 1', b'"partition": 2'), 2),
    "no base64": (HEADER + FIRST.replace(b"null", b'"%%"'), 2),
    "not UTF-8": (HEADER + b'{"partition": "\xff"}\n', 2),
    "NaN": (HEADER + FIRST.replace(b"1000", b"NaN"), 2),
    "float": (HEADER + FIRST.replace(b"1000", b"1.0"), 2),
    "bool": (HEADER + FIRST.replace(b"1000", b"true"), 2),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("state", [False, True])
def test_a_bad_line_is_named_and_the_status_is_2(command: Command, name: str, state: bool) -> None:
    content, line = BAD[name]
    ran = command("replay", "-", *(["--state"] if state else []), stdin=content)
    assert ran.status == 2
    assert f"line {line}:" in ran.err
    assert "Traceback" not in ran.err
    if state:
        assert ran.out == ""


def upgraded(*levels: int) -> Log:
    log = Log(len(levels))
    for cp, level in enumerate(levels):
        log.add(Tick("i", "c", "g"), 1000, cp)
        log.add(Upgrade("i", "c", "g", level), 1001, cp)
        log.add(Tick("i", "c", "g"), 1002, cp)
    return log


def test_a_replay_that_stops_at_an_upgrade_ends_with_1_and_names_each_level(command: Command) -> None:
    log = upgraded(107, 1, 109, 107)
    ran = command("replay", "-", stdin=log.dump)
    assert ran.status == 1
    seen = [(line["partition"], line["offset"]) for line in map(json.loads, ran.lines)]
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0)]
    assert "partition 0, 3:" in ran.err
    assert "level 107" in ran.err
    assert "level 109" in ran.err
    state = command("replay", "-", "--state", stdin=log.dump)
    assert state.status == 1
    assert [each["next_offset"] for each in state.json["partitions"]] == [1, 3, 1, 1]


def test_a_bad_line_wins_over_an_upgrade(command: Command) -> None:
    ran = command("replay", "-", stdin=upgraded(7).dump + b"nonsense\n")
    assert ran.status == 2
    assert "line 5:" in ran.err


def test_until_may_stop_before_the_upgrade(command: Command) -> None:
    assert command("replay", "-", "--until", "0:0", stdin=upgraded(7).dump).status == 0


def test_a_file_that_is_not_there_is_wrong_use_without_a_traceback(command: Command, tmp_path: Path) -> None:
    ran = command("replay", tmp_path / "nowhere")
    assert ran.status == 2
    assert "nowhere" in ran.err
    assert "Traceback" not in ran.err
    assert command("replay", tmp_path).status == 2


def long_log(records: int) -> bytes:
    log = Log()
    log.add(ClaimingPartition("i", "c", "g", "t", 0, 600_000), 1000)
    for number in range(1, records):
        log.add(Heartbeat("i", "c", "g", "t", 0, 0, number), 1000 + number)
    return log.dump


def test_a_reader_that_has_seen_enough_ends_the_replay_quietly(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(long_log(20_000))
    with start("replay", str(path)) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.readline().startswith(b'{"partition": 0')
        running.stdout.close()
        said = running.stderr.read()
        assert running.wait(30) == 141
    assert said == b""


def peak_kib(content: bytes, *options: str) -> int:
    """Peak memory of a replay in its own process (KiB)."""
    replaying = subprocess.Popen([*ARGV, "replay", "-", *options], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert replaying.stdin is not None
    replaying.stdin.write(content)
    replaying.stdin.close()
    _, status, usage = os.wait4(replaying.pid, 0)
    replaying.returncode = os.waitstatus_to_exitcode(status)
    assert replaying.returncode == 0
    return usage.ru_maxrss // (1024 if sys.platform == "darwin" else 1)


@pytest.mark.parametrize("options", [(), ("--state",)])
def test_memory_does_not_grow_with_the_dump(options: tuple[str, ...]) -> None:
    small, large = long_log(100), long_log(60_000)
    assert len(large) > 5_000_000
    assert peak_kib(large, *options) < peak_kib(small, *options) + 4_000


def test_what_replay_does_not_need_is_not_loaded() -> None:
    code = (
        "import sys; from kafka_marshal.cli import main; status = main(['replay', sys.argv[1]]); "
        "print(status, *(m for m in ('confluent_kafka', 'rich', 'kafka_marshal.node.replica') if m in sys.modules), "
        "file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(EXAMPLES / "digest.dump.jsonl")], capture_output=True, check=True, timeout=180
    )
    loaded = done.stderr.decode().split()
    assert loaded[0] == "0"
    assert "confluent_kafka" not in loaded
    assert "rich" not in loaded


def test_ctrl_c_while_it_waits_for_input() -> None:
    with start("replay", "-", stdin=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdin.write(long_log(560))  # enough for a first block of output, too little to fill the pipe
        running.stdin.flush()
        running.stdout.readline()
        running.send_signal(signal.SIGINT)
        said = running.stderr.read()
        running.wait(30)
    assert running.returncode == 130
    assert b"interrupted. The replay is not complete" in said
    assert b"Traceback" not in said


def test_json_changes_nothing_for_it_is_json_already(command: Command) -> None:
    dump = EXAMPLES / "digest.dump.jsonl"
    assert command("--json", "replay", dump).out == command("replay", dump, "--json").out == command("replay", dump).out


def changed_dump() -> bytes:
    """A dump as the command writes it, in which one record's time was altered afterwards."""
    lines = DumpLines(0)
    entries = [
        (offset, 1_000 + offset, encode(ClaimingPartition("a1", "a", "g", "t", 0, 1_000))) for offset in range(3)
    ]
    text = "".join(f"{line}\n" for line in [header_line(DumpHeader("t", 1)), *lines.take(entries), *lines.end()])
    return re.sub(r'("timestamp": ?)1001', r"\g<1>1002", text).encode()


@pytest.mark.parametrize(
    "args",
    [["replay", "-"], ["log", "--from-dump", "-"], ["who", "g", "t", "0", "--from-dump", "-"]],
    ids=lambda args: str(args[0]),
)
def test_what_was_changed_of_a_dump_is_said_by_all_who_read_it(command: Command, args: list[str]) -> None:
    ran = command(*args, stdin=changed_dump())
    assert ran.status == 0
    assert ran.out
    assert ran.err.startswith("error: partition 0, offsets 0 to 2: the dump was changed after it was written")


# -- `log`: from a dump, and in the order of the whole log --------------------------------------------------------


A = ("a1", "a", "g")
B = ("b1", "b", "g")


def story() -> Log:
    """Two partitions of a topic, in two CPs; a claims both, b claims one and gets it later."""
    log = Log(4)
    homes = [next(n for n in range(50) if route_lease("t", n, 4) == cp) for cp in (0, 1)]
    first, second = homes
    log.add(Tick("i", "init", "partitions=4"), 900, 0)
    log.add(Tick("i", "init", "partitions=4"), 901, 1)
    epoch = log.add(ClaimingPartition(*A, "t", first, 1000), 1000)
    log.add(ClaimingPartition(*A, "t", second, 1000), 1001)
    log.add(ClaimingPartition(*B, "t", first, 1000), 1002)
    log.add(Heartbeat(*A, "t", first, epoch, 41), 1300)
    log.add(ReleasingPartition(*A, "t", first, epoch, 50), 1400)
    log.add(ClaimingPartition(*B, "t", first, 1000), 1401)
    log.add(b"\xc1junk", 1500, 1)
    log.add(ClaimingPartition("c1", "c", "other", "t", second, 1000), 1600)
    return log


def test_the_log_in_words(command: Command) -> None:
    ran = command("log", "--from-dump", "-", stdin=story().dump)
    assert ran.status == 0
    rows = ran.rows
    assert [row["code"] for row in rows] == ["OK", "OK", "OK", "OK", "HELD", "OK", "OK", "OK", "MALFORMED", "OK"]
    held = rows[4]
    assert (held["client"], held["instance"], held["group"]) == ("b", "b1", "g")
    assert held["why"] == "a holds it, epoch 1, last beat 0.0 s before"
    assert rows[8]["what"] == "5 bytes, not a record"
    assert rows[8]["client"] == ""
    assert rows[0]["group"] == ""
    assert rows[0]["what"] == "fixes the number of partitions of the log at 4"


def test_json_is_the_replays_line_with_words(command: Command) -> None:
    lines = [json.loads(line) for line in command("log", "--json", "--from-dump", "-", stdin=story().dump).lines]
    replayed = [json.loads(line) for line in command("replay", "-", stdin=story().dump).lines]
    assert [{key: line[key] for key in replayed[0]} for line in lines] == replayed
    assert lines[4]["client"] == "b"
    assert lines[4]["topic_partition"] == lines[2]["topic_partition"]
    assert lines[8]["client"] is None


def codes_of(command: Command, *options: str) -> list[tuple[str, str]]:
    rows = command("log", "--from-dump", "-", *options, stdin=story().dump).rows
    return [(row["client"], row["code"]) for row in rows]


def test_what_can_be_asked_for(command: Command) -> None:
    assert codes_of(command, "--group", "other") == [("c", "OK")]
    assert codes_of(command, "-n", "2") == [("", "MALFORMED"), ("c", "OK")]
    assert codes_of(command, "-n", "0") == []
    assert codes_of(command, "-n", "1", "--group", "g") == [("b", "OK")]
    assert codes_of(command, "--since", "1401") == [("b", "OK"), ("", "MALFORMED"), ("c", "OK")]
    assert len(codes_of(command, "--cp", "1")) == 4
    assert ("a", "OK") in codes_of(command, "--no-beats")
    assert len(codes_of(command, "--no-beats")) == len(codes_of(command)) - 3
    assert command("log", "--from-dump", "-", "--cp", "4", stdin=story().dump).status == 2


def test_since_skips_the_past_but_knows_it(command: Command) -> None:
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1000), 1000)
    log.add(Tick(*A), 9000)
    log.add(ClaimingPartition(*B, "t", 0, 1000), 9001)
    ran = command("log", "--since", "9001", "--from-dump", "-", stdin=log.dump)
    assert [row["why"] for row in ran.rows] == ["granted, epoch 2; a was silent for 8.0 s"]


def test_a_part_that_stopped_at_an_upgrade_is_named(command: Command) -> None:
    log = Log(2)
    log.add(Upgrade(*A, 105), 1000, 1)
    log.add(Tick(*A), 1000, 1)
    log.add(Tick(*A), 1000, 0)
    ran = command("log", "--from-dump", "-", stdin=log.dump)
    assert ran.status == 1
    assert "partition 1" in ran.err
    assert "level 105" in ran.err
    assert len(ran.rows) == 1


EVIL = ("i\u202e1", "w\u200b\u2066[red]:bomb:", "g\u00a0")


@pytest.mark.parametrize("args", [["log"], ["who", EVIL[2], "t\u202e", "0"]])
def test_nothing_from_the_log_reaches_a_terminal_unescaped(
    tmp_path: Path, terminal: Callable[..., Terminal], args: list[str]
) -> None:
    log = Log()
    log.add(ClaimingPartition(*EVIL, "t\u202e", 0, 1000), 1000)
    log.add(ClaimingPartition("x", "y", EVIL[2], "t\u202e", 0, 1000), 1001)
    log.add(b"\x1b]0;pwned\x07", 1002)
    log.add(b"\x96\x01\x02\xa9\x1b]0;p\x07\x9b1m\xa1c\xa1g\xa1t", 1003)
    (tmp_path / "dump").write_bytes(log.dump)
    opened = terminal(*args, "--from-dump", str(tmp_path / "dump"), columns=250)
    shown = opened.finish().decode()
    assert opened.process.returncode == 0, shown
    for bad in ("\u202e", "\u200b", "\u2066", "\u00a0", "\x1b]", "\x9b", "\x07"):
        assert bad not in shown
    assert "w\\u200b\\u2066[red]:bomb:" in shown


def test_plain_text_is_escaped_too_so_that_columns_stay_columns(command: Command) -> None:
    log = Log()
    log.add(ClaimingPartition("i", "a\u2028b", "g", "t", 0, 1000), 1000)
    (row,) = command("log", "--from-dump", "-", stdin=log.dump).rows
    assert row["client"] == "a\\u2028b"


# -- the order of the whole log ------------------------------------------------------------------------------


def runs(log: Log) -> list[tuple[int, int, int, bytes]]:
    from rationalizer.dump import DumpReader

    return [(r.partition, r.offset, r.timestamp_ms, r.value or b"") for r in DumpReader(log.dump.splitlines())]


def told(lines: LogLines, records: list[tuple[int, int, int, bytes]]) -> Iterator[LogLine]:
    for partition, offset, stamp, value in records:
        yield from lines.read(partition, [(offset, stamp, value)])


EVERYTHING = Filter(group=None, since=None, no_beats=False)


@pytest.mark.parametrize("by_partition", [True, False])
def test_partitions_are_merged_by_time_however_they_were_read(by_partition: bool) -> None:
    records = runs(story())
    expected = [(stamp, cp, offset) for cp, offset, stamp, _ in sorted(records, key=lambda r: (r[2], r[0], r[1]))]
    if by_partition:
        records.sort(key=lambda record: record[:2])
    ends = {cp: sum(record[0] == cp for record in records) for cp in range(4)}
    seen = [each.key for each in in_order(told(LogLines(4, EVERYTHING, {}), records), ends)]
    assert seen == expected


def test_merging_holds_back_only_as_much_as_partitions_are_read_apart() -> None:
    log = Log(2)
    for number in range(1_000):
        log.add(Tick(*A), number, number % 2)
    lines = LogLines(2, EVERYTHING, {})
    given = 0

    def source() -> Iterator[LogLine]:
        nonlocal given
        for each in told(lines, runs(log)):
            given += 1
            yield each

    for taken, _ in enumerate(in_order(source(), {0: 500, 1: 500}), start=1):
        assert given - taken <= 2


def test_the_end_of_a_partition_that_is_no_record_loses_nothing() -> None:
    """A control record at the end of a CP is never delivered: records that wait for it are shown nevertheless."""
    records = runs(story())
    ends = {cp: sum(record[0] == cp for record in records) + 1 for cp in range(4)}
    seen = [each.key for each in in_order(told(LogLines(4, EVERYTHING, {}), records), ends)]
    assert seen == sorted(seen)
    assert len(seen) == len(records)


def test_what_is_skipped_is_replayed_all_the_same() -> None:
    records = runs(story())
    skipping = LogLines(4, EVERYTHING, {0: 3, 1: 2})
    list(told(skipping, records))
    for cp in range(2):
        world = World(cp, 4)
        world.apply_many([(offset, stamp, value) for p, offset, stamp, value in records if p == cp])
        assert skipping.worlds[cp].digest() == world.digest()


def test_the_story_is_one_that_the_world_accepts() -> None:
    world = World(route_lease("t", 0, 4), 4)
    assert world.apply(0, 1000, encode(ClaimingPartition(*A, "t", 0, 1000))).accepted
