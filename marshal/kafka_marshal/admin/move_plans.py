"""The positions before a move, in a file, to undo it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Final, Self
from urllib.parse import quote

from kafka_marshal.admin.positions import Keep, Move
from kafka_marshal.beside import read_json, write_json
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.ports import TopicPartition

_FORMAT: Final = "kafka-marshal release-group 1"


@dataclass(frozen=True, slots=True)
class _Replaced:
    """One partition: the position before (None: none), what was done above it, and the position after."""

    topic: str
    partition: int
    before: int | None
    after: int
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> TopicPartition:
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The positions of one group that a move replaced."""

    group: str
    #: The coordination topic.
    log: str
    #: When (ms since 1970, by the clock of the machine that moved them).
    time: int
    replaced: tuple[_Replaced, ...]

    @classmethod
    def of(cls, group: str, log: str, moves: Iterable[Move]) -> Self:
        """moves: as planned, under the pause."""
        replaced = tuple(_Replaced(*move.key, move.before, move.after, move.ranges) for move in moves if not move.lost)
        return cls(group, log, int(time.time() * 1000), replaced)

    @property
    def targets(self) -> dict[TopicPartition, int]:
        """The targets of an undo; without partitions that had no position."""
        return {each.key: each.before for each in self.replaced if each.before is not None}

    @property
    def keeps(self) -> dict[TopicPartition, Keep]:
        """What is done above those: before the move, and since."""
        return {each.key: Keep(each.ranges, each.after) for each in self.replaced if each.before is not None}

    @property
    def left_out(self) -> list[TopicPartition]:
        """Partitions that an undo does not move."""
        return [each.key for each in self.replaced if each.before is None]

    def write(self, path: Path) -> None:
        """Write it to a file, atomically. Raises ConfigurationError."""
        refused = (
            "the positions as they were can't be saved there ({}). Nothing was moved, and the group continues. Name "
            "another file (--plan)"
        )
        write_json(path, _FORMAT, asdict(self), refused)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read it from a file. Raises ConfigurationError."""
        try:
            found = read_json(Path(path), _FORMAT)
            replaced = tuple(
                _Replaced(**{**each, "ranges": tuple((first, last) for first, last in each["ranges"])})
                for each in found.pop("replaced")
            )
            return cls(**found, replaced=replaced)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{os.fspath(path)} is no plan that release-group wrote ({error}). Nothing was changed"
            ) from error

    def check(self, group: str, log: str) -> None:
        """Raise ConfigurationError if it is of another group or coordination topic."""
        if (self.group, self.log) != (group, log):
            raise ConfigurationError(
                f"this plan is of group {self.group!r} of {self.log!r}, not of {group!r} of {log!r}. Nothing was "
                "changed"
            )


def plan_path(group: str) -> Path:
    """The default file of a plan: in the working directory, or that of temporary files."""
    folder = Path.cwd() if os.access(".", os.W_OK) else Path(tempfile.gettempdir())
    name = f"kafka-marshal-release-{quote(group, safe='')}-{time.strftime('%Y%m%dT%H%M%S')}"
    names = (f"{name}{(number and f'-{number}') or ''}.json" for number in count())
    return next(path for each in names if not (path := folder / each).exists())
