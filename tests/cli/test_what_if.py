"""`what-if`: logs of the simulator's stories, and of a broker, replayed under other settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pytest

from kafka_marshal.cli import what_if
from kafka_marshal.client.modes import Claims, Group
from kafka_marshal.observe.intents import GroupIntents, Intents, MemberLife, figures, total
from kafka_marshal.observe.text import time_text
from kafka_marshal.testing.simulation import Client, Fault, Scenario, simulate_one
from kafka_marshal.testing.simulation.network import BROKER_EPOCH_MS
from kafka_marshal.testing.simulation.scripted import replay, script_of
from kafka_marshal.types import Strategy
from rationalizer.dump import DumpHeader, DumpLines, DumpReader, header_line
from rationalizer.history import Span
from tests.cli.harness import Command, Ran

HI_S = 1.0
MEMBERS = ("w1", "w2", "w3", "w4")
PARTITIONS = 12
#: By how much the standstill of the replay as it was may differ from what was: a heartbeat for each partition that is
#: taken over, as its last one may have come at any time before the death; for each move, and each partition at the
#: start, what records take to arrive (s).
BEAT_S, ARRIVES_S = HI_S / 3, 0.1
#: By how much moves may differ: at a start and after a pause members race for what is free.
MOVES = 0.3

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Makes the dump of a story; the same story is played once."""
    kept: dict[tuple[object, ...], Path] = {}

    def make(*faults: Fault, strategy: Strategy | None = None, seed: int = 3, intervals: int = 32) -> Path:
        key = (faults, strategy, seed, intervals)
        if key not in kept:
            kept[key] = tmp_path_factory.mktemp("dump") / "log.jsonl"
            story = Scenario(
                seed,
                tuple(Client(name, joins=0.1 * place) for place, name in enumerate(MEMBERS)),
                faults,
                heartbeat_interval_ms=round(HI_S * 1000),
                data_partitions=PARTITIONS,
                messages=60.0,
                intervals=intervals,
                recovers=False,
                strategy=strategy,
            )
            result = simulate_one(story)
            assert result.violation is None
            write(kept[key], [each[2:] for each in result.events if each[0] == "record"])
        return kept[key]

    return make


def write(path: Path, records: Sequence[tuple[Any, ...]]) -> None:
    """A dump of (CP, offset, stamp, sender, value, …)."""
    by_cp = {cp: list(found) for cp, found in groupby(sorted(records, key=lambda x: x[:2]), key=lambda x: x[0])}
    bounds = tuple((0, by_cp[cp][-1][1] + 1) for cp in sorted(by_cp))
    lines = [header_line(DumpHeader("__marshal", len(by_cp), bounds))]
    for cp, found in by_cp.items():
        writer = DumpLines(cp)
        lines += [*writer.take((offset, stamp, value) for _, offset, stamp, _, value, *_ in found), *writer.end()]
    path.write_text("".join(f"{line}\n" for line in lines))


DEATH = Fault(15, "crash", "w2", 1_000)


def totals(ran: Ran) -> dict[str, dict[str, float]]:
    assert (ran.status, ran.err) == (0, "")
    (group,) = ran.json["groups"]
    found: dict[str, dict[str, float]] = group["total"]
    return found


def parts(ran: Ran) -> dict[int, Any]:
    (group,) = ran.json["groups"]
    return {each["partition"]: each for each in group["partitions"]}


def assert_like(was: dict[str, float], replayed: dict[str, float]) -> None:
    """The replay as it was is near what was."""
    assert replayed["takeovers"] == was["takeovers"]
    assert replayed["moves"] == pytest.approx(was["moves"], rel=MOVES, abs=2)
    allowed_ms = 1000 * (BEAT_S * was["takeovers"] + ARRIVES_S * (was["moves"] + PARTITIONS))
    assert abs(replayed["standstill_ms"] - was["standstill_ms"]) <= allowed_ms


# -- what would have been -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "option"), [(None, "--heartbeat-interval=500ms"), ("sticky", "--session=1s")])
def test_half_the_interval_is_half_the_standstill(
    made: Made, command: Command, strategy: Strategy | None, option: str
) -> None:
    found = totals(command("what-if", made(DEATH, strategy=strategy), option, "--json"))
    was, as_it_was, other = (found[column] for column in what_if.COLUMNS)
    assert was["takeovers"] >= PARTITIONS // len(MEMBERS)
    assert_like(was, as_it_was)
    assert other["takeovers"] == was["takeovers"]
    assert 0.35 <= other["standstill_ms"] / as_it_was["standstill_ms"] <= 0.7
    assert other["repeats"] == pytest.approx(as_it_was["repeats"] / 2, rel=0.3)


def test_an_interval_that_is_too_short_takes_a_frozen_member_for_dead(made: Made, command: Command) -> None:
    dump = made(Fault(15, "stop", "w2", 1.2), intervals=22)
    found = totals(command("what-if", dump, "--heartbeat-interval", "300ms", "--json"))
    assert found["was"]["takeovers"] == found["as_it_was"]["takeovers"] == 0
    assert found["what_if"]["takeovers"] >= PARTITIONS // len(MEMBERS)
    assert found["was"]["standstill_ms"] > 0, "a partition stands still while its owner is frozen"
    assert_like(found["was"], found["as_it_was"])


def test_without_a_member_the_others_have_its_partitions_from_the_start(made: Made, command: Command) -> None:
    ran = command("what-if", made(DEATH), "--without-member", "w2", "--json")
    found = totals(ran)
    assert found["was"]["takeovers"] >= PARTITIONS // len(MEMBERS)
    assert found["what_if"]["takeovers"] == 0
    each = parts(ran).values()
    assert all(part["what_if"]["standstill_ms"] < 1000 * 2 * HI_S for part in each)


def test_without_all_members_nobody_works(made: Made, command: Command) -> None:
    all_of_them = [f"--without-member={name}" for name in MEMBERS]
    ran = command("what-if", made(DEATH), *all_of_them, "--json")
    (group,) = ran.json["groups"]
    assert {part["what_if"]["standstill_ms"] for part in parts(ran).values()} == {group["until"] - group["since"]}


def test_sticky_moves_less_than_range(made: Made, command: Command) -> None:
    found = totals(command("what-if", made(DEATH, strategy="range"), "--strategy", "sticky", "--json"))
    assert_like(found["was"], found["as_it_was"])
    assert found["what_if"]["moves"] < found["as_it_was"]["moves"]


def test_greedy_leaves_the_second_member_nothing(made: Made, command: Command) -> None:
    found = totals(command("what-if", made(DEATH), "--policy", "greedy", "--json"))
    assert found["what_if"]["moves"] == 0 < found["as_it_was"]["moves"]


def test_a_policy_of_old_can_be_named(made: Made, command: Command) -> None:
    ran = command("what-if", made(DEATH), "--policy", "balanced", "--policy-was", "greedy", "--json")
    assert totals(ran)["as_it_was"]["moves"] == 0 < totals(ran)["what_if"]["moves"]


def played(path: Path, seed: int = 0, seconds: int | None = None) -> tuple[GroupIntents, list[Span]]:
    """The group of a dump, and the spans of its replay as it was."""
    group, lives, cps = group_of(path)
    mode = Claims() if group.assignments is None else Group(strategy=cast("Strategy", group.strategy))
    end = group.end if seconds is None else group.begin + 1000 * seconds
    return group, replay(script_of(group, lives, mode, group.begin, end, cps, seed)).spans


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        (Fault(15, "term", "w3", 1_000), "roundrobin"),  # it leaves
        (Fault(15, "term", "w3", 3.0), None),  # it is redeployed
        (Fault(15, "crash", "w3", 0.5), None),  # it dies, and is back before its leases are stale
        (Fault(15, "crash", "w3", 0.5), "sticky"),
        (Fault(15, "stop", "w3", 5.0), None),  # it is frozen, and loses what it had
        (Fault(15, "stop", "w3", 5.0), "range"),
        (Fault(15, "pause", "", 4.0, 0.3), None),  # an admin pauses the group
        (Fault(15, "pause", "", 4.0, 0.3), "roundrobin"),
    ],
)
def test_the_replay_as_it_was_is_like_what_was(made: Made, fault: Fault, strategy: Strategy | None) -> None:
    group, spans = played(made(fault, strategy=strategy))
    lives = group.lives()
    was, replayed = (
        total(figures(group, lives, found, group.begin, group.end).values())._asdict() for found in (group.spans, spans)
    )
    assert_like(was, replayed)


def test_the_same_seed_plays_the_same_and_another_one_does_not(made: Made) -> None:
    dump = made(DEATH)
    first, second, other = (played(dump, seed, 20)[1] for seed in (0, 0, 7))
    assert first == second != other


def test_a_window_counts_what_happened_in_it(made: Made, command: Command) -> None:
    dump = made(DEATH, strategy="sticky")
    middle = time_text(group_of(dump)[0].begin + 10_000)
    asked = ("what-if", dump, "--session=1s", "--json")
    before, after = totals(command(*asked, f"--until={middle}")), totals(command(*asked, f"--since={middle}"))
    assert before["was"]["takeovers"] == before["what_if"]["takeovers"] == 0 < before["was"]["moves"]
    assert after["was"]["takeovers"] == after["as_it_was"]["takeovers"] == PARTITIONS // len(MEMBERS)
    assert after["was"]["moves"] == after["as_it_was"]["moves"] == 0, "the start is not in the window"


def test_people_see_three_columns_and_what_is_not_known(made: Made, command: Command) -> None:
    ran = command("what-if", made(DEATH), "--heartbeat-interval", "500ms")
    assert (ran.status, ran.err) == (0, "")
    assert ran.lines[0].startswith("group (claimed), 4 members, ")
    assert ran.lines[1] == "What if --heartbeat-interval 500ms"
    assert ran.lines[3].split("\t") == ["all partitions", "was", "replayed as it was", "what if"]
    assert [line.partition("\t")[0] for line in ran.lines[4:8]] == ["takeovers", "moves", "standstill", "repeats"]
    assert ran.lines[9].split("\t") == ["partition", "takeovers", "moves", "standstill", "repeats"]
    assert ran.lines[10].startswith("events 0\t")
    assert ran.lines[-5:] == ["What the replay can't know:", *(f"  {line}" for line in what_if.CANNOT_KNOW)]


# -- the lives that a log shows -----------------------------------------------------------------------------------


def group_of(path: Path) -> tuple[GroupIntents, list[MemberLife], int]:
    with path.open("rb") as lines:
        reader = DumpReader(lines)
        fold = Intents(reader.header.partitions)
        for cp, offset, stamp_ms, value in reader:
            fold.take(cp, (offset, stamp_ms, value))
    return fold.groups["group"], fold.groups["group"].lives(), reader.header.partitions


def lives_of(path: Path) -> dict[str, list[MemberLife]]:
    found: dict[str, list[MemberLife]] = {}
    for life in group_of(path)[1]:
        found.setdefault(life.client, []).append(life)
    return found


def test_lives_end_as_they_did(made: Made) -> None:
    faults = (DEATH, Fault(20, "term", "w4", 1_000), Fault(23, "stop", "w3", 5.0))
    found = lives_of(made(*faults))
    zero = BROKER_EPOCH_MS
    (first,), (dead,), (frozen,), (left,) = (found[name] for name in MEMBERS)
    assert first.end is None and not first.frozen
    assert dead.end == pytest.approx(zero + 15_000, abs=1000 * BEAT_S) and not dead.is_orderly
    assert left.end == pytest.approx(zero + 20_000, abs=200) and left.is_orderly
    ((since, until),) = frozen.frozen
    assert since == pytest.approx(zero + 23_000, abs=1000 * BEAT_S)
    assert until == pytest.approx(zero + 28_000, abs=200)


def test_a_member_that_is_back_lives_twice(made: Made) -> None:
    first, second = lives_of(made(Fault(15, "crash", "w3", 0.5)))["w3"]
    assert first.end is not None and first.end <= second.begin and second.end is None


# -- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ([], 2, "say what is to differ: --heartbeat-interval, --policy, --session, --strategy or --without-member."),
        (["--strategy", "sticky"], 2, "--strategy is of coordinated groups, and none of group is one."),
        (["--session", "5s"], 2, "--session is of coordinated groups"),
        (["--heartbeat-interval", "1h"], 2, "1h is not within 0.1 s and 10 min"),
        (["--without-member", "w9"], 1, "no member 'w9' wrote in it."),
        (["--policy", "greedy", "--group", "grup"], 1, "no group 'grup'; did you mean 'group'?"),
        (["--policy", "greedy", "--since", "2026-01-01T00:00Z"], 1, "--since and --until leave nothing of it"),
    ],
)
def test_what_does_not_apply_is_refused(made: Made, command: Command, asked: list[str], status: int, said: str) -> None:
    ran = command("what-if", made(DEATH), *asked)
    assert (ran.status, ran.out) == (status, "")
    assert said in ran.err


def test_an_interval_is_not_of_coordinated_groups(made: Made, command: Command) -> None:
    ran = command("what-if", made(DEATH, strategy="range"), "--heartbeat-interval", "1s")
    assert (ran.status, ran.out) == (2, "")
    assert "--heartbeat-interval is of claimed groups" in ran.err


def _without_line(lines: list[str]) -> list[str]:
    return [*lines[:30], *lines[31:]]


def _begun_late(lines: list[str]) -> list[str]:
    header = json.loads(lines[0])
    header["bounds"][0][0] = 5
    return [json.dumps(header), *lines[6:]]


@pytest.mark.parametrize(
    ("damaged", "status", "said"),
    [
        (_without_line, 1, "offsets 29 to 29 of partition 0 of the log are missing (pruned, cut or compacted)"),
        (_begun_late, 1, "offsets 0 to 4 of partition 0 of the log are missing"),
        (lambda lines: lines[:-3], 1, "of partition 1 of the log are missing"),
        (lambda lines: lines[:2], 1, "of partition 0 of the log are missing"),
        (lambda lines: lines[:0], 2, "the dump is empty"),
        (lambda lines: [*lines[:5], "{"], 2, "line 6: it is not JSON"),
        (lambda lines: [json.dumps({"topic": "t", "partitions": 2, "format": 1})], 1, "there is nothing to replay"),
    ],
    ids=["a gap", "pruned", "cut", "cut at once", "empty", "no dump", "no records"],
)
def test_a_log_that_is_not_whole_is_refused(
    made: Made, command: Command, tmp_path: Path, damaged: Callable[[list[str]], list[str]], status: int, said: str
) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_text("".join(f"{line}\n" for line in damaged(made(DEATH).read_text().splitlines())))
    ran = command("what-if", path, "--policy", "greedy")
    assert (ran.status, ran.out) == (status, "")
    assert said in ran.err


def test_a_log_that_is_too_long_is_refused_with_a_window_that_is_not(
    made: Made, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what_if, "MOST_READS", 1_000)
    ran = command("what-if", made(DEATH), "--heartbeat-interval", "500ms")
    assert (ran.status, ran.out) == (1, "")
    assert "group is too large to be replayed: 4 members over 3" in ran.err
    assert "what-if reads at most 1,000" in ran.err
    assert "with --since and --until" in ran.err
