"""A history as bytes, for the file in which a page keeps it between starts and for other processes.

The bytes are a pickle that can make the classes below and nothing else: reading runs no code that the bytes name. The
state of coordination partitions is in it as snapshots (S1), and is judged as these are. The file:

    {"format": …, "release": …, "code": …, "topic_id": …, "partitions": …, "begins": […]}, a line
    the history
    32 hex digits: XXH3-128 of all before

It is a copy of what the log says, and is used only if nothing about it is in doubt: it is whole, this release wrote it,
and its last records are in the log as they were. Else the log is folded from its beginning.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import pickle
import stat
import sys
import zlib
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from xxhash import xxh3_128_hexdigest

import rationalizer
from kafka_marshal import observe, ui
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.files import file_beside
from kafka_marshal.instance import release
from kafka_marshal.logs import log
from kafka_marshal.observe.checkpoint_history import (
    CheckpointHistory,
    CompleteCheckpoint,
    Ended,
    MemberAnswer,
    OpenBarrier,
    WentBack,
)
from kafka_marshal.observe.checkpoints import KeyCut, Unsaved
from kafka_marshal.observe.log import Log
from kafka_marshal.ui.fold import CutPiece, GroupHistory, History, Mark, Marks, Pausing, Rebalanced, Waiting, hash_of
from kafka_marshal.ui.index import EventTable, KeySpans, Moments, Names, Samples, Series, Silences, SpanStore
from rationalizer.groups.group import Member
from rationalizer.groups.history import Assignments, Moved, Rebalance
from rationalizer.groups.pieces import Piece
from rationalizer.history import End, Owners, Span

FORMAT: Final = "kafka-marshal page index 1"

#: No larger file is written: reading it would take as long as folding the log, and the memory of several logs.
MOST_BYTES: Final = 256_000_000

#: The most files in the default folder: logs that were shown once must not fill a home. The oldest go.
MOST_FILES: Final = 8

_SUFFIX: Final = ".index"
_DIGEST_BYTES: Final = 32

#: Bytes of a topic's name in the file's name, which may have 255.
_MOST_NAME: Final = 120

#: Level 1 of zlib: a fifth of the size for a second of 10,000,000 records.
_LEVEL: Final = 1

#: What the bytes of a history are of.
_KINDS: Final[Mapping[tuple[str, str], type[Any]]] = {
    (kind.__module__, kind.__name__): kind
    for kind in (
        *(History, EventTable, KeySpans, Moments, Names, Silences, Samples, Series, SpanStore, array),
        *(GroupHistory, Pausing, Rebalanced, Waiting, Marks, Mark, CutPiece),
        *(CheckpointHistory, OpenBarrier, MemberAnswer, CompleteCheckpoint, Ended, WentBack, KeyCut, Unsaved),
        *(Assignments, Rebalance, Moved, Member, Piece, Owners, Span, End),
    )
}


class UnpackError(ValueError):
    """These bytes are of no history that this release has folded."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("array", "_array_reconstructor"):
            return super().find_class(module, name)
        if (module, name) not in _KINDS:
            raise UnpackError(f"it names {module}.{name}, which is no part of a history")
        return _KINDS[module, name]


def pack(history: History) -> bytes:
    """The history as bytes. Questions wait meanwhile, but not for its compression (*blocking*)."""
    with history.asking():
        packed = pickle.dumps(history, protocol=5)
    return zlib.compress(packed, _LEVEL)


def unpack(packed: bytes) -> History:
    """The history that was packed. Raises UnpackError."""
    try:
        found = _Unpickler(io.BytesIO(zlib.decompress(packed))).load()
    except UnpackError:
        raise
    except Exception as error:  # whatever the bytes lead to: they are of no history
        raise UnpackError(f"it can't be read ({type(error).__name__}: {error})") from error
    if not isinstance(found, History):
        raise UnpackError("it is no history")
    return found


@cache
def code_digest() -> str:
    """The digest of what folds and packs: this release, the interpreter, and the code as this process began it."""
    found = hashlib.sha256(f"{release()} {sys.version_info[:2]}".encode())
    for package in (rationalizer, observe, ui):
        for path in sorted(_code_of(Path(str(package.__file__)).parent)):
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:32]


def _code_of(folder: Path) -> Iterable[Path]:
    return (path for pattern in ("*.py", "*.so") for path in folder.rglob(pattern))


# -- the file ----------------------------------------------------------------------------------------------------


class DoubtError(Exception):
    """Why a file is not used."""


def default_folder() -> Path:
    """The folder of these files: in XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kafka-marshal" / "page"


class KeptIndex:
    """The file of one log. One thread uses it."""

    def __init__(self, path: Path | None = None) -> None:
        """path: None: in the default folder, by the topic's name and id."""
        self._path = path
        self._is_default = path is None
        self._topic_id = ""
        #: CP → where the log began when its history was begun.
        self._begins: dict[int, int] = {}
        #: Writing failed, and this was said.
        self._failed = False
        #: The next offsets of what is in the file.
        self._saved: dict[int, int] = {}

    def load(self, live: Log, topic_id: str) -> History | None:
        """The history in the file, if it is this log's (*blocking*); else None, and one line says why not.

        Raises KafkaUnavailableError.
        """
        if not topic_id:
            self._say("index_not_kept", "the broker reports no topic id, by which a log is recognized")
            self._failed = True
            return None
        self._topic_id, self._begins = topic_id, dict(live.starts)
        if self._path is None:
            self._path = default_folder() / f"{live.topic[:_MOST_NAME]}.{topic_id}{_SUFFIX}"
        try:
            history = self._read(self._path, live)
            self._compare(history, live)
        except FileNotFoundError:
            return None
        except (DoubtError, UnpackError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self._say("index_not_used", f"{self._path}: {why}. It is not used: the log is folded from its beginning")
            return None
        self._saved = _next(history)
        return history

    def save(self, history: History) -> None:
        """Replace the file (*blocking*). If it can't be written, one line says so, once."""
        path = self._path
        if path is None or self._failed or _next(history) == self._saved:
            return
        packed, saved = pack(history), _next(history)
        if len(packed) > MOST_BYTES:
            self._failed = True
            self._say("index_not_kept", f"it has {len(packed):,} bytes, and at most {MOST_BYTES:,} are kept")
            return
        header = {**self._expected(history), "begins": sorted(self._begins.items())}
        content = json.dumps(header).encode() + b"\n" + packed
        try:
            if self._is_default:
                path.parent.mkdir(0o700, parents=True, exist_ok=True)
                _remove_oldest(path)
            with file_beside(path, 0o600) as file:
                file.write(content)
                file.write(xxh3_128_hexdigest(content).encode())
        except (OSError, ConfigurationError) as error:
            self._failed = True
            why = error.strerror if isinstance(error, OSError) else error
            self._say("index_not_kept", f"{path} can't be written: {why}")
            return
        self._saved = saved

    # -- inside ----------------------------------------------------------------------------------------------

    def _say(self, event: str, text: str) -> None:
        means = "" if event == "index_not_used" else ". The next start folds the log from its beginning"
        log(logging.WARNING, event, "the page's index: %s", f"{text}{means}")

    def _expected(self, history: Log | History) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "release": release(),
            "code": code_digest(),
            "topic_id": self._topic_id,
            "partitions": history.partitions,
        }

    def _read(self, path: Path, live: Log) -> History:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise DoubtError("it is no file")
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise DoubtError("others may have written it: it is another user's, or its mode lets them")
            if found.st_size > 2 * MOST_BYTES:
                raise DoubtError("it is larger than any that is written")
            content = file.read()
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if xxh3_128_hexdigest(body).encode() != digest:
            raise DoubtError("it is damaged: its bytes are not those that were written")
        line, _, packed = body.partition(b"\n")
        try:
            header: dict[str, Any] = json.loads(line)
            begins = {int(cp): int(offset) for cp, offset in header["begins"]}
        except (ValueError, TypeError, AttributeError, KeyError):
            raise DoubtError("it is no index of a page") from None
        for name, value in self._expected(live).items():
            if header.get(name) != value:
                raise DoubtError(f"its {name} is {header.get(name)!r}, not {value!r}")
        history = unpack(packed)
        if any(live.starts[cp] < begins.get(cp, 0) for cp in history.worlds):
            raise DoubtError("the log reaches further back than when it was written: it is shown with its archive now")
        self._begins = begins
        return history

    @staticmethod
    def _compare(history: History, live: Log) -> None:
        """Raise DoubtError unless the last records of the history are in the log, as they were."""
        places, wanted = _next(history), {}
        for cp, offset in places.items():
            if offset > live.ends[cp]:
                raise DoubtError(f"it reaches to offset {offset} of partition {cp}, and the log to {live.ends[cp]}")
            if offset < live.starts[cp]:
                raise DoubtError(
                    f"the log of partition {cp} was pruned up to offset {live.starts[cp]}, and it reaches to {offset}"
                )
            found = [each for each in history.joints[cp] if each[0] >= live.starts[cp]]
            if found:
                wanted[cp] = dict(found)
            elif offset > history.starts[cp][0]:
                raise DoubtError(f"the log of partition {cp} has none of the records any more that it was read up to")
        if not wanted:
            return
        begin = {cp: min(found) for cp, found in wanted.items()}
        for cp, entries in live.read(begin, {cp: places[cp] for cp in wanted}):
            for entry in entries:
                if wanted[cp].pop(entry[0], "") not in ("", hash_of(entry)):
                    raise DoubtError(f"offset {entry[0]} of partition {cp} is another record in the log")
        missing = [cp for cp, left in wanted.items() if left]
        if missing:
            raise DoubtError(f"the log of partition(s) {missing} has not all records that it was read from")


def _next(history: History) -> dict[int, int]:
    return {cp: world.next_offset for cp, world in history.worlds.items()}


def _remove_oldest(path: Path) -> None:
    """Leave room for one more file in the default folder."""
    found = []
    for each in path.parent.glob(f"*{_SUFFIX}"):
        with suppress(FileNotFoundError):  # another page removes it, too
            found.append((each.stat().st_mtime, each))
    others = [each for _, each in sorted(found) if each != path]
    for each in others[: max(0, len(others) + 1 - MOST_FILES)]:
        each.unlink(missing_ok=True)
