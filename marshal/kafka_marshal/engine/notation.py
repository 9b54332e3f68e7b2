"""How a recording writes inputs, effects and readings: as JSON, one line each, without the user's keys and values.

It keeps topic, partition, offset and assignment of a message. For a partition shared by key,
the hash of each key is a reading. Records of the coordination topic are kept whole.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, cast

from kafka_marshal.engine import effects, policies
from kafka_marshal.engine.policies import Policy
from kafka_marshal.engine.settings import (
    CheckpointOptions,
    ConsumerSettings,
    EngineSettings,
    GroupOptions,
    SharingOptions,
    Why,
)
from kafka_marshal.engine.work.behind import HeldBack
from kafka_marshal.engine.work.pull import Wanted
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.ports import TopicInfo
from rationalizer import decode, encode
from rationalizer.levels import SUPPORTED_LEVEL

#: A key of a user's message in a warning.
_KEY = re.compile(r"""key (?:None|b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*")""")


class RecordedError(Exception):
    """An exception from a recorded run: its class and text."""


def _named(*kinds: type) -> dict[str, type]:
    return {kind.__name__: kind for kind in kinds}


#: Name → class, for classes that are written field by field.
_ROWS: Mapping[str, type] = {
    name: kind
    for module in (effects, policies)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))
} | _named(
    CheckpointOptions,
    ConsumerSettings,
    EngineSettings,
    GroupOptions,
    HeldBack,
    OffsetRange,
    SharingOptions,
    TopicInfo,
    Wanted,
)
_WORDS: Mapping[str, type[StrEnum]] = {
    "Callback": effects.Callback,
    "TakeOverStep": effects.TakeOverStep,
    "Why": Why,
}

#: Field that is not written → its value in a replay.
_INSTEAD: Mapping[str, object] = {"policy_raised": lambda error: None}


def without_keys(text: str) -> str:
    """A warning with message keys removed."""
    return _KEY.sub("key …", text)


def in_stretches(offsets: Iterable[int]) -> list[list[int]]:
    """Offsets as [first, last] of each stretch without a gap, in the same order."""
    found: list[list[int]] = []
    for offset in offsets:
        if found and offset == found[-1][1] + 1:
            found[-1][1] = offset
        else:
            found.append([offset, offset])
    return found


def offsets_in(stretches: Iterable[Sequence[int]]) -> list[int]:
    """The inverse of ``in_stretches``."""
    return [offset for first, last in stretches for offset in range(first, last + 1)]


def to_json(value: Any, other: Callable[[Any], Any]) -> Any:
    """A value in JSON form. other: writes the engine's own objects, which have no form here."""
    if value is None or value.__class__ in (bool, int, float, str):
        return value
    name = type(value).__name__
    if name in _WORDS:
        return {name: str(value)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, effects.Append):
        return {name: [value.cp, b64encode(encode(value.record)).decode(), value.token]}
    if isinstance(value, effects.Warn):
        return {name: [without_keys(value.message), value.is_error]}
    if isinstance(value, HeldBack):
        value = value._replace(key=None)
    if _ROWS.get(name) is type(value):
        names = value._fields if hasattr(value, "_fields") else [each.name for each in fields(cast("Any", value))]
        return {name: [None if each in _INSTEAD else to_json(getattr(value, each), other) for each in names]}
    if isinstance(value, Mapping):
        return {"map": [[to_json(key, other), to_json(each, other)] for key, each in value.items()]}
    if isinstance(value, set | frozenset):
        return {"set": sorted((to_json(each, other) for each in value), key=repr)}
    if isinstance(value, tuple):
        return {"tuple": [to_json(each, other) for each in value]}
    if isinstance(value, list):
        return [to_json(each, other) for each in value]
    if isinstance(value, datetime):
        return {"datetime": value.isoformat()}
    if isinstance(value, BaseException):
        return {"error": [name, without_keys(str(value))]}
    return other(value)


def from_json(value: Any, other: Callable[[str, Any], Any]) -> Any:
    """The inverse of ``to_json``. other: finds the engine's own objects, by kind and written form."""
    if isinstance(value, list):
        return [from_json(each, other) for each in value]
    if not isinstance(value, dict):
        return value
    ((name, written),) = value.items()
    if name in _WORDS:
        return _WORDS[name](written)
    if name == "Append":
        cp, record, token = written
        return effects.Append(cp, decode(b64decode(record), SUPPORTED_LEVEL), token)
    if name in _ROWS:
        return _row(_ROWS[name], [from_json(each, other) for each in written])
    match name:
        case "map":
            return {from_json(key, other): from_json(each, other) for key, each in written}
        case "set":
            return frozenset(from_json(each, other) for each in written)
        case "tuple":
            return tuple(from_json(each, other) for each in written)
        case "datetime":
            return datetime.fromisoformat(written)
        case "error":
            return RecordedError(": ".join(written))
    return other(name, written)


def _row(kind: type, values: list[Any]) -> Any:
    if hasattr(kind, "_fields"):
        return kind(*values)
    names = [each.name for each in fields(cast("Any", kind))]
    return kind(*(_INSTEAD.get(name, value) for name, value in zip(names, values, strict=True)))


def is_ours(policy: Policy) -> bool:
    """Whether a policy is one of this library, or a combination of them: a replay can recreate it."""
    own = _ROWS.get(type(policy).__name__) is type(policy)
    parts = [getattr(policy, each.name) for each in fields(cast("Any", policy))] if own else []
    return own and all(is_ours(part) for part in parts if isinstance(part, Policy))
