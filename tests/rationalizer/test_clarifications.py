"""What the rules left open, as PROTOCOL.md's section 11 decides it: one test for each Q, at least."""

from __future__ import annotations

import io
from typing import Any

import pytest
from msgpack import packb

from rationalizer import BeatEntry, Heartbeat, HeartbeatBatch, Progress, SnapshotError, Tick, Upgrade, World, encode
from rationalizer.dump import DumpError, DumpRecord, Replay, UntilError, record_line
from tests.rationalizer.log import A1, A2, ADMIN, ADMIN2, B1, HI, Log, held, progress_of

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


def test_q5_an_upgrade_that_can_not_be_followed_has_not_been_seen() -> None:
    log = held()
    before = log.world.snapshot()
    log.now = 5000
    outcomes = [log.upgrade(2), log.tick(), log.append(b"\xc1")]
    assert [(outcome.code, outcome.log_time, outcome.accepted) for outcome in outcomes] == [
        ("UPGRADE_REQUIRED", 1000, False)
    ] * 3
    assert log.world.snapshot() == before
    assert "UPGRADE_REQUIRED" not in {**log.world.accepted, **log.world.rejected}


def test_q6_tick_and_upgrade_pass_a_pause_by_anybody() -> None:
    log = Log()
    log.pause(ADMIN, FAR)
    assert [log.tick(A1).code, log.upgrade(1, B1).code] == ["OK", "OK"]
    assert log.upgrade(2, B1).code == "UPGRADE_REQUIRED"


def test_q7_a_stale_holders_own_claim_is_a_new_grant() -> None:
    log = held()
    log.now += 2 * HI + 1
    assert log.claim(A1, hi=5000).code == "OK"
    assert (log.lease.epoch, log.lease.heartbeat_interval_ms) == (1, 5000)


def test_q8_both_ends_of_unknown_belong_to_it() -> None:
    log = held()
    log.now += HI
    assert log.take_over(A2).code == "NOT_FRESH"
    log.now += HI
    assert log.claim(B1).code == "HELD"
    assert log.grant(A1, 3).code == "OK"


def test_q9_a_pause_is_over_at_its_expiry_and_its_client_repositions_no_more() -> None:
    log = held()
    log.beat(A1, 10)
    log.release(A1)
    log.pause(ADMIN, log.now + 10)
    log.claim(ADMIN)
    log.now += 9
    assert log.beat(ADMIN, 5).code == "REPOSITIONED"
    log.now += 1
    assert log.beat(ADMIN, 3).code == "OFFSET_REGRESSION"
    assert log.claim(B1, partition=1).code == "OK"


def test_q10_ending_no_pause_is_anybodys_right_and_another_clients_pause_is_not() -> None:
    log = Log()
    assert log.pause(B1, 0).code == "OK"
    log.pause(ADMIN, FAR)
    assert [log.pause(B1, 0).code, log.forget(B1).code] == ["PAUSED", "PAUSED"]
    assert [log.forget(ADMIN).code, log.world.pauses()] == ["OK", []]


def test_q11_each_last_offset_of_the_pausing_client_replaces() -> None:
    log = held()
    log.beat(A1, 10)
    log.release(A1)
    log.pause(ADMIN, FAR)
    log.claim(ADMIN)
    assert log.beat(ADMIN, 9).code == "REPOSITIONED"
    assert log.batch(ADMIN, ("t", 0, log.lease.epoch, 8)).entries == ("REPOSITIONED",)
    assert log.take_over(ADMIN2, 7).code == "REPOSITIONED"
    assert log.release(ADMIN2, 6).code == "REPOSITIONED"
    assert progress_of(log) == (6, [], -1)


def test_q12_granted_is_never_above_stable() -> None:
    log = held()
    log.grant(A1, 9)
    log.commit(A1, (10, 12))
    assert progress_of(log) == (12, [], 9)
    assert [log.grant(A1, 12).code, log.grant(A1, 13).code] == ["PROPOSAL_TOO_LOW", "OK"]


def test_q13_a_batch_may_name_a_lease_twice() -> None:
    log = held()
    assert log.batch(A1, ("t", 0, 0, 9), ("t", 0, 0, 5), ("t", 0, 0, 11)).entries == ("OK", "OFFSET_REGRESSION", "OK")
    assert log.lease.progress.stable == 11


def test_q14_entries_where_the_pause_was_passed_and_ok_where_all_are_accepted() -> None:
    log = held()
    log.beat(A1, 9)
    outcome = log.batch(A1, ("t", 0, 0, 5))
    assert (outcome.code, outcome.entries) == ("OK", ("OFFSET_REGRESSION",))
    log.pause(ADMIN, FAR)
    outcome = log.batch(A1, ("t", 0, 0, 9))
    assert (outcome.code, outcome.entries) == ("PAUSED", None)
    elsewhere = World(0, 2**31 - 1).apply(0, 0, encode(HeartbeatBatch(*A1, "g", (BeatEntry("t", 0, 0, 1),))))
    assert (elsewhere.code, elsewhere.entries) == ("WRONG_PARTITION", None)


def test_q15_free_leases_do_not_keep_a_group() -> None:
    log = held()
    log.release(A1)
    assert log.forget(B1).code == "OK"
    assert log.world.leases() == []


def test_q16_what_is_old_is_cut_off_and_the_count_is_taken_last() -> None:
    made = Progress()
    made.through(10)
    assert made.commit([(5, 10), (20, 20)]) == "OK"
    assert made.commit([(5, 10), (20, 20)]) == "DUPLICATE_COMMIT"
    made.commit([(30 + 2 * n, 30 + 2 * n) for n in range(59_999)])
    assert len(made.ranges) == 60_000
    assert made.commit([(11, 20), (22, 22)]) == "OK"
    assert (made.stable, len(made.ranges)) == (20, 60_000)


def test_q17_a_key_range_that_moves_nothing_changes_nothing() -> None:
    made = Progress()
    made.through(10)
    assert not made.commit_key_range(0, 99, 10)
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


def _restores(snapshot: bytes, partitions: int) -> bool:
    try:
        World.restore(snapshot, partitions)
    except SnapshotError:
        return False
    return True
