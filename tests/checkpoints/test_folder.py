"""A folder: what is on the disk when save returns, and what is said where the disk fails."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from kafka_marshal import ConfigurationError, StateError, StateMissingError
from kafka_marshal.checkpoints import CheckpointPiece, Folder
from tests.checkpoints.conftest import restored
from tests.checkpoints.test_stores import at, collected, piece


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
