"""Record values and bytes (section 2).

Reading goes in the order of E6, each step with its own exception:

    value   one complete msgpack array of the allowed things, with five good fields in front   MalformedError
    version not above the CP's level                                              UnsupportedVersionError
    type    known at that level                                                          UnknownTypeError
    fields  as many as the type has, each well formed                   MalformedError (with a type's name)

What bytes may hold at all, and how that is found out without trusting them, is in `unpacking`.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import ClassVar, Final

from msgpack import packb

from rationalizer import codes
from rationalizer.levels import FIRST_LEVEL, REDO_LEVEL
from rationalizer.limits import HEAD_FIELDS, MAX_VALUE_BYTES
from rationalizer.travel import Travels
from rationalizer.wire import wellformed as ok
from rationalizer.wire.records import (
    KINDS,
    ConfigureGroup,
    InvalidRecordError,
    Kind,
    Record,
    SettleOffsets,
    SettlingMessages,
)
from rationalizer.wire.unpacking import Message, NotAllowedError, look_at_all, unpack


class RejectedValueError(Travels, ValueError):
    """A value that every replica rejects (E3): `code` says as what, `kind` is its row if it got that far.

    The log is sound and the state untouched: a client appended something that is no record.
    """

    code: ClassVar[str] = codes.MALFORMED

    def __init__(self, why: str, kind: Kind | None = None) -> None:
        super().__init__(f"{self.code}: {why}. Every replica rejects this record; the state stays as it was.")
        self.kind = kind


class MalformedError(RejectedValueError):
    """The value, or one of its fields, is not as E2 says."""


class UnsupportedVersionError(RejectedValueError):
    """The version is above the CP's level (E4)."""

    code: ClassVar[str] = codes.UNSUPPORTED_VERSION


class UnknownTypeError(RejectedValueError):
    """The type is not among those of the CP's level (E6)."""

    code: ClassVar[str] = codes.UNKNOWN_TYPE


#: Above this the collector of cycles rests while the value is read.
_LARGE: Final = 16_384


def encode(record: Record) -> bytes:
    """The value to append for a record, in the shortest msgpack forms (E1).

    Raises InvalidRecordError where it would be longer than readers accept.
    """
    value: bytes = packb(
        (
            record.version,
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
    record = kind.build(message[2], message[3], message[4], message[HEAD_FIELDS:])
    if message[0] >= REDO_LEVEL and isinstance(record, (SettlingMessages, SettleOffsets)):
        return replace(record, redo=True)
    return record


def read(value: bytes | None, level: int) -> tuple[Kind, Message]:
    """The value's kind and fields, checked as far as E6 goes without any state. Raises RejectedValueError."""
    if value is None or len(value) <= _LARGE or not gc.isenabled():
        return _read(value, level)
    # A large value may be a hundred thousand containers. They set off the collector of cycles again and again,
    # each time over all that the process holds: seconds instead of a tenth, and there are no cycles in them.
    gc.disable()
    try:
        return _read(value, level)
    finally:
        gc.enable()


def _read(value: bytes | None, level: int) -> tuple[Kind, Message]:
    if value is None:
        raise MalformedError("the record has no value")
    if len(value) > MAX_VALUE_BYTES:
        raise MalformedError(f"{len(value):,} bytes, at most {MAX_VALUE_BYTES:,} are allowed")
    try:
        message = unpack(value)
        try:
            kind = _kind_of(message, level)
            if kind.type == ConfigureGroup.TYPE:  # a value may hide behind a later equal key
                look_at_all(value, message)
            return kind, message
        except RejectedValueError:
            # E6 checks the whole value first. Where every field is as its kind wants it there is nothing else
            # in the value, so that look is taken only now; what it finds comes first.
            look_at_all(value, message)
            raise
    except NotAllowedError as error:
        raise MalformedError(str(error)) from None


def _kind_of(message: Message, level: int) -> Kind:
    """E6 from the first five fields to the type's own."""
    if len(message) < HEAD_FIELDS:
        raise MalformedError(f"{len(message)} fields, every record has at least {HEAD_FIELDS}")
    version, number, instance_id, client_id, group_id, *own = message
    if type(version) is not int or version < 1 or type(number) is not int:
        raise MalformedError("version must be an int of at least 1, and type an int")
    problem = ok.id_problem(instance_id, client_id, group_id)
    if problem is not None:
        raise MalformedError(problem)
    if version > level:
        raise UnsupportedVersionError(f"version {version}, the level is {level}")
    kind = KINDS.get(number)
    if kind is None or kind.level > level:
        raise UnknownTypeError(f"type {number} is not known at level {level}")
    problem = kind.problem(own)
    if problem is None and kind.type == ConfigureGroup.TYPE:
        later = [name for name, _ in own[0] if ok.SETTING_VERSIONS.get(name, 0) > version]
        problem = f"a record of version {version} knows no setting {later[0]}" if later else None
    if problem is not None:
        raise MalformedError(f"{kind.name}: {problem}", kind)
    return kind


def parse_state(snapshot: bytes) -> Message:
    """The array that a snapshot is: read as carefully as a record's value, but of any length."""
    try:
        message = unpack(snapshot)
        look_at_all(snapshot, message)
    except NotAllowedError as error:
        raise MalformedError(str(error)) from None
    return message
