"""What a conversion of a group has saved before it changed anything, and what the other kind can't keep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import quote

from kafka_marshal.admin.session import GroupKind
from kafka_marshal.beside import file_beside
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.ports import TopicPartition
from rationalizer import Progress
from rationalizer.limits import MAX_KEY_HASH

__all__ = ["Conversion", "Plan", "Repeat", "Saved", "file_of", "is_unfinished"]

_FORMAT: Final = "kafka-marshal convert-group 1"

#: saved: nothing was changed so far. changing: the group may be forgotten in a part of the log, or in all, and its
#: positions set in a part. done: they are set.
Phase = Literal["saved", "changing", "done"]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Offsets that are done, and are handed out again after the conversion: for key hashes lo … hi."""

    topic: str
    partition: int
    first: int
    last: int
    lo: int = 0
    hi: int = MAX_KEY_HASH

    @property
    def is_of_all_keys(self) -> bool:
        """Whether they come again whatever their key."""
        return self.lo == 0 and self.hi == MAX_KEY_HASH


@dataclass(frozen=True, slots=True)
class Saved:
    """The progress of one partition. `offset` is read next; `ranges`: done above it; `keyed`: (lo, hi, last done)."""

    topic: str
    partition: int
    offset: int
    ranges: tuple[tuple[int, int], ...] = ()
    keyed: tuple[tuple[int, int, int], ...] = ()
    metadata: str | None = None

    @classmethod
    def of(cls, key: TopicPartition, progress: Progress, metadata: str | None) -> Self:
        """As it is now."""
        keyed = () if progress.pieces is None else tuple((lo, hi, done) for lo, hi, done in progress.done_through)
        ranges = tuple((first, last) for first, last in split(progress.ranges).ranges)
        return cls(*key, progress.stable + 1, ranges, keyed, metadata)

    @property
    def key(self) -> TopicPartition:
        """(topic, partition)"""
        return self.topic, self.partition

    def repeats(self) -> list[Repeat]:
        """What will come again: a position is all that is carried over."""
        found = [Repeat(*self.key, first, last) for first, last in self.ranges]
        ahead = [(lo, hi, done) for lo, hi, done in self.keyed if done >= self.offset]
        return [*found, *(Repeat(*self.key, self.offset, done, lo, hi) for lo, hi, done in ahead)]


@dataclass(frozen=True, slots=True)
class Plan:
    """What the file holds."""

    group: str
    #: The coordination topic.
    log: str
    to: GroupKind
    #: Of the admin that pauses the group; the next one goes on as this one.
    client_id: str
    phase: Phase
    saved: tuple[Saved, ...]
    #: Settings of a coordinated group, for people: claims have none.
    settings: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path, phase: Phase) -> Plan:
        """Put it on the disk, whole or not at all."""
        plan = replace(self, phase=phase)
        text = json.dumps({"format": _FORMAT, **asdict(plan)}, indent=1, ensure_ascii=False)
        try:
            with file_beside(path) as file:
                file.write(f"{text}\n".encode())
        except OSError as error:
            raise ConfigurationError(
                f"{path}: the group's progress can't be saved there ({error.strerror}). Nothing was changed since it "
                "was saved last. Name another file"
            ) from error
        return plan

    def check(self, path: Path, group: str, log: str, to: GroupKind) -> None:
        """Raise ConfigurationError where this is of another conversion, which was not finished."""
        if self.phase != "done" and (self.group, self.log, self.to) != (group, log, to):
            raise ConfigurationError(
                f"{path} is of a conversion of group {self.group!r} of {self.log!r} to a {self.to} one that was not "
                "finished. Nothing was changed. Finish that one, or name another file"
            )

    def conversion(self, path: Path, *, resumed: bool) -> Conversion:
        """What is said of it."""
        repeats = tuple(repeat for each in self.saved for repeat in each.repeats())
        return Conversion(self.group, self.to, path, {each.key: each.offset for each in self.saved}, repeats, resumed)

    @classmethod
    def read(cls, path: Path) -> Plan | None:
        """None: there is no file. Raises ConfigurationError where it holds something else."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != _FORMAT:
                raise ValueError("another format")
            saved = tuple(
                Saved(
                    **{
                        **each,
                        "ranges": tuple((first, last) for first, last in each["ranges"]),
                        "keyed": tuple((lo, hi, done) for lo, hi, done in each["keyed"]),
                    }
                )
                for each in found.pop("saved")
            )
            return cls(**found, saved=saved)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} is no file of convert-group ({error}). Nothing was changed; name another one"
            ) from error


@dataclass(frozen=True, slots=True)
class Conversion:
    """What :meth:`Admin.convert_group` did."""

    group: str
    to: GroupKind
    #: The file with all progress as it was before.
    file: Path
    #: (topic, partition) → the offset that is read next.
    positions: Mapping[TopicPartition, int]
    repeats: tuple[Repeat, ...]
    #: An earlier run had been interrupted, and this one finished it.
    resumed: bool


def is_unfinished(group: str, file: Path | None) -> Path | None:
    """The file of an earlier conversion of the group that has begun to change it and did not come to its end."""
    path = file_of(group) if file is None else file
    plan = Plan.read(path)
    return path if plan is not None and plan.group == group and plan.phase == "changing" else None


def file_of(group: str) -> Path:
    """Where the progress of a group is saved unless somebody says otherwise: in the working directory."""
    return Path(f"kafka-marshal-convert-{quote(group, safe='')}.json")
