"""A history as bytes and back, for a file and for other processes.

It is a pickle that can make the classes below and nothing else, each by its name here: reading runs no code that the
bytes name. The state of coordination partitions is in it as snapshots (S1), and is judged as these are.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import rationalizer
from kafka_marshal import observe, ui
from kafka_marshal.instance import release
from kafka_marshal.observe.checkpoints import Answer, CheckpointHistory, Cut, Ended, OpenBarrier, Taken, WentBack
from kafka_marshal.ui import checkpoints
from kafka_marshal.ui.fold import GroupHistory, History, Pausing, Rebalanced, Waiting
from kafka_marshal.ui.index import Events, KeySpans, Names, Pulse, Samples, Series, SpanStore
from rationalizer import World
from rationalizer.groups.group import Member
from rationalizer.groups.history import Assignments, Moved, Rebalance
from rationalizer.groups.pieces import Piece
from rationalizer.history import End, Owners, Span

#: What the bytes of a history are of.
_KINDS: Final[Sequence[type[Any]]] = (
    *(Events, KeySpans, Names, Pulse, Samples, Series, SpanStore, GroupHistory, Pausing, Rebalanced, Waiting),
    *(checkpoints.Marks, checkpoints.Mark, checkpoints.Moments, checkpoints.Piece),
    *(CheckpointHistory, OpenBarrier, Answer, Taken, Ended, WentBack, Cut),
    *(Assignments, Rebalance, Moved, Member, Piece, Owners, Span),
)
_NUMBERS: Final[Mapping[type[Any], int]] = {kind: number for number, kind in enumerate(_KINDS)}

#: Attributes of a history that are not packed: they belong to the process, or are packed as snapshots.
_APART: Final = ("worlds", "_lock", "_asked")

#: Level 1 of zlib: a fifth of the size for a second of 10,000,000 records.
_LEVEL: Final = 1


class UnpackError(ValueError):
    """These bytes are of no history that this release has folded."""


def pack(history: History) -> bytes:
    """The history as bytes. Questions wait meanwhile, but not for its compression (*blocking*)."""
    with history.asking():
        state = {name: value for name, value in vars(history).items() if name not in _APART}
        worlds = {cp: world.snapshot() for cp, world in history.worlds.items()}
        file = io.BytesIO()
        _Packer(file, protocol=5).dump((state, worlds))
    return zlib.compress(file.getbuffer(), _LEVEL)


def unpack(packed: bytes) -> History:
    """The history that was packed. Raises UnpackError."""
    try:
        state, snapshots = _Unpacker(io.BytesIO(zlib.decompress(packed))).load()
        history = History(state["partitions"])
        if vars(history).keys() - _APART != state.keys():
            raise UnpackError("it has other parts than a history of this release")
        vars(history).update(state)
        history.worlds = {cp: World.restore(snapshot, history.partitions) for cp, snapshot in snapshots.items()}
    except UnpackError:
        raise
    except Exception as error:  # whatever the bytes lead to: they are of no history
        raise UnpackError(f"it can't be read ({type(error).__name__}: {error})") from error
    return history


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


class _Packer(pickle.Pickler):
    def reducer_override(self, found: Any) -> Any:
        kind = type(found)
        if isinstance(found, End):
            return _end, (found.value,)
        number = _NUMBERS.get(kind)
        if number is None:
            return NotImplemented
        if issubclass(kind, tuple):
            return _tuple, (number, tuple(found))
        return _blank, (number,), _state_of(found), None, None, _fill


def _state_of(found: object) -> dict[str, Any]:
    if hasattr(found, "__dict__"):
        return vars(found)
    kind = type(found)
    names = getattr(kind, "__mypyc_attrs__", None) or getattr(kind, "__slots__")  # noqa: B009
    return {name: getattr(found, name) for name in names}


def _blank(number: int) -> object:
    kind = _KINDS[number]
    found: object = object.__new__(kind)
    return found


def _fill(found: object, state: dict[str, Any]) -> None:
    for name, value in state.items():
        object.__setattr__(found, name, value)


def _tuple(number: int, fields: tuple[Any, ...]) -> object:
    return _KINDS[number](*fields)


def _end(value: str) -> End:
    return End(value)


class _Unpacker(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = {each.__name__: each for each in (_blank, _fill, _tuple, _end)}.get(name)
        if found is not None and module == __name__:
            return found
        if module == "array" and name in ("array", "_array_reconstructor"):
            return super().find_class(module, name)
        raise UnpackError(f"it names {module}.{name}, which is no part of a history")
