"""What the rules left open, as docs/protocol's section 11 decides it, where no script says it (tests/scripts)."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgpack import packb

from rationalizer import (
    BeatEntry,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    JoinGroup,
    Outcome,
    Progress,
    ReleaseGroup,
    SnapshotError,
    Tick,
    Upgrade,
    World,
    encode,
)
from rationalizer.dump import DumpError, DumpRecord, Replay, UntilError, record_line
from tests.rationalizer.log import A1, Log, held

FAR = 10**6
HEADER = b'{"topic": "any \\u00e9 string", "partitions": 1, "format": 1}\n'
UNKNOWN = [1, 99, "1", "a", "g"]


def codes(*values: Any) -> list[tuple[str, str | None]]:
    log = Log()
    outcomes = [log.append(value if isinstance(value, bytes) else packb(value)) for value in values]
    return [(outcome.code, outcome.type) for outcome in outcomes]


def lines(*texts: bytes) -> list[dict[str, object]]:
    return list(Replay(io.BytesIO(HEADER + b"".join(text + b"\n" for text in texts))).outcomes())


def line(offset: int, value: bytes | None, timestamp: int = 5) -> bytes:
    return record_line(DumpRecord(0, offset, timestamp, value)).encode()


def test_q1_a_value_that_a_later_equal_key_hides_counts() -> None:
    hidden = b"\x96" + packb(UNKNOWN)[1:] + b"\x82\xa1k\xcb" + bytes(8) + b"\xa1k\x01"
    good = b"\x96" + packb(UNKNOWN)[1:] + b"\x82\xa1k\x02\xa1k\x01"
    assert codes(hidden, good) == [("MALFORMED", None), ("UNKNOWN_TYPE", None)]


def test_q2_an_empty_container_counts_for_the_depth() -> None:
    seven: Any = []
    for _ in range(6):
        seven = [seven]
    assert codes([*UNKNOWN, seven], [*UNKNOWN, [seven]]) == [("UNKNOWN_TYPE", None), ("MALFORMED", None)]


def test_q3_the_whole_value_comes_before_version_and_version_before_type() -> None:
    assert codes([*UNKNOWN, 1.5], [2, 32, "", "a", "g"], [2, 99, "1", "a", "g"], [2, 32, "1", "a", "g", [1.5]]) == [
        ("MALFORMED", None),
        ("MALFORMED", None),
        ("UNSUPPORTED_VERSION", None),
        ("MALFORMED", None),
    ]


def test_q4_a_bad_field_has_the_types_name_and_a_forbidden_thing_has_none() -> None:
    beat = [1, 1, "1", "a", "g", "t", 0, 0]
    assert codes([*beat, "5"], [*beat, 5.0], [*beat, {"a": 1}], [*beat, {"a": b""}]) == [
        ("MALFORMED", "Heartbeat"),
        ("MALFORMED", None),
        ("MALFORMED", "Heartbeat"),
        ("MALFORMED", None),
    ]


def test_q17_a_key_range_that_moves_nothing_changes_nothing() -> None:
    made = Progress()
    made.through(10)
    assert made.commit_key_range(0, 99, 10) == "OK"
    assert made.done_through == [(0, 2**63 - 1, 10)]


def test_q18_lines_of_white_space_are_empty_and_a_dump_of_them_is_bad_in_line_1() -> None:
    tick = encode(Tick(*A1, "g"))
    assert len(lines(b"", b" \t", b"\r", line(0, tick) + b"\r")) == 1
    with pytest.raises(DumpError) as caught:
        Replay(io.BytesIO(b"\n\n \r\n"))
    assert caught.value.line_number == 1


def test_q19_base64_is_padded_stamps_below_minus_one_are_none_and_ints_end_at_int64() -> None:
    assert [outcome["code"] for outcome in lines(line(0, None).replace(b"null", b'"YR=="'))] == ["MALFORMED"]
    assert [outcome["log_time"] for outcome in lines(line(0, None, -77))] == [0]
    for bad in (line(0, b"a").replace(b"==", b""), line(0, b"a").replace(b"==", b"=\\n="), line(2**63, None)):
        with pytest.raises(DumpError):
            lines(bad)


def test_q20_unknown_keys_are_ignored() -> None:
    assert len(lines(line(0, None)[:-1] + b', "key": [1.5, "x"], "headers": {}}')) == 1


def test_q21_until_of_no_cp_is_wrong_use_and_what_it_leaves_out_is_checked() -> None:
    with pytest.raises(UntilError):
        Replay(io.BytesIO(HEADER), until={1: 5})
    with pytest.raises(DumpError):
        list(Replay(io.BytesIO(HEADER + line(5, None) + b"\n{}\n"), until={0: 0}).outcomes())
    with pytest.raises(DumpError):
        lines(line(0, encode(Upgrade(*A1, "g", 2))), b"{}")


def test_q22_rejected_codes_come_in_the_order_in_which_they_occurred() -> None:
    text = [
        line(0, packb(UNKNOWN)),
        line(1, None),
        line(2, encode(Heartbeat(*A1, "g", "t", 0, 0, 1))),
        line(3, b"\xc1"),
    ]
    replay = Replay(io.BytesIO(HEADER + b"".join(part + b"\n" for part in text)))
    partitions: Any = replay.state()["partitions"]
    assert list(partitions[0]["rejected"].items()) == [("UNKNOWN_TYPE", 1), ("MALFORMED", 2), ("NOT_HELD", 1)]


def test_q23_only_canonical_bytes_of_a_reachable_state_are_a_snapshot() -> None:
    good = held().world.snapshot()
    assert World.restore(good, 1).snapshot() == good
    with pytest.raises(SnapshotError, match="canonical form"):
        World.restore(good.replace(b"\xa1t", b"\xd9\x01t"), 1)
    elsewhere = [cp for cp in range(8) if _restores(good.replace(b"\x98\x01\x00", bytes([0x98, 1, cp])), 8)]
    assert len(elsewhere) == 1


# -- coordinated groups --------------------------------------------------------------------------------------------


def group_log(*records: Any, cps: int = 1) -> tuple[World, list[Outcome]]:
    """A CP at level 2, and the outcomes of these records, a second apart."""
    world = World(0, cps)
    world.apply(0, 1_000, encode(Upgrade(*A1, "g", 2)))
    outcomes = []
    for offset, each in enumerate(records, start=1):
        value = each if isinstance(each, bytes) else encode(each)
        outcomes.append(world.apply(offset, 1_000 + 1_000 * offset, value))
    return world, outcomes


def joins(client: str, *topics: tuple[str, int], session: int = 10_000, seen: int = 99, **other: Any) -> JoinGroup:
    values = {"strategy": "sticky", "allow_key_share": False, "pattern": "", **other}
    return JoinGroup(f"{client}-1", client, "g", "", seen, session, topics=topics or (("t", 1),), **values)


def commits(world_member: str, *entries: CommitEntry, generation: int = 1) -> CommitOffsets:
    return CommitOffsets("a-1", "a", "g", world_member, generation, False, entries)


def test_q44_a_batch_on_a_coordinated_group_has_no_entries() -> None:
    batch = HeartbeatBatch("c-1", "c", "g", (BeatEntry("t", 0, 0, 1),))
    _, outcomes = group_log(joins("a"), batch)
    assert (outcomes[1].code, outcomes[1].entries, outcomes[1].of_group) == ("WRONG_KIND", None, False)


def test_q45_equal_topics_of_a_setting_count_once_and_what_a_key_hides_is_checked() -> None:
    topics = [f"t{n}" for n in range(100)]
    head = [2, 21, "x", "admin", "g"]
    good = packb([*head, {"accept_range_fetch": [*topics, "t0"]}])
    bad = packb([*head, {"accept_range_fetch": [*topics, "t100"]}])
    hidden = b"\x96" + packb(head)[1:] + b"\x82\xbemax_session_timeout_ms_and_more\xcb" + bytes(8)
    name = packb("max_session_timeout_ms")
    hides = b"\x96" + packb(head)[1:] + b"\x82" + name + b"\xcb" + bytes(8) + name + packb(500)
    last = b"\x96" + packb(head)[1:] + b"\x82" + name + packb(1) + name + packb(500)
    world, outcomes = group_log(good, bad, hidden, hides, last)
    assert [x.code for x in outcomes] == ["OK", "MALFORMED", "MALFORMED", "MALFORMED", "OK"]
    found = world.group("g")
    assert found is not None
    assert (len(found.settings.accept_range_fetch), found.settings.max_session_timeout_ms) == (100, 500)


def test_q46_q47_what_a_through_and_metadata_do() -> None:
    world, [joined] = group_log(joins("a"))
    assert joined.member is not None
    half = 2**62
    entries = (
        CommitEntry("t", 0),
        CommitEntry("t", 0, 0, half - 1, through=9),
        CommitEntry("t", 0, 0, half - 1, through=5),
        CommitEntry("t", 0, half, through=3),
        CommitEntry("t", 0, through=2, metadata="kept"),
        CommitEntry("t", 0, 0, half - 1, through=8),
    )
    assert world.apply(2, 3_000, encode(commits(joined.member, entries[0]))).entries == ("OK",)
    group = world.group("g")
    assert group is not None
    assert group.kept("t", 0) is None
    out = world.apply(3, 4_000, encode(commits(joined.member, *entries[1:])))
    assert out.entries == ("OK", "OK", "OK", "OFFSET_REGRESSION", "OK")
    kept = group.kept("t", 0)
    assert kept is not None
    assert (kept.metadata, kept.progress.done_through) == ("kept", [(0, half - 1, 9), (half, 2**63 - 1, 3)])


def test_q47_a_through_of_nothing_makes_progress() -> None:
    world, [joined] = group_log(joins("a"))
    assert joined.member is not None
    world.apply(2, 3_000, encode(commits(joined.member, CommitEntry("t", 0, through=-1))))
    group = world.group("g")
    assert group is not None
    assert group.kept("t", 0) is not None


def test_q48_counts_outlive_who_reported_them_until_the_rebalance() -> None:
    world, [first, again] = group_log(joins("a", ("t", 5)), joins("a", ("t", 3)))
    assert (first.code, again.code) == ("OK", "ALREADY_MEMBER")
    world.apply(3, 60_000, encode(joins("b", ("t", 2))))
    group = world.group("g")
    assert group is not None
    assert (group.counts, list(group.clients)) == ({"t": 5}, ["b"])


def test_q49_after_a_silence_of_the_whole_log_the_others_still_count() -> None:
    world, _ = group_log(joins("a"), joins("b"))
    out = world.apply(3, 90_000, encode(joins("a", strategy="range")))
    assert out.code == "INCONSISTENT_PARTITIONING_STRATEGY"


def test_q50_an_unpaused_group_without_members_is_not_forgotten() -> None:
    world, _ = group_log(ConfigureGroup("x", "admin", "g"))
    assert world.apply(2, 3_000, encode(ForgetGroup("x", "admin", "g"))).code == "GROUP_ACTIVE"
    world.apply(3, 4_000, encode(ReleaseGroup("x", "admin", "g", 90_000)))
    assert world.apply(4, 5_000, encode(ForgetGroup("x", "admin", "g"))).code == "OK"


def _restores(snapshot: bytes, partitions: int) -> bool:
    try:
        World.restore(snapshot, partitions)
    except SnapshotError:
        return False
    return True
