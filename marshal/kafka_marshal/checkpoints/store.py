"""Stores of states, in a folder or a bucket: how states are named, found again for a piece, and deleted in the end.

A state is named by group, topic, partition, the keys of the piece that was saved, and the checkpoint id. Key shares may
be cut again, so the state of a piece can lie in several files, and a file can have keys that are others' by now.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from shlex import quote
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kafka_marshal import arguments
from kafka_marshal.checkpoints.types import Checkpoint, CheckpointPiece, RestorePiece, has_key
from kafka_marshal.errors import ConfigurationError, StateError, StateMissingError, StateSplitError
from kafka_marshal.files import BucketFiles, Files, FilesError, FolderFiles
from kafka_marshal.logs import RateLimitedLog
from rationalizer.limits import MAX_KEY_HASH

#: In front of the bytes of a state: xxh3 of them, and their number. So a file that was cut or changed is found.
_HEAD: Final = re.compile(rb"kafka-marshal state 1 ([0-9a-f]{16}) (\d+)\n")

#: <checkpoint id>-<lo>-<hi>.state; and what a writer that was killed left beside it.
_NAME: Final = re.compile(r"\.?(\d{19})-([0-9a-f]{16})-([0-9a-f]{16})\.state(\.[0-9a-f]{32}\.part)?")

#: A part of a path that is used as it is. (No capitals: some file systems do not tell them apart.)
_PLAIN: Final = re.compile(r"[a-z0-9_-][a-z0-9_.-]{0,99}")

#: After this many collections of a partition its states are listed again: others may have saved some since.
_LIST_EVERY: Final = 20

#: Nothing was given: a state that is missing is an error.
_REFUSE: Final = object()


class SavedPart(NamedTuple):
    """A state that was saved, and the keys for which it holds: lo … hi. It may have others, which it is too old for."""

    lo: int
    hi: int
    state: Any

    def holds(self, key: bytes | str | None, offset: int | None = None) -> bool:
        """Whether to take what it has of this key. offset: of a message without a key."""
        return has_key(self.lo, self.hi, key, offset)


class _Found(NamedTuple):
    """A state, for which keys it is used, and whether it has others."""

    part: SavedPart
    has_others: bool


class Store:
    """Saves states of pieces and loads them again. Any thread may use it. Subclasses say where files are kept."""

    def __init__(self, files: Files) -> None:
        self._files = files
        #: Folder of a partition → names of states there that we know, and how often to use them before they are listed.
        self._known: dict[str, tuple[set[str], int]] = {}
        self._checked = False
        self._log = RateLimitedLog(lambda: time.monotonic() * 1_000)

    # What users call.

    def save(self, checkpoint: int, piece: CheckpointPiece, state: bytes | bytearray | memoryview) -> None:
        """Keep the state of this piece under this checkpoint id; it is safe when this returns. Again: replaced.

        Raises StateError if it can't be saved; what was saved under other ids stays.
        """
        arguments.a_whole("checkpoint", checkpoint)
        arguments.an_instance("piece", piece, CheckpointPiece, "one of checkpoint.pieces")
        data = bytes(arguments.an_instance("state", state, (bytes, bytearray, memoryview), "bytes"))
        folder, name = _folder(piece), _name(checkpoint, piece.lo, piece.hi)
        self._write(
            f"{folder}/{name}", b"kafka-marshal state 1 %016x %d\n" % (xxh3_64_intdigest(data), len(data)) + data
        )
        if folder in self._known:
            self._known[folder][0].add(name)

    def load(self, piece: RestorePiece, missing: Any = _REFUSE) -> Any:
        """The state that belongs to the position of this piece; None: nothing is done yet, and there is none.

        missing: returned if work was done for which the log names no state, as before the group took checkpoints.

        Raises:
            StateMissingError: the state is not there, or work was done without any and ``missing`` is not given.
            StateSplitError: it lies in several parts, or has keys of other pieces: see :meth:`load_parts`.
            StateError: the store can't be reached.
        """
        found = self._load(piece, missing)
        if len(found) == 1 and not found[0].has_others:
            return found[0].part.state
        if not found:
            return None
        what = "with keys that other pieces have by now" if len(found) == 1 else f"in {len(found)} parts"
        raise StateSplitError(
            f"{_shown(piece)}: its state was saved {what}, as key shares were cut again. Nothing was loaded. Use "
            "load_parts(piece): of each part take what part.holds(key) says",
            topic=piece.topic,
            partition=piece.partition,
        )

    def load_parts(self, piece: RestorePiece, missing: Any = _REFUSE) -> list[SavedPart]:
        """(lo, hi, state) of each part of the piece, ascending; []: nothing is done yet.

        A state may have keys beyond its lo … hi: take those only for which ``part.holds(key)``. missing, errors: as in
        :meth:`load`; a part without a state has ``missing`` in its place.
        """
        return [part for part, _ in self._load(piece, missing)]

    def collect(self, checkpoint: Checkpoint) -> int:
        """Delete states that no checkpoint needs, of the partitions of these pieces; returns how many.

        Nothing that is as new as this checkpoint, or newer. What can't be deleted is logged and tried again later.
        """
        arguments.an_instance("checkpoint", checkpoint, Checkpoint, "a Checkpoint")
        deleted = 0
        for key, piece in {each.key: each for each in checkpoint.pieces}.items():
            needed = checkpoint.needed.get(key)
            if needed is None:
                continue  # it is not known what is needed
            folder = _folder(piece)
            try:
                deleted += self._collect(folder, checkpoint.id, needed)
            except StateError as error:
                self._known.pop(folder, None)
                self._log.warn("states_kept", key, f"States that are not needed any more were not deleted: {error}")
        return deleted

    def _collect(self, folder: str, before: int, needed: Container[int]) -> int:
        """Delete what is older than ``before`` and not needed. Raises StateError."""
        names, uses = self._known.get(folder) or (set(self._list(folder)), _LIST_EVERY)
        ids = {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
        old = {name for name, saved in ids.items() if saved < before and saved not in needed}
        if old:
            self._delete([f"{folder}/{name}" for name in sorted(old)])
        if uses:
            self._known[folder] = names - old, uses - 1
        else:
            self._known.pop(folder, None)
        return len(old)

    # How a state is found.

    def _load(self, piece: RestorePiece, missing: object) -> list[_Found]:
        arguments.an_instance("piece", piece, RestorePiece, "one of restore.pieces")
        if not self._checked:
            self._check()
            self._checked = True
        found: list[_Found] = []
        for lo, hi, checkpoint, group in _states_within(piece):
            if checkpoint is not None:
                found += self._saved(replace(piece, group_id=group), lo, hi, checkpoint)
                continue
            for first, last in _less(lo, hi, piece.untouched):
                if missing is _REFUSE:
                    raise _never_saved(piece)
                found.append(_Found(SavedPart(first, last, missing), False))
        return found

    def _saved(self, piece: RestorePiece, lo: int, hi: int, checkpoint: int) -> Iterator[_Found]:
        """What was saved under this id for the keys lo … hi. Raises StateMissingError unless it is there for all."""
        folder = _folder(piece)
        exact = self._state(piece, f"{folder}/{_name(checkpoint, lo, hi)}")
        if exact is not None:
            yield _Found(SavedPart(lo, hi, exact), False)
            return
        saved = [range_ for id_, *range_ in map(_parsed, self._list(folder)) if id_ == checkpoint]
        while lo <= hi:
            # Pieces of one checkpoint do not overlap; of what does all the same, the longest is the owner's.
            last, first = max(((last, first) for first, last in saved if first <= lo <= last), default=(-1, -1))
            state = None if last < 0 else self._state(piece, f"{folder}/{_name(checkpoint, first, last)}")
            if state is None:
                raise self._gone(piece, f"{folder}/{_name(checkpoint, lo, hi)}", checkpoint)
            yield _Found(SavedPart(lo, min(last, hi), state), (first, last) != (lo, min(last, hi)))
            lo = last + 1

    def _state(self, piece: RestorePiece, path: str) -> bytes | None:
        """The bytes of a state; None: there is none. Raises StateMissingError if they are not what was saved."""
        data = self._read(path)
        if data is None:
            return None
        head = _HEAD.match(data)
        state = data[head.end() :] if head else b""
        if head is None or (int(head[1], 16), int(head[2])) != (xxh3_64_intdigest(state), len(state)):
            checkpoint = _parsed(path.rpartition("/")[2])[0]
            raise self._gone(piece, path, checkpoint, f"{self._files.name}/{path} was cut or changed")
        return state

    def _gone(self, piece: RestorePiece, path: str, checkpoint: int, why: str = "") -> StateMissingError:
        why = why or f"there is no {path} in {self._files.name}"
        way = (
            f"kafka-marshal checkpoints {quote(piece.group_id)}, then "
            f"kafka-marshal rollback {quote(piece.group_id)} --to ID"
        )
        if any(source == piece.group_id for _, _, source in piece.groups):  # that one is not to go back for this one
            way = (
                f"forget this group (forget-group), and fork {quote(piece.group_id)} again: "
                f"kafka-marshal checkpoints {quote(piece.group_id)}"
            )
        return StateMissingError(
            f"{_shown(piece)}: the state that belongs to its position {piece.position} was saved at checkpoint "
            f"{checkpoint}, and {why}. Without it, what was done before would be missing from the state. Nothing was "
            f"loaded. Bring it back (is the right folder mounted?), or go back to a checkpoint whose states are there: "
            f"{way}",
            topic=piece.topic,
            partition=piece.partition,
            checkpoint=checkpoint,
        )

    # What it does with files. Each raises StateError.

    def _check(self) -> None:
        with self._saying("the store can't be reached, so no state can be found. Nothing was read"):
            self._files.check()

    def _write(self, path: str, data: bytes) -> None:
        with self._saying(f"the state {path} was not saved, and its piece keeps the one before"):
            self._files.write(path, data)

    def _read(self, path: str) -> bytes | None:
        with self._saying(f"the state {path} can't be read"):
            return self._files.read(path)

    def _list(self, folder: str) -> list[str]:
        with self._saying(f"the states in {folder} can't be listed"):
            return self._files.names(folder)

    def _delete(self, paths: list[str]) -> None:
        with self._saying(f"{len(paths)} states can't be deleted"):
            self._files.delete(paths)

    @contextmanager
    def _saying(self, what: str) -> Iterator[None]:
        """what: with what it means."""
        try:
            yield
        except FilesError as error:
            raise StateError(f"{self._files.name}: {what}: {error}") from error


def _never_saved(piece: RestorePiece) -> StateMissingError:
    return StateMissingError(
        f"{_shown(piece)}: it is done up to its position {piece.position}, and no state was saved for that: the work "
        "was done before the group took checkpoints, or an operator set the position. Nothing was loaded. If the "
        "state may begin without it, say with what: load(piece, missing=b'…')",
        topic=piece.topic,
        partition=piece.partition,
        checkpoint=None,
    )


def _shown(piece: RestorePiece) -> str:
    is_whole = (piece.lo, piece.hi) == (0, MAX_KEY_HASH)
    return f"{piece.topic} [{piece.partition}]" + ("" if is_whole else f", key hashes {piece.lo} to {piece.hi}")


def _folder(piece: CheckpointPiece | RestorePiece) -> str:
    """Has all states of a partition."""
    return f"{_plain(piece.group_id)}/{_plain(piece.topic)}/{piece.partition}"


def _plain(name: str) -> str:
    """A name as a part of a path: no two names share one, whatever a group is called, in any file system."""
    if _PLAIN.fullmatch(name):
        return name
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{re.sub('[^a-z0-9_-]', '_', name.lower())[:60]}~{digest}"


def _name(checkpoint: int, lo: int, hi: int) -> str:
    """Names of one partition are in the order of ids."""
    return f"{checkpoint:019d}-{lo:016x}-{hi:016x}.state"


def _parsed(name: str) -> tuple[int, int, int]:
    """(checkpoint, lo, hi) of a whole state; −1: any other file."""
    match = _NAME.fullmatch(name)
    if match is None or match[4] is not None:
        return -1, 0, 0
    return int(match[1]), int(match[2], 16), int(match[3], 16)


def _states_within(piece: RestorePiece) -> list[tuple[int, int, int | None, str]]:
    """Its states and whose they are, cut at its keys, and neighbours with one id of one group as one."""
    found: list[tuple[int, int, int | None, str]] = []
    for lo, hi, checkpoint in piece.states:
        lo, hi = max(lo, piece.lo), min(hi, piece.hi)
        if lo > hi:
            continue
        group = next((group for first, last, group in piece.groups if first <= lo <= last), piece.group_id)
        if found and found[-1][1] + 1 == lo and found[-1][2:] == (checkpoint, group):
            lo = found.pop()[0]
        found.append((lo, hi, checkpoint, group))
    return found


def _less(lo: int, hi: int, others: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is left of lo … hi without the others, which ascend."""
    for first, last in others:
        if lo < first and lo <= hi:
            yield lo, min(hi, first - 1)
        lo = max(lo, last + 1)
    if lo <= hi:
        yield lo, hi


class Folder(Store):
    """A folder that all members of the group can reach; it is made if its parent is there.

    A state is written beside its place, flushed to the disk, and renamed: it is there as a whole, or not at all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = arguments.an_instance("path", path, (str, os.PathLike), "the path of a folder")
        given = arguments.text("path", os.fspath(path), "the path of a folder")
        if "://" in given:
            raise ConfigurationError(
                f"Folder({given!r}): a URL is no folder. Nothing was written. Use kafka_marshal.checkpoints.Bucket"
            )
        super().__init__(FolderFiles(given))


class Bucket(Store):
    """A bucket, or a part of one, such as ``s3://bucket/delays``. Its extra brings s3fs, for S3.

    An object store shows an object as a whole, or not at all, and has it safe when it says so. For another one install
    its package for fsspec, such as gcsfs. Objects need the rights to be listed, read, written and deleted.
    """

    def __init__(self, url: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        """Nothing is opened yet.

        Args:
            url: as fsspec takes it.
            storage_options: credentials and settings of the store, as its package for fsspec takes them. (s3fs finds
                those of the AWS command by itself.)

        Raises:
            ExtraMissingError: the extra is not installed.
            ConfigurationError: the URL is not one of an object store, or the store's package is not installed.
        """
        url = arguments.text("url", url, "a URL such as 's3://bucket/folder'")
        super().__init__(BucketFiles(url, storage_options=storage_options))
