"""Descriptions of records and outcomes: every kind of record, every code."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.observe import words
from kafka_marshal.observe.fold import Fold
from kafka_marshal.observe.text import clock_text, count, is_absolute, parse_span, parse_time, span, time_text
from kafka_marshal.observe.words import is_beat, reason, what
from kafka_marshal.secret import visible
from rationalizer import (
    AnswerBarrier,
    BeatEntry,
    BeginCheckpoint,
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    CommitEntry,
    CommitOffsets,
    CommitRanges,
    ConfigureGroup,
    ForgetGroup,
    GroupHeartbeat,
    Heartbeat,
    HeartbeatBatch,
    JoinGroup,
    KeepCheckpoint,
    LeaveGroup,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Rollback,
    SettleOffsets,
    SettlingMessages,
    Tick,
    TopicsChanged,
    Upgrade,
    World,
    codes,
    encode,
    route_lease,
)
from rationalizer.wire.records import KINDS
from rationalizer.wire.wellformed import END, LET_GO, PIN, REACHED, REACHED_AND_LEAVES, REFUSED, RETIRE, START
from tests.fleet import Fleet, cut, let_go, started

A = ("a1", "a", "g")
B = ("b1", "b", "g")

RECORDS: list[tuple[Record, str]] = [
    (ClaimingPartition(*A, "t", 3, 3000), "claims t/3 (beats every 3.0 s or sooner)"),
    (Heartbeat(*A, "t", 3, 0, 41), "beats for t/3, done to 41"),
    (Heartbeat(*A, "t", 3, 0, None), "beats for t/3"),
    (Heartbeat(*A, "t", 3, None, -1), "restarts on t/3, done to nothing"),
    (ReleasingPartition(*A, "t", 3, 0, 7), "releases t/3, done to 7"),
    (ClaimingMessages(*A, "t", 3, 0, 99), "takes messages of t/3 up to 99, at most once"),
    (ReleaseGroup(*A, 0), "lets the group go on"),
    (ReleaseGroup(*A, 2**62), f"pauses the group until {2**62} ms"),
    (HeartbeatBatch(*A, (BeatEntry("t", 3, 0, 5), BeatEntry("t", 4, 0, None))), "beats for t/3=5, t/4"),
    (CommitRanges(*A, "t", 3, 0, ((1, 1), (4, 9))), "has done 1, 4-9 of t/3"),
    (ForgetGroup(*A), "forgets the group"),
    (ClaimingShare(*A, "t", 3, 3000), "claims a share of t/3, by batches (beats every 3.0 s or sooner)"),
    (ClaimingShare(*A, "t", 3, 3000, 0, 9), "claims a share of t/3, key hashes 0 to 9 (beats every 3.0 s or sooner)"),
    (ClaimingShare(*A, "t", 3, 3000, 0, 2**63 - 1), "claims a share of t/3, all keys (beats every 3.0 s or sooner)"),
    (SettlingMessages(*A, "t", 3, 7, 9), "of t/3: beats"),
    (
        SettlingMessages(*A, "t", 3, 7, 9, ((1, 4), (6, 6)), ((5, 5, 1, 2),), (), (50, 99, True)),
        "of t/3: has done 1-4, 6; opens 5 after 2 deliveries; takes up to 50 messages, at most once",
    ),
    (SettlingMessages(*A, "t", 3, None, 9, open=((5, 5, None, 0),)), "as an operator, of t/3: redrives 5"),
    (
        SettleOffsets(*A, "g-1", 7, 9, "t", 3, (), ((5, 5, 1, 1),), ((6, 1, 5, "Bad"), (8, 1, 5, "Bad"))),
        "of t/3: opens 5 after 1 delivery; parks 6, 8 (Bad)",
    ),
    (SettleOffsets(*A, "", 0, 9, "t", 3, ((5, 5),)), "as an operator, of t/3: discards 5"),
    (JoinGroup(*A, "", 7, 10_000, "sticky", False, "", (("t", 3), ("u", 1))), "joins for t, u: sticky, session 10 s"),
    (
        JoinGroup(*A, "g-1", 7, 10_000, "range", True, "t.*", (("t", 3),)),
        "joins again for topics like t.* (t): range, session 10 s, may share partitions by key",
    ),
    (
        JoinGroup(*A, "", 7, 10_000, "range", False, "t.*", ()),
        "joins for topics like t.* (none yet): range, session 10 s",
    ),
    (GroupHeartbeat(*A, "g-1", 70), "beats, knows generation 70"),
    (LeaveGroup(*A, "g-1", 70), "leaves the group, knows generation 70"),
    (TopicsChanged(*A, "g-1", (("t", 3), ("u", 0))), "sees topics: t (3), u (0)"),
    (ConfigureGroup(*A), "makes it a coordinated group"),
    (
        ConfigureGroup(*A, (("accept_individual_commit", False), ("accept_range_fetch", ("t", "u")))),
        "sets accept_individual_commit=false, accept_range_fetch=t,u",
    ),
    (
        CommitOffsets(
            *A,
            "g-1",
            70,
            True,
            (
                CommitEntry("t", 0, through=41),
                CommitEntry("t", 1, ranges=((3, 3), (7, 9))),
                CommitEntry("t", 2, 0, 2**62 - 1, LET_GO, 5),
                CommitEntry("t", 3, action=START, through=-1, metadata="m"),
            ),
        ),
        "starts t/3=nothing (with metadata); has done t/0=41, t/1: 3, 7-9; lets go of t/2 (0-50%)=5, in order",
    ),
    (CommitOffsets(*A, "", 0, False, (CommitEntry("t", 0, through=41),)), "sets positions: t/0=41"),
    (
        BeginCheckpoint(*A, 0, 100, 0, True),
        "begins the first checkpoint of the group, of all members at one moment, keeps 1",
    ),
    (BeginCheckpoint(*A, 7, 60_000, 3, False), "begins a checkpoint after 7: keeps 3, waits for 1 min at most"),
    (BeginCheckpoint(*A, 7, 60_000, 0, False), "begins a checkpoint after 7: for a hand-over, waits for 1 min at most"),
    (AnswerBarrier(*A, "g-1", 70, 72, REFUSED, ()), "can't take checkpoint 72"),
    (AnswerBarrier(*A, "g-1", 70, 72, REACHED, ()), "hands in for checkpoint 72: nothing new"),
    (
        AnswerBarrier(*A, "g-1", 70, 72, REACHED_AND_LEAVES, (CommitEntry("t", 0, through=41),)),
        "hands in for checkpoint 72: t/0=41; leaves",
    ),
    (AnswerBarrier(*A, "g-1", 70, 0, REACHED, ()), "beats, knows generation 70"),
    (Rollback(*A, 70, 48), "puts the group back to checkpoint 48, knows generation 70"),
    (Rollback(*A, 70, 0), "puts the group back to the newest checkpoint, knows generation 70"),
    (KeepCheckpoint(*A, 48, PIN), "pins checkpoint 48"),
    (KeepCheckpoint(*A, 48, RETIRE), "retires checkpoint 48"),
    (KeepCheckpoint(*A, 48, END), "ends the checkpoints of the group, the newest is 48"),
    (Tick(*A), "tells the time"),
    (Tick("i", "c", "partitions=8"), "fixes the number of partitions of the log at 8"),
    (Upgrade(*A, 2), "raises the log to level 2"),
]


def test_every_kind_of_record_has_words() -> None:
    assert sorted(record.__name__ for record in words._WORDS) == sorted(kind.name for kind in KINDS.values())


@pytest.mark.parametrize(("record", "words"), RECORDS, ids=lambda x: type(x).__name__ if isinstance(x, Record) else "")
def test_what_a_record_says(record: Record, words: str) -> None:
    assert what(record, encode(record), 1000) == words


def test_what_is_no_record() -> None:
    assert what(None, None, 0) == "no value"
    assert what(None, b"\xc1", 0) == "1 byte, not a record"


def test_long_lists_are_cut() -> None:
    entries = tuple(BeatEntry("t", number, 0, None) for number in range(1_000))
    assert what(HeartbeatBatch(*A, entries), b"", 0) == "beats for t/0, t/1, t/2, t/3, t/4 and 995 more"


class Story:
    """One CP, record by record, with the `reason` of each."""

    def __init__(self) -> None:
        self.world, self.fold = World(0, 1), Fold()
        self.fold.begin(self.world)

    def __call__(self, record: Record | bytes | None, at: int) -> tuple[str, str]:
        value = encode(record) if isinstance(record, Record) else record
        outcome = self.world.apply(self.world.next_offset, at, value)
        why = reason(outcome, outcome.record, value, self.world, self.fold.before(outcome, 0))
        self.fold.see(0, outcome)
        return outcome.code, why


CLAIM = ClaimingPartition(*A, "t", 0, 1000)


@pytest.mark.usefixtures("environment")
def test_why_each_code() -> None:
    tell = Story()
    told = [
        tell(CLAIM, 1000),
        tell(CLAIM, 1001),
        tell(ClaimingPartition(*B, "t", 0, 1000), 1500),
        tell(Heartbeat(*B, "t", 0, 0, 4), 1500),
        tell(Heartbeat(*A, "t", 0, 0, 4), 1500),
        tell(Heartbeat(*A, "t", 0, 0, 3), 1600),
        tell(CommitRanges(*A, "t", 0, 0, ((1, 2),)), 1600),
        tell(CommitRanges(*A, "t", 0, 0, ((8, 9),)), 1600),
        tell(CommitRanges(*A, "t", 0, 0, ((8, 9),)), 1600),
        tell(ClaimingMessages(*A, "t", 0, 0, 2), 1600),
        tell(HeartbeatBatch(*A, (BeatEntry("t", 0, 0, None), BeatEntry("t", 0, 7, None))), 1600),
        tell(ForgetGroup(*A), 1600),
        tell(ClaimingMessages(*A, "t", 0, 0, 100), 9000),
        tell(Heartbeat("a2", "a", "g", "t", 0, None, None), 9000),
        tell(ClaimingPartition(*B, "t", 0, 1000), 9000),
        tell(Heartbeat("b2", "b", "g", "t", 0, None, None), 9100),
        tell(ReleaseGroup("x", "admin", "g", 50_000), 9100),
        tell(CLAIM, 9100),
        tell(ReleasingPartition("b2", "b", "g", "t", 0, 15, None), 9100),
        tell(ClaimingPartition("x", "admin", "g", "t", 0, 1000), 9100),
        tell(Heartbeat("x", "admin", "g", "t", 0, 19, 2), 9100),
        tell(ReleasingPartition("x", "admin", "g", "t", 0, 19, None), 9100),
        tell(ReleasingPartition("x", "admin", "g", "t", 0, 19, None), 9100),
        tell(None, 9100),
        tell(b"\xc1", 9100),
        tell(b"\x95\x02\x20\xa1i\xa1c\xa1g", 9100),
        tell(b"\x95\x01\x63\xa1i\xa1c\xa1g", 9100),
    ]
    assert told[0] == ("OK", "granted, epoch 0")
    assert told[1] == ("ALREADY_HELD", "holds it already, epoch 0")
    assert told[2] == ("HELD", "a holds it, epoch 0, last beat 0.5 s before")
    assert told[3] == ("FENCED", "a holds it, epoch 0")
    assert told[4] == ("OK", "")
    assert told[5] == ("OFFSET_REGRESSION", "all is done to 4 already: the position stays, the rest counts")
    assert told[6] == ("INDIVIDUAL_COMMIT_TOO_OLD", "all is done to 4 already")
    assert told[7] == ("OK", "")
    assert told[8] == ("DUPLICATE_COMMIT", "What lies above stable was all done before; nothing changed.")
    assert told[9] == ("PROPOSAL_TOO_LOW", "all is done, or given out, to 4 already")
    assert told[10] == ("PARTIAL", "t/0 FENCED")
    assert told[11] == ("GROUP_ACTIVE", "somebody holds a lease of the group and is not stale")
    assert told[12] == ("STALE", "last beat 7.4 s before, at an interval of 1.0 s")
    assert told[13] == ("NOT_FRESH", "last beat 7.4 s before, at an interval of 1.0 s")
    assert told[14] == ("OK", "granted, epoch 14; a was silent for 7.4 s")
    assert told[15] == ("OK", "took over from its earlier instance, silent for 0.1 s; epoch 15")
    assert told[16] == ("OK", "")
    assert told[17][0] == "PAUSED"
    assert told[17][1].startswith("admin has the group paused until 1970-01-01T")
    assert told[18] == ("OK", "")
    assert told[20] == ("REPOSITIONED", "the position was replaced")
    assert told[22] == ("NOT_HELD", "nobody holds it")
    assert told[23] == ("MALFORMED", "a record without a value")
    assert told[24][0] == "MALFORMED"
    assert told[24][1]
    assert told[25][0] == "UNSUPPORTED_VERSION"
    assert told[26][0] == "UNKNOWN_TYPE"
    assert told[26][1]
    seen = {code for code, _ in told}
    others = {codes.WRONG_PARTITION, codes.MAX_INDIVIDUAL_COMMIT_REACHED}
    assert seen | others == {row.code for row in codes.TABLE} - OF_COORDINATED - OF_CHECKPOINTS - OF_SHARING
    assert all(why for code, why in told if code != "OK")


#: Outcomes of shares and open messages: in the test below.
OF_SHARING = {codes.NOTHING_TO_TAKE, codes.WRONG_MODE}


@pytest.mark.usefixtures("environment")
def test_why_each_code_of_shares_and_open_messages() -> None:
    tell, lease = Story(), ("t", 0)
    tell(Upgrade("1", "admin", "g", 4), 1000)
    assert tell(ClaimingShare(*A, *lease, 1000, None, None, 0), 1000) == ("OK", "granted, epoch 1")
    assert tell(ClaimingShare(*A, *lease, 1000), 1000) == ("ALREADY_HELD", "a shares it")
    assert tell(ClaimingShare(*B, *lease, 1000, 0, 5), 1000) == ("HELD", "a shares it")
    assert tell(ClaimingPartition(*B, *lease, 1000), 1000) == ("HELD", "a shares it")
    assert tell(SettlingMessages(*A, *lease, 1, 5, take=(10, 99, False)), 1000) == ("OK", "took 0-9")
    assert tell(SettlingMessages(*A, *lease, 1, 5, take=(10, 99, False)), 1000)[0] == "NOTHING_TO_TAKE"
    settled = SettlingMessages(*A, *lease, 1, 7, ((0, 3), (50, 60)), ((4, 6, None, 0),), ((7, 9, 5, "Bad"),))
    assert tell(settled, 1000) == ("PARTIAL", "50-60 FENCED")
    assert tell(SettlingMessages(*B, *lease, 1, 9, ((0, 3),)), 1000) == ("FENCED", "a shares it")
    assert tell(SettlingMessages(*B, *lease, None, 9, ((4, 5), (70, 70))), 1000) == ("PARTIAL", "70 FENCED")
    assert tell(SettlingMessages(*B, *lease, None, 9, ((70, 70),)), 1000) == ("FENCED", "70 FENCED")
    assert tell(ClaimingMessages(*A, *lease, 1, 50), 1000)[0] == "WRONG_MODE"
    assert tell(ReleasingPartition(*A, *lease, 1, None), 1000) == ("OK", "")
    assert tell(SettlingMessages(*A, *lease, 1, 9, ((4, 5),)), 1000) == ("NOT_HELD", "nobody holds it")


class GroupStory(Story):
    """One CP with a coordinated group; `last` is the description of the last record."""

    def __init__(self, level: int = 2) -> None:
        super().__init__()
        self.now = 1_000
        self.told: list[tuple[str, str]] = []
        self.fleet = Fleet("g", 1, self.append)
        self.fleet.upgrade(level)

    def append(self, record: Record, cp: int) -> int:
        self.told.append(self(record, self.now))
        return self.world.next_offset - 1

    @property
    def last(self) -> tuple[str, str]:
        return self.told[-1]


@pytest.mark.usefixtures("environment")
def test_why_each_code_of_a_coordinated_group() -> None:
    story = GroupStory()
    fleet = story.fleet
    story.append(CommitOffsets(*A, "g-1", 0, False, (CommitEntry("t", 0, through=1),)), 0)
    assert story.last == ("UNKNOWN_CONSUMER", "there is no such group")
    first = fleet.join("a", {"t": 2})
    assert story.last == ("OK", f"generation {first}, 1 member")
    story.append(ClaimingPartition(*B, "t", 0, 1000), 0)
    assert story.last == (
        "WRONG_KIND",
        "it is a coordinated group: kafka-marshal convert-group --to claimed makes it another",
    )
    second = fleet.join("b", {"t": 2})
    assert story.last == ("OK", f"generation {second}, 2 members")
    ids = fleet.ids("a")
    story.append(JoinGroup(*ids, 99, 10_000, "sticky", False, "", (("t", 2),)), 0)
    assert story.last == ("ALREADY_MEMBER", f"nothing changed, generation {second}")
    fleet.beat("a", first)
    assert story.last == ("ILLEGAL_GENERATION", f"the generation is {second} by now")
    fleet.beat("a", second)
    assert story.last == ("OK", "")
    fleet.beat("a", second + 9)
    assert story.last == ("ILLEGAL_GENERATION", f"the generation is {second}, and was never above")
    fleet.commit("a", second, let_go("t", 1, 4), let_go("t", 0, 3), CommitEntry("t", 1, through=9))
    assert story.last == ("PARTIAL", "t/1 NOT_ASSIGNED")
    fleet.commit("a", second, *started("t", 0), *started("t", 1))
    assert story.last == ("PARTIAL", "t/0 ALREADY_STARTED, t/1 NOT_ASSIGNED")
    story.append(JoinGroup(*ids[:3], "", 1, 10_000, "range", False, "", (("t", 2),)), 0)
    assert story.last == ("INCONSISTENT_PARTITIONING_STRATEGY", "b have sticky")
    story.append(JoinGroup("a2", "a", "g", "", 1, 10_000, "sticky", False, "", (("t", 2),)), 0)
    assert story.last == ("REPLACED", f"its successor {ids[0]} joined at {story.world.groups()[0].clients['a'].joined}")
    story.append(JoinGroup("c1", "c", "g", "", 99, 2**31 - 1, "sticky", False, "", (("t", 2),)), 0)
    assert story.last == ("SESSION_TIMEOUT_TOO_HIGH", "the group allows 30 min")
    story.append(JoinGroup("c1", "c", "g", "", 99, 1_000, "best", False, "", (("t", 2),)), 0)
    assert story.last == ("UNKNOWN_PARTITIONING_STRATEGY", "The strategy is not one of G17's.")
    story.append(GroupHeartbeat("a2", *ids[1:], second), 0)
    assert story.last == ("UNKNOWN_CONSUMER", f"the member is {ids[0]}, {ids[3]}")
    story.append(LeaveGroup("operator", *ids[1:], second), 0)
    assert story.last == ("UNKNOWN_CONSUMER", "an operator asks the member to hand over, and to leave")
    story.append(CommitOffsets("x", "admin", "g", "", 0, False, (CommitEntry("t", 0, through=1),)), 0)
    assert story.last == ("UNKNOWN_CONSUMER", "it has not paused the group")
    story.append(ReleaseGroup("x", "admin", "g", 50_000), 0)
    story.append(ForgetGroup("x", "admin", "g"), 0)
    assert story.last == ("GROUP_ACTIVE", "members are there: a, b")
    fleet.leave("b", second)
    assert story.last[0] == "OK"
    assert story.last[1].endswith(", 1 member")
    assert all(why for code, why in story.told if code != "OK")


#: Outcomes of coordinated groups: in the test above, or with the protocol's descriptions.
OF_COORDINATED = {
    *(codes.ALREADY_MEMBER, codes.UNKNOWN_CONSUMER, codes.ILLEGAL_GENERATION, codes.WRONG_KIND, codes.REPLACED),
    *(codes.INCONSISTENT_PARTITIONING_STRATEGY, codes.UNKNOWN_PARTITIONING_STRATEGY, codes.SESSION_TIMEOUT_TOO_HIGH),
    *(codes.GROUP_FULL, codes.TOO_MANY_PARTITIONS, codes.NOT_ASSIGNED, codes.ALREADY_STARTED, codes.OUT_OF_ORDER),
    codes.INDIVIDUAL_COMMIT_NOT_ALLOWED,
}

#: Outcomes of checkpoints: in the test below, or with the protocol's descriptions.
OF_CHECKPOINTS = {
    *(codes.NO_SUCH_BARRIER, codes.ALREADY_ANSWERED, codes.BARRIER_OPEN, codes.UNKNOWN_CHECKPOINT),
    *(codes.NEWEST_CHECKPOINT, codes.TOO_MANY_CHECKPOINTS),
}


def test_why_each_code_of_checkpoints() -> None:
    story = GroupStory(level=3)
    fleet = story.fleet
    fleet.configure()
    first = fleet.begin("w1", 0)
    assert story.last == ("OK", "")
    generation = fleet.join("w1", {"t": 2})
    fleet.commit("w1", generation, *started("t", 0, 1))
    fleet.begin("w1", 77)
    assert story.last == ("UNKNOWN_CHECKPOINT", f"the newest is {first}")
    barrier = fleet.begin("w1", first)
    assert story.last == ("OK", "waits for w1")
    fleet.begin("w1", first)
    assert story.last == ("BARRIER_OPEN", f"{barrier} is being taken")
    fleet.answer("w1", generation, barrier, cut("t", 7, 4))
    assert story.last == ("PARTIAL", "t/7 NOT_ASSIGNED")
    fleet.answer("w1", generation, barrier, cut("t", 0, 4))
    assert story.last == ("OK", "")
    fleet.answer("w1", generation, barrier)
    assert story.last == ("NO_SUCH_BARRIER", "no checkpoint is being taken")
    fleet.commit("w1", generation, cut("t", 0, 5))
    assert story.last == ("PARTIAL", "t/0 NO_SUCH_BARRIER")
    story.append(KeepCheckpoint("x", "operator", "g", barrier, RETIRE), 0)
    assert story.last == ("NEWEST_CHECKPOINT", "The newest checkpoint can't be retired.")
    story.append(Rollback("x", "operator", "g", 1, barrier), 0)
    assert story.last == ("ILLEGAL_GENERATION", f"the generation is {generation} by now")
    story.append(Rollback("x", "operator", "g", generation, first), 0)
    code, why = story.last
    assert (code, why.partition(",")[0]) == ("OK", f"generation {story.world.next_offset - 1}")


def test_where_a_record_in_the_wrong_partition_belongs() -> None:
    home = route_lease("t", 0, 4)
    for cp in sorted({0, 1, 2, 3} - {home}):
        world = World(cp, 4)
        value = encode(CLAIM)
        outcome = world.apply(0, 1000, value)
        assert outcome.code == codes.WRONG_PARTITION
        assert reason(outcome, outcome.record, value, world, None) == f"it belongs to partition {home} of the log"


def test_records_that_only_show_that_a_sender_lives() -> None:
    world = World(0, 1)
    beats = []
    for record in (CLAIM, Heartbeat(*A, "t", 0, 0, 1), Heartbeat(*A, "t", 0, 0, 0), Tick(*A), ForgetGroup(*A)):
        outcome = world.apply(world.next_offset, 1000, encode(record))
        beats.append(is_beat(outcome, outcome.record))
    assert beats == [False, True, False, True, False]


def test_what_only_shows_that_a_member_lives() -> None:
    story = GroupStory()
    generation = story.fleet.join("a", {"t": 1})
    found = []
    for record in (
        GroupHeartbeat(*story.fleet.ids("a"), generation),
        CommitOffsets(*story.fleet.ids("a"), generation, False, tuple(started("t", 0))),
        CommitOffsets(*story.fleet.ids("a"), generation, False, (CommitEntry("t", 0, through=5),)),
        CommitOffsets(*story.fleet.ids("a"), generation, False, (let_go("t", 0),)),
    ):
        outcome = story.world.apply(story.world.next_offset, 1_000, encode(record))
        assert outcome.code == codes.OK
        found.append(is_beat(outcome, outcome.record))
    assert found == [True, False, True, False]


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("commits", [False, True], ids=["beat", "commit"])
def test_a_record_that_expires_another_member_is_described_so(commits: bool) -> None:
    """A member's expiry is recorded only in another's record, so its description must mention it."""
    story = GroupStory()
    fleet = story.fleet
    fleet.join("a", {"t": 1})
    generation = fleet.join("b", {"t": 1})
    story.now = 9_000
    fleet.commit("a", generation, *started("t", 0))
    story.now = 12_500
    ids = fleet.ids("a")
    record = (
        CommitOffsets(*ids, generation, False, (CommitEntry("t", 0, through=5),))
        if commits
        else GroupHeartbeat(*ids, generation)
    )
    outcome = story.world.apply(story.world.next_offset, story.now, encode(record))
    assert outcome.silent == (("b", 11_500),)
    assert not is_beat(outcome, record)
    last = story.world.next_offset - 1
    told = f"generation {last}, 1 member" if commits else f"the generation is {last} by now"
    assert reason(outcome, record, None, story.world, None) == f"{told}; b was silent for 12 s"
    quiet = story.world.apply(last + 1, story.now, encode(GroupHeartbeat(*ids, last)))
    assert quiet.silent == ()
    assert is_beat(quiet, quiet.record)
    elsewhere = story.world.apply(last + 2, story.now, encode(Tick(*A)))
    assert elsewhere.silent == ()


# -- Text for people: escaping, times, spans ----------------------------------------------------------------------


@given(st.text(st.characters(codec=None)))
def test_whatever_it_was_it_is_harmless_afterwards(text: str) -> None:
    assert visible(text).isprintable()


@given(st.text(st.characters(min_codepoint=32, max_codepoint=126)))
def test_plain_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b]0;pwned\x07", "\\x1b]0;pwned\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u202egpj.exe", "a\\u202egpj.exe"),
        ("a\u2066b\u2069", "a\\u2066b\\u2069"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("tag\U000e0041", "tag\\U000e0041"),
        ("line\nline\ttab\r", "line\\nline\\ttab\\r"),
        ("\u2028\u2029\xa0", "\\u2028\\u2029\\xa0"),
        ("\ud800", "\\ud800"),
        ("Zürich 東京 😀", "Zürich 東京 😀"),
    ],
)
def test_what_is_not_plainly_visible_is_escaped(raw: str, shown: str) -> None:
    assert visible(raw) == shown


@pytest.fixture
def in_kolkata(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_kolkata")
def test_times_are_local_and_say_so() -> None:
    assert time_text(1_700_000_000_123) == "2023-11-15T03:43:20.123+05:30"
    assert parse_time("2023-11-15T03:43:20.123", 0) == 1_700_000_000_123
    assert parse_time("2023-11-14T22:13:20.123Z", 0) == 1_700_000_000_123


@given(st.integers(0, 253_402_300_000_000))
def test_a_time_that_was_written_is_read_again(time_ms: int) -> None:
    assert parse_time(time_text(time_ms), 0) == time_ms


@pytest.mark.parametrize("time_ms", [2**63 - 1, 253_402_400_000_000, -(2**62)])
def test_a_time_that_no_calendar_reaches_is_shown_as_its_number(time_ms: int) -> None:
    assert time_text(time_ms) == f"{time_ms} ms"


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1700000000000", 1_700_000_000_000),
        ("now", 1_000_000),
        ("10s", 990_000),
        ("-10s", 990_000),
        ("10s ago", 990_000),
        ("5 m ago", 700_000),
    ],
)
def test_other_ways_to_write_a_time(text: str, ms: int) -> None:
    assert parse_time(text, 1_000_000) == ms


@pytest.mark.usefixtures("in_kolkata")
@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("14:00", "2026-11-25T14:00"),
        ("03:14", "2026-11-25T03:14"),
        ("3:14:05.5", "2026-11-25T03:14:05.500"),
        ("00:01", "2026-11-25T00:01"),  # of today, however long ago
        ("yesterday 03:14", "2026-11-24T03:14"),
        ("Yesterday  14:00", "2026-11-24T14:00"),
        ("yesterday", "2026-11-24T00:00"),
        ("today", "2026-11-25T00:00"),
        ("today 23:50", "2026-11-25T23:50"),
    ],
)
def test_times_of_day_are_local(text: str, time: str) -> None:
    now = parse_time("2026-11-25T14:00:30+05:30", 0)
    assert parse_time(text, now) == parse_time(f"{time}+05:30", 0)


@pytest.mark.usefixtures("in_kolkata")
def test_a_position_moves_to_no_time_of_day_that_is_still_to_come_and_was_long_ago() -> None:
    soon_after_midnight = parse_time("2026-11-25T00:10+05:30", 0)
    for text in ("23:50", "12:10"):
        expected = parse_time(f"2026-11-24T{text}+05:30", 0)
        assert parse_time(text, soon_after_midnight) == parse_time(text, soon_after_midnight, moves=True) == expected
    with pytest.raises(ValueError, match=r"12 h 1 min ago \(2026-11-24T12:09:00.000\+05:30\).*write yesterday 12:09"):
        parse_time("12:09", soon_after_midnight, moves=True)
    long_ago = parse_time("2026-11-24T12:09+05:30", 0)
    assert parse_time("yesterday 12:09", soon_after_midnight, moves=True) == long_ago
    assert parse_time("12:09", soon_after_midnight) == long_ago  # a question about the past moves nothing


@pytest.mark.parametrize("text", ["03:14", "yesterday", "10m", "now", "2026-11-21 04:50", "2026-11-21"])
def test_what_depends_on_where_or_when_it_is_read_is_not_absolute(text: str) -> None:
    assert not is_absolute(text)


@pytest.mark.parametrize("text", ["1700000000123", "2026-11-21T04:50:12Z", "2026-11-21 04:50+05:30"])
def test_what_is_one_moment_everywhere_is_absolute(text: str) -> None:
    assert is_absolute(text)


@pytest.mark.usefixtures("in_kolkata")
def test_times_for_people_are_as_short_as_they_can_be() -> None:
    now = parse_time("2026-11-25T14:00:30+05:30", 0)
    shown = [
        clock_text(parse_time(text, now), now) for text in ("03:14", "yesterday 23:50", "2026-01-02", "2023-01-02")
    ]
    assert shown == ["03:14:00", "11-24 23:50:00", "2026-01-02", "2023-01-02"]
    assert clock_text(2**62, now) == f"{2**62} ms"


@pytest.mark.parametrize(
    "text", ["", "tomorrow 12:00", "2026-13-01", "24:00", "12:60", "1200", "yesterday 3", "10", "-5", "²"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    if text in ("10", "1200"):
        assert parse_time(text, 0) == int(text)
        return
    with pytest.raises(ValueError, match="is no time"):
        parse_time(text, 0)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("90s", 90_000), ("5m", 300_000), ("1h30m", 5_400_000), ("250ms", 250), ("1.5 s", 1_500), ("2D", 172_800_000)],
)
def test_spans_are_read(text: str, ms: int) -> None:
    assert parse_span(text) == ms


@pytest.mark.parametrize("text", ["", "5", "m", "5 apples", "5m3", "-5m", "5m -3s", "1e3s", "\x1b5m"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no span") as refused:
        parse_span(text)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0.0 s"),
        (320, "0.3 s"),
        (9_999, "10.0 s"),
        (10_000, "10 s"),
        (59_700, "1 min"),
        (252_000, "4 min 12 s"),
        (3_600_000, "1 h"),
        (10_920_000, "3 h 2 min"),
        (180_000_000, "2 d 2 h"),
        (-5_000, "-5.0 s"),
    ],
)
def test_spans_are_written_in_the_units_that_matter(ms: int, text: str) -> None:
    assert span(ms) == text


def test_counts() -> None:
    assert count(1, "lease") == "1 lease"
    assert count(12_345, "record") == "12,345 records"
