"""A partition's position in a consumer group of Kafka's own: it passes no message that its metadata do not name."""

from __future__ import annotations

import json
import random

import pytest

from kafka_marshal.engine.work.copies import MOST_BYTES, Copy
from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS
from rationalizer import Progress
from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes


def progress(stable: int, *holes: Hole, ranges: tuple[tuple[int, int], ...] = ()) -> Progress:
    made = Progress()
    made.commit_key_range(0, 2**63 - 1, stable)
    if ranges:
        made.commit(ranges, 1_000)
    made.holes = Holes(holes)
    return made


def hole(first: int, key_hash: int = 7, reason: str | None = None, last: int | None = None) -> Hole:
    return Hole(first, first if last is None else last, NO_OWNER, 1, 2, key_hash, reason)


def test_what_is_written_is_read() -> None:
    whole = Copy.of(progress(99, hole(5), hole(6, reason="ValueError: größe"), ranges=((105, 109),)), "mine")
    assert (whole.offset, whole.position, whole.ahead, whole.metadata) == (5, 100, 5, "mine")
    assert Copy.read(whole.offset, whole.text) == whole


@pytest.mark.parametrize("text", ["", "mine", "kafka-marshal 5 log", "kafka-marshal open messages {", "x" * 4_096])
def test_metadata_of_others_are_theirs(text: str) -> None:
    assert Copy.read(5, text) == Copy(5, 5, metadata=text)


@pytest.mark.parametrize("field", ["continues", "ahead", "open"])
def test_damaged_metadata_restore_nothing(field: str) -> None:
    text = Copy.of(progress(99, hole(5)), None).text
    damaged = json.loads(text.removeprefix("kafka-marshal open messages ")) | {field: ["x"]}
    text = "kafka-marshal open messages " + json.dumps(damaged)
    assert Copy.read(5, text) == Copy(5, 5, metadata=text)


def test_nothing_open_is_one_number() -> None:
    assert Copy.of(progress(99), None) == Copy(100, 100)
    assert Copy.of(progress(99), None).text == ""


def test_a_batch_without_keys_comes_again_with_all_behind_it() -> None:
    """A coordinated group holds open messages by their keys only."""
    found = Copy.of(progress(99, hole(3), hole(50, NO_KEY, last=59)), None)
    assert (found.offset, found.position, found.ahead, found.is_short) == (3, 50, 50, True)
    assert [each.first for each in found.open] == [3]


def test_a_log_without_open_messages_gets_them_all_again() -> None:
    found = Copy.of(progress(99, hole(5), hole(50)), "mine").as_one_number
    assert found == Copy(5, 5, (), 93, "mine")


def test_the_offset_of_transactions_is_in_kafka() -> None:
    exact = Copy.of(progress(99, ranges=((KAFKA_COUNTS, KAFKA_COUNTS),)), None)
    assert not exact.replaces(Copy.read(100, "kafka-marshal 5 log"))
    assert not exact.replaces(Copy.read(150, "kafka-marshal 5 log"))
    assert exact.replaces(Copy(0, 0)), "it has expired"


@pytest.mark.parametrize("seed", range(50))
def test_it_has_room_and_no_message_is_passed(seed: int) -> None:
    rng = random.Random(seed)
    stable = rng.randrange(1_000)
    holes = [
        hole(at, rng.choice([NO_KEY, *[rng.getrandbits(63)] * 300]), rng.choice([None, "reason " * rng.randrange(20)]))
        for at in range(stable + 20)
        if rng.random() < rng.choice([0.01, 0.2])
    ]
    kept = progress(stable, *holes)
    found = Copy.of(kept, "ü" * rng.randrange(100))
    assert len(found.text.encode()) <= MOST_BYTES
    assert Copy.read(found.offset, found.text)[:5] == found[:5]
    named = {each.first for each in found.open}
    for at in range(stable + 20):
        assert kept.is_done(at, 0) or at in named or at >= found.position
        assert kept.is_done(at, 0) or at >= found.offset


def test_which_copy_is_kept() -> None:
    older, newer = Copy.of(progress(89), None), Copy.of(progress(99), None)
    open_one = Copy.of(progress(99, hole(5)), None)
    assert newer.replaces(older) and not older.replaces(newer) and not newer.replaces(newer)
    assert open_one.replaces(newer), "that one passes an open message"
    assert newer.replaces(open_one), "it is done by now"
    assert not Copy.of(progress(89), "mine").replaces(newer), "of a member that is behind"
