"""States of pieces in a folder, in memory and in a bucket: what was saved is found again, or its absence is named."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import ConfigurationError, StateError, StateMissingError, StateSplitError
from kafka_marshal.checkpoints import Bucket, Checkpoint, CheckpointPiece, Folder, Store
from kafka_marshal.errors import ExtraMissingError
from kafka_marshal.files import BucketFiles
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


# -- A folder: what is on the disk when save returns, and what is said where the disk fails -----------------------


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_state_is_on_the_disk_when_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written beside, flushed, renamed, and the folder flushed; so are the new folders above it."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def flushed(descriptor: int) -> None:
        fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        done.append(f"flush {path.name if path.is_dir() else path.suffix}")

    def renamed(path: Path, target: Path) -> Path:
        done.append(f"rename {path.suffix} to {target.suffix}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    store = Folder(tmp_path / "states")
    store.save(1, piece(), b"1")
    written = ["flush .part", "rename .part to .state", "flush 3"]
    assert done == [f"flush {tmp_path.name}", "flush states", "flush delays", "flush flights", *written]
    done.clear()
    store.save(2, piece(), b"2")
    assert done == written


@pytest.mark.parametrize("damage", ["cut", "longer", "changed", "empty", "no head"])
def test_a_torn_file_is_no_state(tmp_path: Path, damage: str) -> None:
    store = Folder(tmp_path / "states")
    store.save(7, piece(), b"a state of some length")
    [name] = files(tmp_path / "states")
    path = tmp_path / "states" / name
    data = path.read_bytes()
    torn = {"cut": data[:-1], "longer": data + b"x", "changed": data.replace(b"some", b"sone"), "empty": b""}
    path.write_bytes(torn.get(damage, b"a state of some length"))
    with pytest.raises(StateMissingError, match=r"0007-.*\.state was cut or changed\. Without it"):
        store.load(restored(**at(7)))


def test_a_folder_that_is_gone_is_not_made_again(tmp_path: Path) -> None:
    """Not mounted any more: a member would save where no other finds it."""
    store = Folder(tmp_path / "states")
    store.save(7, piece(), b"7")
    shutil.rmtree(tmp_path / "states")
    for call in (lambda: store.save(8, piece(), b"8"), lambda: store.load(restored(**at(7)))):
        with pytest.raises(StateError, match="the folder is gone, and what was in it") as raised:
            call()
        assert not isinstance(raised.value, StateMissingError)
    assert store.collect(collected(9)) == 0
    assert not (tmp_path / "states").exists()


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Folder(tmp_path / "states")
    store.save(7, piece(), b"7")
    before = files(tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StateError, match="was not saved, and its piece keeps the one before: No space left"):
            store.save(8, piece(), b"8")
    assert files(tmp_path) == before
    assert store.load(restored(**at(7))) == b"7"


def test_a_folder_that_can_t_be_written_to(tmp_path: Path) -> None:
    store = Folder(tmp_path / "states")
    (tmp_path / "states" / "delays").write_text("a file of another program")
    with pytest.raises(StateError, match=r"was not saved, and its piece keeps the one before: (Not a dir|File ex)"):
        store.save(8, piece(), b"8")
    with pytest.raises(StateError, match="can't be read: Not a directory"):
        store.load(restored(**at(7)))
    assert store.collect(collected(9)) == 0


def test_what_a_killed_writer_left_is_collected(tmp_path: Path) -> None:
    store = Folder(tmp_path / "states")
    for checkpoint in (3, 5, 7):
        store.save(checkpoint, piece(), b"x")
    folder = tmp_path / "states" / "delays" / "flights" / "3"
    left = [folder / f".{name}.{'0' * 32}.part" for name in os.listdir(folder)]
    for path in (*left, folder / "notes.txt"):
        path.write_text("half of it")
    assert store.collect(collected(7, 5)) == 2
    assert len(files(folder)) == 2 + 2 + 1 and "notes.txt" in files(folder)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("s3://bucket/states", "Use kafka_marshal.checkpoints.Bucket"),
        ("", "path must be the path of a folder"),
        (5, "path must be the path of a folder"),
        ("absent/states", "it can't be made \\(No such file or directory\\)"),
        ("file", "it can't be made \\(File exists\\)"),
    ],
)
def test_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: object, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=says):
        Folder(path)  # type: ignore[arg-type]


def test_a_relative_path_means_the_same_folder_after_chdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Folder("states")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.save(7, CheckpointPiece("flights", 3, 0, 9, group_id="delays"), b"7")
    assert len(files(tmp_path / "states")) == 1


# -- A bucket: what is refused, and what is said where the store does not answer ----------------------------------


pytest.importorskip("s3fs")


def opened(store: Bucket) -> Any:
    files = store._files
    assert isinstance(files, BucketFiles)
    return files.open()


def test_a_bucket_that_is_not_there_is_said_at_the_first_restore(s3: dict[str, Any]) -> None:
    """Before anything is handled: not only when the first state is to be saved."""
    store = Bucket("s3://absent/delays", storage_options=s3)
    with pytest.raises(StateError, match=r"s3://absent/delays: the store can't be reached.*bucket does not exist"):
        store.load(restored())
    with pytest.raises(StateError, match=r"was not saved, and its piece keeps the one before.*bucket does not exist"):
        store.save(1, piece(), b"")
    assert Bucket("s3://states", storage_options=s3).load(restored(group_id="new")) is None


def test_a_store_that_does_not_answer(s3: dict[str, Any]) -> None:
    options = s3 | {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    store = Bucket("s3://states/away", storage_options=options)
    import s3fs

    opened(store)[0].retries = 1
    assert isinstance(opened(store)[0], s3fs.S3FileSystem)
    for call in (lambda: store.save(1, piece(), b""), lambda: store.load(restored(**at(7)))):
        with pytest.raises(StateError, match="Could not connect to the endpoint URL") as raised:
            call()
        assert not isinstance(raised.value, StateMissingError)
    assert store.collect(collected(9)) == 0


def test_it_is_opened_again_in_a_forked_child() -> None:
    store = Bucket("memory://forked")
    store.save(1, piece(), b"1")
    before = opened(store)[0]
    child = os.fork()
    if not child:
        os._exit(0 if opened(store)[0] is not before and store.load(restored(**at(1))) == b"1" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert opened(store)[0] is before


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///tmp/states", "kafka_marshal.checkpoints.Folder for states"),
        ("/tmp/states", "is no URL of an object store"),
        ("", "url must be a URL such as"),
        ("s4://bucket", "can't reach here: Protocol not known: s4"),
        ("gs://bucket", "can't reach here: Please install gcsfs"),
    ],
)
def test_no_bucket(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Bucket(url)


def test_options_that_its_package_refuses() -> None:
    with pytest.raises(StateError, match=r"s3://states: .*unexpected keyword argument 'keys'"):
        Bucket("s3://states", storage_options={"keys": "a"}).load(restored())


@pytest.mark.parametrize(("absent", "url"), [("fsspec", "memory://x"), ("s3fs", "s3://states")])
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, absent: str, url: str) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'kafka-marshal\[bucket\]'"):
        Bucket(url)
