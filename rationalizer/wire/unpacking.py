"""From bytes to one msgpack array, and whether it is made of what E2 allows anywhere in a value.

Values come from anybody who may write to the topic, so nothing in them decides how much work or memory is spent
beyond their own length:

* Containers are measured before they are allocated, in values large enough to hurt.
* What a value holds is checked in C code, over many things at once: no recursion, no step of Python for each thing.
* A large value may be a million tiny containers. Its maps within maps, which no type has, are not kept; how deep it
  nests shows in msgpack's own stack, and what is in it by its bytes.

Does anything begin in a way that E2 allows nowhere? Checking what was built takes a step for each thing, several times
what building it took. A regular expression goes over the bytes instead, and nothing is allocated. It steps over a
container's header only, so what is within follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Final

from msgpack import Unpacker, unpackb
from msgpack.exceptions import StackError, UnpackException

from rationalizer.limits import HEAD_FIELDS, MAX_DEPTH

#: How every float, binary and extension begins. Other things may have such a byte in them, too.
_FORBIDDEN: Final = bytes([*range(0xC4, 0xCC), *range(0xD4, 0xD9)])

#: Things that are one byte: small ints, headers of small containers, "", nil, booleans.
_ONE: Final = bytes([*range(0xA1), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)])

#: How what takes more begins, by the bytes that follow: ints, headers of containers, strings below 32 bytes.
_MORE: Final = {
    1: b"\xcc\xd0",
    2: b"\xcd\xd1\xdc\xde",
    4: b"\xce\xd2\xdd\xdf",
    8: b"\xcf\xd3",
}
_SHORT_STRINGS: Final = 32

#: Strings with a length of one byte, and those with a longer one that would fit. The others are few: 256 bytes or more.
_FITS: Final = rb"(?:\xd9|\xda\x00|\xdb\x00\x00\x00)"
_LENGTHS: Final = 256

#: How a long string begins, and the bytes that its length takes.
_LONG_STRINGS: Final = {0xDA: 2, 0xDB: 4}

#: Things that one match goes over: a match keeps some bytes for each one.
_AT_ONCE: Final = 1_024


def _class(first: bytes) -> bytes:
    return b"[" + b"".join(b"\\x%02x" % byte for byte in first) + b"]"


def _followed_by(count: int, first: bytes) -> bytes:
    return _class(first) + b".{%d}" % count


def _run() -> re.Pattern[bytes]:
    """Anything allowed, up to _AT_ONCE times; what is short is tried first, and no two begin alike."""
    lengths = b"|".join(_followed_by(count, bytes([count])) for count in range(_LENGTHS))
    more = [_followed_by(n, _MORE.get(n, b"") + bytes([0xA0 + n])) for n in range(1, _SHORT_STRINGS)]
    things = [_class(_ONE) + b"++", more[0], _FITS + b"(?:" + lengths + b")", *more[1:]]
    return re.compile(b"(?:" + b"|".join(things) + b"){1,%d}" % _AT_ONCE, re.DOTALL)


_RUN: Final = _run()


def only_allowed(value: bytes) -> bool:
    """Whether no float, binary or extension is anywhere in these bytes, which are known to be msgpack."""
    if len(value.translate(None, _FORBIDDEN)) == len(value):
        return True
    at = 0
    while at < len(value):
        run = _RUN.match(value, at)
        if run is not None:
            at = run.end()
        elif value[at] in _LONG_STRINGS:
            start = at + 1 + _LONG_STRINGS[value[at]]
            at = start + int.from_bytes(value[at + 1 : start])
        else:
            return False
    return True


#: A value as read: (version, type, instance_id, client_id, group_id, *own fields). Arrays are tuples. A map that is the
#: only specific field is the list of its pairs; others, which no type has, are that too, or ``list`` itself.
Message = tuple[Any, ...]

#: Keys and values of a map.
_Pairs = list[tuple[Any, Any]]

#: Below this a value can't claim enough to hurt; above it the claims are checked before anything is built.
SMALL: Final = 1024
#: Above this a value is checked in the way for large ones; below it that costs more than it saves.
LARGE: Final = 4096

_SCALARS: Final = frozenset({int, str, bool, type(None)})
_ALLOWED: Final = _SCALARS | {tuple, list}

_NOT_ALLOWED: Final = "floats, binary and extension types are not allowed, and keys of maps must be strings"

_EMPTY_MAP: Final[_Pairs] = []

#: Arrays in arrays that are tried to find out how many a reader takes.
_MOST_TRIED: Final = 1 << 14


class NotAllowedError(ValueError):
    """These bytes are no msgpack array, or hold what E2 allows nowhere."""


def _deepest() -> int:
    """Containers within each other that msgpack's reader in C takes (1.2: 1,024); 0: it is not that reader.

    The one in Python takes as many as the interpreter's stack has room for, which says nothing.
    """
    if Unpacker.__module__.endswith("fallback"):
        return 0
    deepest, too_deep = 0, _MOST_TRIED
    while too_deep - deepest > 1:
        tried = (deepest + too_deep) // 2
        try:
            _skip(b"\x91" * (tried - 1) + b"\x90")
            deepest = tried
        except StackError:
            too_deep = tried
    return deepest if too_deep < _MOST_TRIED else 0


def _skip(value: bytes) -> None:
    """Go through one thing without building it. Raises where a container claims more than there is."""
    unpacker = Unpacker(max_buffer_size=len(value))
    unpacker.feed(value)
    unpacker.skip()


#: Arrays around a value, of which MAX_DEPTH may nest and not one more; empty: that cannot be found out like this.
_AROUND: Final = b"\x91" * max(0, _deepest() - MAX_DEPTH)


def unpack(value: bytes) -> Message:
    """The array that these bytes are.

    Raises NotAllowedError if they are invalid, and may do so if they hold what E2 forbids: see ``look_at_all``.
    """
    large = _is_large(value)
    try:
        if len(value) > SMALL:
            _skip(_AROUND + value if large else value)
        # For a map of a large value: the type of its pairs, which are gone at once.
        message = _build(value, type if large else _pairs_of_map)
        if large and type(message) is tuple and len(message) == HEAD_FIELDS + 1 and message[-1] is list:
            message = (*message[:-1], _pairs_of_last_field(value))
    except (ValueError, UnpackException) as error:
        # ValueError holds msgpack's FormatError, StackError and ExtraData, and invalid UTF-8.
        raise NotAllowedError(f"no msgpack value that is allowed here ({type(error).__name__})") from None
    if type(message) is not tuple:
        raise NotAllowedError("the value is no array")
    return message


def _pairs_of_last_field(value: bytes) -> _Pairs:
    """The map that is a large record's only specific field, as its pairs; maps within it are ``list``."""
    unpacker = Unpacker(use_list=False, object_pairs_hook=type, ext_hook=_refuse_extension, max_buffer_size=len(value))
    unpacker.feed(value)
    unpacker.read_array_header()
    for _ in range(HEAD_FIELDS):
        unpacker.skip()
    return [(unpacker.unpack(), unpacker.unpack()) for _ in range(unpacker.read_map_header())]


def _is_large(value: bytes) -> bool:
    return len(value) > LARGE and bool(_AROUND)


def _build(value: bytes, hook: Any) -> Any:
    # Keys that are neither strings nor binary are refused by strict_map_key.
    return unpackb(value, use_list=False, object_pairs_hook=hook, ext_hook=_refuse_extension, strict_map_key=True)


def _pairs_of_map(pairs: _Pairs) -> _Pairs:
    """A map as its pairs, so that a value hidden by a later equal key is checked too. All empty ones are one."""
    return pairs or _EMPTY_MAP


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError("extension types are not allowed")


def look_at_all(value: bytes, message: Message) -> None:
    """Raise NotAllowedError for anything but arrays, maps with string keys, ints, strings, nil and booleans.

    And where they nest too deep. value and message: what was given to ``unpack``, and what it gave.
    """
    if not _is_large(value):
        _look_by_level(message)
    elif not only_allowed(value):
        raise NotAllowedError(_NOT_ALLOWED)


def _types_in(things: Iterable[Any]) -> set[type]:
    found = set(map(type, things))
    if not found <= _ALLOWED:
        raise NotAllowedError(_NOT_ALLOWED)
    return found


def _look_by_level(message: Message) -> None:
    """Level by level, over everything at that depth at once."""
    things: Sequence[Any] = message
    for _ in range(MAX_DEPTH):
        found = _types_in(things)
        if found <= _SCALARS:
            return
        inner: list[Any] = []
        alike = len(found) == 1
        if tuple in found:
            inner += chain.from_iterable(things if alike else [thing for thing in things if type(thing) is tuple])
        if list in found:
            maps = things if alike else [thing for thing in things if type(thing) is list]
            flat = list(chain.from_iterable(chain.from_iterable(maps)))  # keys and values in turn
            if not set(map(type, flat[::2])) <= {str}:
                raise NotAllowedError("the keys of a map must be strings")
            inner += flat[1::2]
        things = inner
    raise NotAllowedError(f"nested more than {MAX_DEPTH} deep")
