"""States of pieces in a folder, in memory and in a bucket: what was saved is found again, or its absence is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal import ConfigurationError, StateMissingError, StateSplitError
from kafka_marshal.checkpoints import Checkpoint, CheckpointPiece, Store
from rationalizer.limits import MAX_KEY_HASH, MAX_OFFSET
from rationalizer.routing import key_range
from tests.checkpoints.conftest import restored

Make = Callable[[], Store]

_LEFT, _RIGHT = key_range(0, 2), key_range(1, 2)


def piece(lo: int = 0, hi: int = MAX_KEY_HASH, **of: Any) -> CheckpointPiece:
    fields: dict[str, Any] = {"topic": "flights", "partition": 3, "lo": lo, "hi": hi, "group_id": "delays"}
    return CheckpointPiece(**(fields | of))


def at(checkpoint: int | None, lo: int = 0, hi: int = MAX_KEY_HASH) -> dict[str, Any]:
    """What a piece has that was worked on, and saved under this id."""
    return {
        "position": 500,
        "lo": lo,
        "hi": hi,
        "states": ((lo, hi, checkpoint),),
        "done_through": ((lo, hi, 499),),
    }


def collected(checkpoint: int, *needed: int, partition: int = 3) -> Checkpoint:
    return Checkpoint(checkpoint, (piece(partition=partition),), needed={("flights", partition): frozenset(needed)})


def test_what_was_saved_is_loaded_by_another_process(make: Make) -> None:
    states: list[Any] = [b"", b"\0\n", b"x" * 100_000, bytearray(b"y"), memoryview(b"z")]
    for number, state in enumerate(states):
        make().save(number, piece(), state)
    assert [make().load(restored(**at(number))) for number in range(len(states))] == [bytes(each) for each in states]
    assert make().load_parts(restored(**at(2))) == [(0, MAX_KEY_HASH, states[2])]


def test_nothing_was_done_yet(make: Make) -> None:
    assert make().load(restored()) is None
    assert make().load(restored(position=5000), missing=b"{}") is None  # retention passed its beginning
    assert make().load_parts(restored()) == []


def test_the_same_id_again_replaces_what_was_saved(make: Make) -> None:
    for state in (b"a longer one", b"one"):
        make().save(MAX_OFFSET, piece(), state)
    assert make().load(restored(**at(MAX_OFFSET))) == b"one"


def test_names_are_kept_apart(make: Make) -> None:
    """Of groups, topics, partitions, keys and ids, whatever a group is called."""
    groups = [
        "delays",
        "Delays",
        "DELAYS",
        "..",
        ".",
        "/",
        "../delays",
        "a/b",
        "a_b",
        "a b",
        "a\\b",
        "ä",
        "~",
        "\n",
        "\0",
    ]
    groups += ["a" * 255, "ö" * 127, "delays/flights/3", "nul.", "-rf", "*", "[a]", "?", "%2e%2e", "delays~"]
    topics = ["flights", "Flights", "...", "a.b", "a_b", "t" * 249]
    places = [(group, "flights", 3) for group in groups]
    places += [("delays", topic, partition) for topic in topics[1:] for partition in (0, 2**31 - 1)]
    store = make()
    for number, (group, topic, partition) in enumerate(places):
        store.save(7, piece(group_id=group, topic=topic, partition=partition), b"%d" % number)
    for number, (group, topic, partition) in enumerate(places):
        of = restored(**at(7), group_id=group, topic=topic, partition=partition)
        assert store.load(of) == b"%d" % number, (group, topic, partition)


def test_state_that_is_not_there_is_named(make: Make) -> None:
    make().save(6, piece(), b"older")
    make().save(7, piece(partition=4), b"of another partition")
    with pytest.raises(StateMissingError) as raised:
        make().load(restored(**at(7)), missing=b"{}")
    text = str(raised.value)
    assert text.startswith("flights [3]: the state that belongs to its position 500 was saved at checkpoint 7, and ")
    assert "delays/flights/3/0000000000000000007-0000000000000000-7fffffffffffffff.state" in text
    assert "rollback delays --to ID" in text
    assert (raised.value.topic, raised.value.partition, raised.value.checkpoint) == ("flights", 3, 7)


def test_work_without_a_state_needs_to_be_told_how_to_begin(make: Make) -> None:
    """After --start."""
    for done in (at(None), {"position": 0, "ranges": ((5, 9),)}):
        for load in (make().load, make().load_parts):
            with pytest.raises(StateMissingError, match=r"no state was saved for that.*load\(piece, missing="):
                load(restored(**done))
        assert make().load(restored(**done), missing=b"{}") == b"{}"
        assert make().load(restored(**done), missing=None) is None
        assert make().load_parts(restored(**done), missing=b"{}") == [(0, MAX_KEY_HASH, b"{}")]


def test_shares_that_became_one(make: Make) -> None:
    make().save(7, piece(*_LEFT), b"left")
    make().save(9, piece(*_RIGHT), b"right")
    whole = restored(**at(7) | {"states": ((*_LEFT, 7), (*_RIGHT, 9))})
    assert make().load_parts(whole) == [(*_LEFT, b"left"), (*_RIGHT, b"right")]
    with pytest.raises(StateSplitError, match=r"flights \[3\]: its state was saved in 2 parts.*load_parts"):
        make().load(whole)


def test_shares_of_one_checkpoint_that_became_one(make: Make) -> None:
    make().save(7, piece(*_LEFT), b"left")
    with pytest.raises(StateMissingError):
        make().load_parts(restored(**at(7)))
    make().save(7, piece(*_RIGHT), b"right")
    assert make().load_parts(restored(**at(7))) == [(*_LEFT, b"left"), (*_RIGHT, b"right")]


def test_a_share_of_what_was_whole(make: Make) -> None:
    """Its state has keys of others: to take it as it is would count them twice."""
    make().save(7, piece(), b"whole")
    with pytest.raises(StateSplitError, match=r"key hashes 0 to 4611686018427387903: its state was saved with keys"):
        make().load(restored(**at(7, *_LEFT)))
    [part] = make().load_parts(restored(**at(7, *_LEFT)))
    assert tuple(part) == (*_LEFT, b"whole")
    keys = [f"key {number}" for number in range(100)]
    assert [part.holds(key) for key in keys] == [piece(*_LEFT).holds(key) for key in keys]


def test_a_share_that_grew_over_one_that_had_nothing_to_do(make: Make) -> None:
    make().save(7, piece(*_LEFT), b"left")
    done = {"states": ((*_LEFT, 7), (*_RIGHT, None)), "done_through": ((*_LEFT, 499), (*_RIGHT, -1))}
    assert make().load(restored(**at(7) | done)) == b"left"
    done["done_through"] = ((*_LEFT, 499), (*_RIGHT, 3))
    with pytest.raises(StateMissingError):
        make().load(restored(**at(7) | done))
    with pytest.raises(StateSplitError):
        make().load(restored(**at(7) | done), missing=b"{}")
    assert make().load_parts(restored(**at(7) | done), b"{}") == [(*_LEFT, b"left"), (*_RIGHT, b"{}")]


def test_states_of_one_id_next_to_each_other_are_one(make: Make) -> None:
    make().save(7, piece(), b"whole")
    assert make().load(restored(**at(7) | {"states": ((*_LEFT, 7), (*_RIGHT, 7))})) == b"whole"


def test_what_is_not_needed_is_deleted_and_never_what_is_newer(make: Make) -> None:
    """A member that was asleep at checkpoint 5 and wakes up now, while others are at 9."""
    for checkpoint in (1, 2, 3, 5, 7, 9):
        make().save(checkpoint, piece(), b"%d" % checkpoint)
    make().save(1, piece(partition=4), b"of a partition that is not ours")
    make().save(1, piece(group_id="other"), b"of another group")
    assert make().collect(collected(5, 2)) == 2
    left = [checkpoint for checkpoint in range(10) if is_there(make(), checkpoint)]
    assert left == [2, 5, 7, 9]
    assert make().load(restored(**at(1), partition=4)) and make().load(restored(**at(1), group_id="other"))


def is_there(store: Store, checkpoint: int) -> bool:
    try:
        store.load(restored(**at(checkpoint)))
    except StateMissingError:
        return False
    return True


def test_of_a_partition_without_word_of_what_is_needed_nothing_is_deleted(make: Make) -> None:
    make().save(1, piece(), b"1")
    assert make().collect(Checkpoint(5, (piece(),))) == 0
    assert is_there(make(), 1)
    assert make().collect(Checkpoint(5, (piece(),), needed={("flights", 3): frozenset()})) == 1


def test_what_another_member_saves_or_deletes_meanwhile(make: Make) -> None:
    """Names are remembered, so that not every checkpoint lists them, and listed again from time to time."""
    ours, theirs = make(), make()
    for checkpoint in range(40):
        ours.save(checkpoint, piece(*_LEFT), b"x")
        if checkpoint < 20:
            theirs.save(checkpoint, piece(*_RIGHT), b"x")
        else:
            theirs.collect(collected(checkpoint))
        ours.collect(collected(checkpoint))
    folder = make()._list("delays/flights/3")
    assert [name[:19] for name in folder] == [f"{39:019d}"]


def test_what_can_t_be_deleted_is_said_and_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kafka_marshal.errors import StateError

    store = make()
    store.save(1, piece(), b"1")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "kafka_marshal"):

        def refuse(*_: object) -> None:
            raise StateError("denied")

        patch.setattr(store, "_delete", refuse)
        assert store.collect(collected(5)) == 0
    [line] = caplog.records
    assert line.getMessage() == "States that are not needed any more were not deleted: denied"
    assert store.collect(collected(5)) == 1


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda store: store.save(-1, piece(), b""), "checkpoint must be at least 0"),
        (lambda store: store.save(1, restored(), b""), "piece must be one of checkpoint.pieces"),
        (lambda store: store.save(1, piece(), "text"), "state must be bytes, not 'text'"),
        (lambda store: store.load(piece()), "piece must be one of restore.pieces"),
        (lambda store: store.collect(5), "checkpoint must be a Checkpoint, not 5"),
    ],
)
def test_wrong_arguments(make: Make, call: Callable[[Store], object], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        call(make())
