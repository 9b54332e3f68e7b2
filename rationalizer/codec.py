"""Record values and bytes (section 2).

Reading goes in the order of E6, each step with its own exception:

    value   one complete msgpack array of the allowed things, with five good fields in front   MalformedError
    version not above the CP's level                                              UnsupportedVersionError
    type    known at that level                                                          UnknownTypeError
    fields  as many as the type has, each well formed                   MalformedError (with a type's name)

Values come from anybody who may write to the topic, so nothing in them decides how much work or memory is
spent beyond their own length: containers are counted before they are allocated, and depth is looked at level
by level, never by recursion.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Final

from msgpack import Unpacker, packb, unpackb
from msgpack.exceptions import UnpackException

from rationalizer import codes
from rationalizer import wellformed as ok
from rationalizer.limits import FIRST_LEVEL, HEAD_FIELDS, MAX_DEPTH, MAX_VALUE_BYTES, WRITTEN_VERSION
from rationalizer.records import KINDS, InvalidRecordError, Kind, Record

#: A value as read: (version, type, instance_id, client_id, group_id, *own fields). Arrays are tuples; maps,
#: which no type of level 1 has, are lists of their pairs, in order (of equal keys the last counts).
Message = tuple[Any, ...]


class RejectedValueError(ValueError):
    """A value that every replica rejects (E3): `code` says as what, `kind` is its row if it got that far.

    The log is sound and the state untouched: somebody appended something that is no record.
    """

    code: str = codes.MALFORMED

    def __init__(self, why: str, kind: Kind | None = None) -> None:
        super().__init__(f"{self.code}: {why}. Every replica rejects this record; the state stays as it was.")
        self.kind = kind


class MalformedError(RejectedValueError):
    """The value, or one of its fields, is not as E2 says."""


class UnsupportedVersionError(RejectedValueError):
    """The version is above the CP's level (E4)."""

    code = codes.UNSUPPORTED_VERSION


class UnknownTypeError(RejectedValueError):
    """The type is not among those of the CP's level (E6)."""

    code = codes.UNKNOWN_TYPE


_SCALARS: Final = frozenset({int, str, bool, type(None)})
_ALLOWED: Final = _SCALARS | {tuple, list}

#: Below this a value can't claim enough to hurt; above it the claims are checked before anything is built.
_SMALL: Final = 1024


def encode(record: Record) -> bytes:
    """The value to append for a record, in the shortest msgpack forms (E1).

    Raises InvalidRecordError where it would be longer than readers accept.
    """
    value: bytes = packb(
        (
            WRITTEN_VERSION,
            record.TYPE,
            record.instance_id,
            record.client_id,
            record.group_id,
            *record.own_fields(),
        )
    )
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidRecordError(
            f"{type(record).__name__}: {len(value):,} bytes, readers accept {MAX_VALUE_BYTES:,}. "
            "Nothing was written; split the record."
        )
    return value


def decode(value: bytes | None, level: int = FIRST_LEVEL) -> Record:
    """The record that a value stands for, at a CP of this level. Raises RejectedValueError (E6)."""
    kind, message = read(value, level)
    return build(kind, message)


def build(kind: Kind, message: Message) -> Record:
    """The record for a message that `read` has passed."""
    return kind.build(message[2], message[3], message[4], message[HEAD_FIELDS:])


def read(value: bytes | None, level: int) -> tuple[Kind, Message]:
    """The value's kind and fields, checked as far as E6 goes without any state."""
    message = _parse(value)
    if message[0] > level:
        raise UnsupportedVersionError(f"version {message[0]}, the level is {level}")
    kind = KINDS.get(message[1])
    if kind is None or kind.level > level:
        raise UnknownTypeError(f"type {message[1]} is not known at level {level}")
    problem = kind.problem(message[HEAD_FIELDS:])
    if problem is not None:
        raise MalformedError(f"{kind.name}: {problem}", kind)
    return kind, message


def parse_state(snapshot: bytes) -> Message:
    """The array that a snapshot is: as careful as with a record's value, but of any length."""
    message = _unpack(snapshot)
    _look_at_all(message)
    return message


def _parse(value: bytes | None) -> Message:
    """The value as E2's first sentences want it, with its first five fields well formed."""
    if value is None:
        raise MalformedError("the record has no value")
    if len(value) > MAX_VALUE_BYTES:
        raise MalformedError(f"{len(value):,} bytes, at most {MAX_VALUE_BYTES:,} are allowed")
    message = _unpack(value)
    _look_at_all(message)
    if len(message) < HEAD_FIELDS:
        raise MalformedError(f"{len(message)} fields, every record has at least {HEAD_FIELDS}")
    if type(message[0]) is not int or message[0] < 1 or type(message[1]) is not int:
        raise MalformedError("version must be an int of at least 1, and type an int")
    problem = ok.id_problem(message[2], message[3], message[4])
    if problem is not None:
        raise MalformedError(problem)
    return message


def _unpack(value: bytes) -> Message:
    """The one msgpack array that these bytes are."""
    try:
        if len(value) > _SMALL:
            _measure(value)
        # Maps become lists of pairs, so that a value hidden by a later equal key is looked at too.
        message = unpackb(value, use_list=False, object_pairs_hook=list)
    except (ValueError, UnpackException) as error:
        # ValueError holds msgpack's FormatError, StackError and ExtraData, and invalid UTF-8.
        raise MalformedError(f"no msgpack value that is allowed here ({type(error).__name__})") from None
    if type(message) is not tuple:
        raise MalformedError("the value is no array")
    return message


def _measure(value: bytes) -> None:
    """Raise where a container claims more than there is, before memory is set aside for what it claims."""
    unpacker = Unpacker(max_buffer_size=len(value))
    unpacker.feed(value)
    unpacker.skip()


def _look_at_all(message: Message) -> None:
    """Raise MalformedError for anything but arrays, maps with string keys, ints, strings, nil and booleans.

    Goes down level by level over everything at that depth at once.
    """
    things: Iterable[Any] = message
    for _ in range(MAX_DEPTH):
        things = list(things)
        found = set(map(type, things))
        if found <= _SCALARS:
            return
        if not found <= _ALLOWED:
            raise MalformedError("floats, binary and extension types are not allowed")
        arrays = [thing for thing in things if type(thing) is tuple]
        maps = [thing for thing in things if type(thing) is list]
        pairs = list(chain.from_iterable(maps))
        if any(type(key) is not str for key, _ in pairs):
            raise MalformedError("the keys of a map must be strings")
        things = chain(chain.from_iterable(arrays), (inner for _, inner in pairs))
    raise MalformedError(f"nested more than {MAX_DEPTH} deep")
