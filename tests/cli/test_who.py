"""`who`: the history of one lease, and its owner at a moment."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_marshal.cli.log import _answer
from kafka_marshal.observe.ownership import Ownership
from kafka_marshal.observe.text import time_text
from rationalizer import (
    BeatEntry,
    ClaimingPartition,
    ClaimingShare,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    ReleasingPartition,
    SettlingMessages,
    Tick,
    Upgrade,
)
from rationalizer.history import Span
from rationalizer.limits import MAX_KEY_HASH
from tests.cli.harness import Command, Log
from tests.fleet import Fleet, let_go

A = ("a1", "a", "g")
A2 = ("a2", "a", "g")
B = ("b1", "b", "g")


def story() -> Log:
    """0: a claims. 2: a releases. 3: b claims, beats, dies. 6: a claims. 7: a's newer instance takes over."""
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1000), 1000)
    log.add(Heartbeat(*A, "t", 0, 0, 10), 1500)
    log.add(ReleasingPartition(*A, "t", 0, 0, 12), 2000)
    log.add(ClaimingPartition(*B, "t", 0, 1000), 3000)
    log.add(HeartbeatBatch(*B, (BeatEntry("t", 0, 3, 20),)), 3500)
    log.add(ClaimingPartition(*A, "t", 0, 1000), 5400)
    log.add(ClaimingPartition(*A, "t", 0, 1000), 5600)
    log.add(Heartbeat(*A2, "t", 0, None, None), 5700)
    log.add(Tick("i", "c", "g"), 9000)
    return log


def ask(command: Command, *args: str, log: Log | None = None) -> Any:
    ran = command("who", "g", "t", "0", "--json", "--from-dump", "-", *args, stdin=(log or story()).dump)
    assert ran.status == 0, ran.err
    return ran.json


def test_the_whole_history(command: Command) -> None:
    found = ask(command)
    spans = [
        (each["holder"] and each["holder"]["instance"], each["epoch"], each["since"], each["until"])
        for each in found["history"]
    ]
    assert spans == [
        ("a1", 0, 1000, 2000),
        (None, None, 2000, 3000),
        ("b1", 3, 3000, 5600),
        ("a1", 6, 5600, 5700),
        ("a2", 7, 5700, None),
    ]
    assert [each["ended"] for each in found["history"]] == [
        "released, next offset 13",
        "claimed by b",
        "silent for 2.1 s, then claimed by a",
        "its own newer instance took over",
        None,
    ]
    assert [(each["since_offset"], each["until_offset"]) for each in found["history"]][:2] == [(0, 2), (2, 3)]
    assert found["answer"]["holder"] == {"client": "a", "instance": "a2"}
    assert found["answer"]["state"] == "gone"
    assert (found["partition"], found["log_time"], found["next_offset"]) == (0, 9000, 9)


@pytest.mark.parametrize(
    ("at", "instance", "state"),
    [
        ("1000", "a1", "seen"),
        ("1999", "a1", "seen"),
        ("2000", None, "free"),
        ("2999", None, "free"),
        ("3000", "b1", "seen"),
        ("4499", "b1", "seen"),
        ("4500", "b1", "silent"),
        ("5500", "b1", "silent"),
        ("5501", "b1", "gone"),
        ("5600", "a1", "seen"),
        ("5700", "a2", "seen"),
        ("100000", "a2", "gone"),
    ],
)
def test_who_at_a_time(command: Command, at: str, instance: str | None, state: str) -> None:
    answer = ask(command, "--at", at)["answer"]
    assert (answer["holder"] and answer["holder"]["instance"], answer["state"]) == (instance, state)


@pytest.mark.parametrize(
    ("offset", "instance"), [(0, "a1"), (1, "a1"), (2, None), (3, "b1"), (5, "b1"), (6, "a1"), (7, "a2"), (8, "a2")]
)
def test_who_at_an_offset_of_the_log(command: Command, offset: int, instance: str | None) -> None:
    answer = ask(command, "--offset", str(offset))["answer"]
    assert (answer["holder"] and answer["holder"]["instance"]) == instance


def test_an_offset_above_the_log_is_wrong_use(command: Command) -> None:
    assert command("who", "g", "t", "0", "--offset", "9", "--from-dump", "-", stdin=story().dump).status == 2


def said(command: Command, *args: str, log: Log | None = None) -> str:
    ran = command("who", "g", "t", "0", "--from-dump", "-", *args, stdin=(log or story()).dump)
    assert ran.status == 0, ran.err
    return ran.out


def test_the_answer_in_words(command: Command) -> None:
    assert "b, epoch 3, since 1970-01-01T" in said(command, "--at", "3100")
    assert "silent for 2.1 s, then claimed by a" in said(command, "--at", "3100")
    assert "its lease had lapsed at" in said(command, "--at", "5501")
    assert "nobody, free since 1970-01-01T" in said(command, "--at", "2500")
    assert "It was first claimed at 1970-01-01T" in said(command, "--at", "999")
    assert "part of the log ends at" in said(command, "--at", "9001")
    assert "ends at" not in said(command, "--at", "9000")
    assert "Next offset: 13." in said(command, "--at", "2500")
    assert said(command).count("\n") == 11  # four lines, one empty line, titles, five spans


@pytest.mark.parametrize("owner", ["", "b"])
def test_before_the_log_begins_no_owner_is_made_up(owner: str) -> None:
    key = ("g", "t", 0)
    free = Span(key, False, "", "", 3, 100, 0, 100)
    spans = [free, Span(key, True, owner, "b/1", 5, 200, 5, 200)] if owner else [free]
    said = _answer(Ownership(key, 0, 1, at=50, spans=spans))
    assert said.endswith("by b." if owner else "nobody, as far back as the log goes.")


C = ("c1", "c", "g")
HALF = MAX_KEY_HASH // 2


def shared_story() -> Log:
    """1: a holds it whole, and is gone. 2, 3: a and b share it by batches. 4: a beats, b dies. 6: a has it by keys."""
    log = Log()
    log.add(Upgrade("i", "c", "g", 4), 900)
    log.add(ClaimingPartition(*A, "t", 0, 1000), 1000)
    log.add(ClaimingShare(*A, "t", 0, 1000), 4000)  # 2
    log.add(ClaimingShare(*B, "t", 0, 1000), 4500)  # 3
    log.add(SettlingMessages(*A, "t", 0, 2, 99, take=(10, 99, False)), 6000)  # 4
    log.add(SettlingMessages(*A, "t", 0, 2, 99, ((0, 9),), take=(10, 99, False)), 7000)  # 5: b ends
    log.add(ReleasingPartition(*B, "t", 0, 2, None), 7100)  # 6: an operator evicts a
    log.add(ReleasingPartition(*A, "t", 0, 2, None), 7100)  # 7
    log.add(ClaimingShare(*C, "t", 0, 1000, 0, HALF), 8000)  # 8: refused, a batch is open
    log.add(ClaimingPartition(*C, "t", 0, 1000), 8000)  # 9
    log.add(SettlingMessages(*C, "t", 0, 9, 99, ((10, 19),)), 8000)  # 10
    log.add(ReleasingPartition(*C, "t", 0, 9, 19), 8500)  # 11
    log.add(ClaimingShare(*C, "t", 0, 1000, 0, HALF), 9000)  # 12
    log.add(Heartbeat(*C, "t", 0, 12, 29), 9500)  # 13
    log.add(ClaimingShare(*B, "t", 0, 1000, HALF + 1, MAX_KEY_HASH), 9900)  # 14
    return log


def test_the_history_of_a_shared_partition(command: Command) -> None:
    found = ask(command, log=shared_story())
    batches, all_keys = None, [0, MAX_KEY_HASH]
    assert [
        (each["holder"] and each["holder"]["client"], each["keys"], each["since"], each["until"], each["ended"])
        for each in found["history"]
    ] == [
        ("a", all_keys, 1000, 4000, "silent for 3.0 s"),
        ("a", batches, 4000, 7100, "evicted by b, next offset 20"),
        ("b", batches, 4500, 7000, "silent for 2.5 s (an outage: nothing came to the log for 1.5 s of that)"),
        (None, all_keys, 7100, 8000, "claimed by c"),
        ("c", all_keys, 8000, 8500, "released, next offset 20"),
        (None, all_keys, 8500, 9000, "claimed by c"),
        ("c", [0, HALF], 9000, None, None),
        ("b", [HALF + 1, MAX_KEY_HASH], 9900, None, None),
    ]
    shown = said(command, log=shared_story())
    assert "by batches" in shown
    assert "0-50%" in shown


@pytest.mark.parametrize(
    ("at", "owners"),
    [
        ("3999", [("a", "gone", 0)]),
        ("4000", [("a", "seen", 0)]),
        ("5600", [("a", "silent", 0), ("b", "silent", 0)]),
        ("6501", [("a", "seen", 10), ("b", "gone", 10)]),
        ("7000", [("a", "seen", 20)]),
        ("7100", [(None, "free", 20)]),
        ("8600", [(None, "free", 20)]),
        ("9500", [("c", "seen", 30), (None, "free", 20)]),
        ("9900", [("c", "seen", 30), ("b", "seen", 20)]),
    ],
)
def test_who_shared_it_at_a_time(command: Command, at: str, owners: list[tuple[str | None, str, int]]) -> None:
    found = ask(command, "--at", at, log=shared_story())
    assert [
        (each["holder"] and each["holder"]["client"], each["state"], each["next"]) for each in found["answers"]
    ] == owners
    assert found["answer"] == found["answers"][0]


def test_sharers_in_words(command: Command) -> None:
    log = shared_story()
    shown = said(command, "--at", "6100", log=log)
    assert "by batches: a, epoch 2, since 1970-01-01T" in shown
    assert "by batches: b, epoch 3, since 1970-01-01T" in shown
    assert shown.endswith("Next offset: 10. Open: 10 messages.\n")
    assert shown.count("Next offset") == 1
    assert "nobody" not in shown
    shown = said(command, "--at", "9500", log=log)
    assert "keys 50-100%: nobody, free since" in shown
    assert "claimed by b)." in shown
    assert shown.count("Next offset") == 2


def test_a_lease_that_was_never_held(command: Command) -> None:
    for args in (["x", "t", "0"], ["g", "x", "0"], ["g", "t", "1"]):
        ran = command("who", *args, "--from-dump", "-", stdin=story().dump)
        assert ran.status == 1
        assert ("no group 'x'" if args[0] == "x" else "topic 'x'" if args[1] == "x" else "knows no lease") in ran.err
        assert ran.out == ""


def test_a_lease_of_a_group_that_was_forgotten(command: Command) -> None:
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1000), 1000)
    log.add(ForgetGroup(*B), 9000)
    found = ask(command, log=log)
    assert found["answer"] is None
    assert found["history"][0]["until"] == 9000
    assert found["history"][0]["ended"] == "the group was forgotten"
    assert "the group was forgotten at" in said(command, log=log)
    assert "a, epoch 0" in said(command, "--at", "5000", log=log)
    log.add(ClaimingPartition(*B, "t", 0, 1000), 9500)
    found = ask(command, log=log)
    assert found["answer"]["holder"]["client"] == "b"
    assert found["answer"]["epoch"] == 2


def test_only_its_own_part_of_the_log_counts(command: Command) -> None:
    """The same lease claimed where it does not belong is no claim."""
    log = Log(4)
    log.add(ClaimingPartition(*A, "t", 0, 1000), 1000)
    for cp in range(4):
        log.add(ClaimingPartition(*B, "t", 0, 1000), 9000, cp)
    found = ask(command, log=log)
    assert [each["holder"]["client"] for each in found["history"]] == ["a", "b"]


def test_a_replay_that_stopped_says_so(command: Command) -> None:
    log = story()
    log.add(Upgrade(*A, 109), 9001)
    log.add(ClaimingPartition(*B, "t", 0, 1000), 9002)
    ran = command("who", "g", "t", "0", "--from-dump", "-", stdin=log.dump)
    assert ran.status == 1
    assert "level 109" in ran.err
    assert "a, epoch 7" in ran.out


def test_a_bad_dump_is_named(command: Command) -> None:
    ran = command("who", "g", "t", "0", "--from-dump", "-", stdin=story().dump + b"x\n")
    assert ran.status == 2
    assert "line 11:" in ran.err


# -- coordinated groups --------------------------------------------------------------------------------------


class GroupLog(Log):
    """A log of four partitions with a coordinated group g; `now` is the log time of the next record."""

    def __init__(self, **options: str) -> None:
        super().__init__(4)
        self.now = 1_000
        self.fleet = Fleet("g", 4, lambda record, cp: self.add(record, self.now, cp), **options)
        self.fleet.upgrade()
        self.fleet.configure(accept_range_fetch=("t",))


def coordinated() -> GroupLog:
    """a has both partitions at 1,000; b joins at 2,000, and gets partition 1 at 2,500; it dies, and a finds out."""
    log = GroupLog()
    log.fleet.join("a", {"t": 2})
    log.now = 2_000
    generation = log.fleet.join("b", {"t": 2})
    log.now = 2_500
    log.fleet.commit("a", generation, let_go("t", 1, 41))
    for log.now in (9_000, 12_600):
        log.fleet.beat("a", generation)
    return log


def test_who_owned_a_piece_of_a_coordinated_group(command: Command) -> None:
    log = coordinated()
    found = command("who", "g", "t", "1", "--json", "--from-dump", "-", stdin=log.dump).json
    assert (found["kind"], found["partition"]) == ("coordinated", log.fleet.home)
    assert [
        (each["holder"] and each["holder"]["client"], each["since"], each["until"]) for each in found["history"]
    ] == [
        ("a", 1_000, 2_500),
        ("b", 2_500, 12_600),
        ("a", 12_600, None),
    ]
    assert [each["ended"] for each in found["history"]] == [
        "released, next offset 42; then b",
        "silent for 10 s (an outage: nothing came to the log for 6.5 s of that), then it went to a",
        None,
    ]
    assert (found["answer"]["holder"]["client"], found["answer"]["state"]) == ("a", "seen")
    assert found["answers"] == [found["answer"]]
    whole = command("who", "g", "t", "1", "--from-dump", "-", stdin=log.dump)
    assert whole.out.splitlines()[-1].endswith("all")
    assert "epoch" in whole.out


@pytest.mark.parametrize(
    ("at", "client", "state"),
    [
        ("1500", "a", "seen"),
        ("2499", "a", "seen"),
        ("2500", "b", "seen"),
        ("7001", "b", "silent"),
        ("12500", "b", "gone"),
        ("12600", "a", "seen"),
    ],
)
def test_who_owned_a_piece_at_a_time(command: Command, at: str, client: str, state: str) -> None:
    ran = command("who", "g", "t", "1", "--json", "--at", at, "--from-dump", "-", stdin=coordinated().dump)
    answer = ran.json["answer"]
    assert (answer["holder"]["client"], answer["state"]) == (client, state)
    text = command("who", "g", "t", "1", "--at", at, "--from-dump", "-", stdin=coordinated().dump).out
    assert ("its session had ended at" in text) == (state == "gone")
    assert ("more than half a session before" in text) == (state == "silent")


def test_who_owned_which_keys_of_a_shared_partition(command: Command) -> None:
    log = GroupLog(strategy="roundrobin")
    log.fleet.join("a", {"t": 1}, share=True)
    log.now = 2_000
    generation = log.fleet.join("b", {"t": 1}, share=True)
    log.now = 3_000
    log.fleet.commit("a", generation, let_go("t", 0, 9, lo=2**62, hi=2**63 - 1))
    found = command("who", "g", "t", "0", "--json", "--from-dump", "-", stdin=log.dump).json
    assert [(each["holder"]["client"], each["keys"]) for each in found["answers"]] == [
        ("a", [0, 2**62 - 1]),
        ("b", [2**62, 2**63 - 1]),
    ]
    ran = command("who", "g", "t", "0", "--from-dump", "-", stdin=log.dump)
    assert "Now, keys 0-50%: a, epoch" in ran.out
    assert "Now, keys 50-100%: b, epoch" in ran.out
    before = command("who", "g", "t", "0", "--json", "--at", "2999", "--from-dump", "-", stdin=log.dump).json
    assert {each["holder"]["client"] for each in before["answers"]} == {"a"}
    assert command("who", "g", "t", "0", "--offset", "3", "--from-dump", "-", stdin=log.dump).status == 0
    assert command("who", "g", "t", "0", "--offset", "99", "--from-dump", "-", stdin=log.dump).status == 2
    assert command("who", "h", "t", "0", "--from-dump", "-", stdin=log.dump).status == 1


def test_a_group_of_leases_that_became_a_coordinated_one_is_reported_as_that(command: Command) -> None:
    log = Log(4)
    log.add(ClaimingPartition(*A, "t", 0, 1000), 1000)
    for cp in range(4):
        log.add(ForgetGroup(*B), 9000, cp)
    fleet = Fleet("g", 4, lambda record, cp: log.add(record, 10_000, cp))
    assert ask(command, log=log)["kind"] == "claimed"
    fleet.upgrade()
    fleet.configure()
    fleet.join("a", {"t": 1})
    assert ask(command, log=log)["kind"] == "coordinated"


# -- after an outage -----------------------------------------------------------------------------------------


def frozen() -> GroupLog:
    """a and b beat; nothing comes for 60 s; a is heard first (G8), and b never: a session later it is gone."""
    log = GroupLog()
    log.fleet.join("a", {"t": 2}, session=9_000)
    generation = log.fleet.join("b", {"t": 2}, session=9_000)
    log.fleet.commit("a", generation, let_go("t", 1, 41))
    for log.now in (4_000, 7_000):
        for client in ("a", "b"):
            log.fleet.beat(client, generation)
    for log.now in (67_000, 70_000, 73_000, 76_001):
        log.fleet.beat("a", generation)
    return log


def test_silence_is_counted_from_the_members_own_last_record_and_the_outage_is_named(command: Command) -> None:
    """The log begins all sessions again after an outage: that is no sign of life."""
    log = frozen()
    found = command("who", "g", "t", "1", "--json", "--from-dump", "-", stdin=log.dump).json
    assert [each["ended"] for each in found["history"]][1] == (
        "silent for 1 min 9 s (an outage: nothing came to the log for 1 min of that), then it went to a"
    )
    at = command("who", "g", "t", "1", "--at", "76001", "--from-dump", "-", stdin=frozen().dump).out
    assert "b, epoch" not in at
    log.lines.pop()  # what found it out
    log.add(Tick("i", "c", "g"), 76_001, log.fleet.home)
    now = command("who", "g", "t", "1", "--from-dump", "-", stdin=log.dump).out
    assert f"But silent since {time_text(7_000)}, with an outage of the whole log of 1 min: its session" in now
    assert f"had ended at {time_text(76_000)}" in now


def test_the_log_names_an_outage_and_a_silence_from_the_own_last_record(command: Command) -> None:
    rows = command("log", "--from-dump", "-", stdin=frozen().dump).rows
    last = [row["why"] for row in rows if row["group"] == "g"][-4:]
    assert last[0].endswith("after an outage: nothing came to this partition of the log for 1 min")
    assert "b was silent for 1 min 9 s" in last[-1]


def test_an_outage_of_a_claimed_groups_log_is_named(command: Command) -> None:
    """One that was silent alone made no outage: see above."""
    log = Log()
    log.add(ClaimingPartition(*A, "t", 0, 1000), 1000)
    log.add(ClaimingPartition(*B, "t", 1, 1000), 1000)
    log.add(HeartbeatBatch(*B, (BeatEntry("t", 1, 1, 20),)), 1500)
    log.add(HeartbeatBatch(*B, (BeatEntry("t", 1, 1, 20),)), 61_500)
    log.add(HeartbeatBatch(*B, (BeatEntry("t", 1, 1, 20),)), 62_500)
    log.add(ClaimingPartition(*B, "t", 0, 1000), 63_600)
    ended = ask(command, log=log)["history"][0]["ended"]
    assert ended == "silent for 1 min 3 s (an outage: nothing came to the log for 1 min of that), then claimed by b"
    whys = [row["why"] for row in command("log", "--from-dump", "-", stdin=log.dump).rows]
    assert [why for why in whys if "outage" in why] == [
        "after an outage: nothing came to this partition of the log for 1 min"
    ]
