"""From bytes to one msgpack array, and whether it is made of what E2 allows anywhere in a value.

Values come from anybody who may write to the topic, so nothing in them decides how much work or memory is spent
beyond their own length:

* Containers are measured before they are allocated, in values large enough to hurt.
* What a value holds is looked at by C, over many things at once: no recursion, no step of Python for each thing.
* A large value may be a million tiny containers. Its maps, which no type has, are not kept apart, and how deep they
  nest is told by msgpack's own stack.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from operator import iadd
from typing import Any, Final

from msgpack import Unpacker, unpackb
from msgpack.exceptions import StackError, UnpackException

from rationalizer.limits import MAX_DEPTH

__all__ = ["Message", "NotAllowedError", "Pairs", "look_at_all", "unpack"]

#: A value as read: (version, type, instance_id, client_id, group_id, *own fields). Arrays are tuples; maps,
#: which no type of level 1 has, are lists, and what is in them is of no use.
Message = tuple[Any, ...]

#: Keys and values of maps.
Pairs = list[tuple[Any, Any]]

#: Below this a value can't claim enough to hurt; above it the claims are checked before anything is built.
SMALL: Final = 1024
#: Above this a value is looked at in the way for large ones; below it that costs more than it saves.
LARGE: Final = 4096

_SCALARS: Final = frozenset({int, str, bool, type(None)})
_ALLOWED: Final = _SCALARS | {tuple, list}

#: How every float, binary and extension begins. Other things may have such a byte in them, too.
_FORBIDDEN: Final = bytes([*range(0xC4, 0xCC), *range(0xD4, 0xD9)])

_EMPTY_MAP: Final[Pairs] = []

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


#: Arrays around a value, of which MAX_DEPTH may nest and not one more; empty: nobody can tell like that.
_AROUND: Final = b"\x91" * max(0, _deepest() - MAX_DEPTH)


def unpack(value: bytes) -> tuple[Message, Pairs | None]:
    """The array that these bytes are, and the keys and values of all its maps (None: the maps hold them).

    Raises NotAllowedError where they are none, and may do so where they hold what E2 forbids: see ``look_at_all``.
    """
    pairs: Pairs | None = [] if _AROUND and len(value) > LARGE else None
    try:
        if len(value) > SMALL:
            _skip(value if pairs is None else _AROUND + value)
        message = _build(value, _pairs_of_map if pairs is None else partial(iadd, pairs))
    except (ValueError, UnpackException) as error:
        # ValueError holds msgpack's FormatError, StackError and ExtraData, and invalid UTF-8.
        _forget(pairs)
        raise NotAllowedError(f"no msgpack value that is allowed here ({type(error).__name__})") from None
    if type(message) is not tuple:
        _forget(pairs)
        raise NotAllowedError("the value is no array")
    return message, pairs


def _forget(pairs: Pairs | None) -> None:
    """Maps within maps stand there as the very list that holds the pairs of all: that is a cycle, undone here."""
    if pairs is not None:
        pairs.clear()


def _build(value: bytes, hook: Any) -> Any:
    # Keys that are neither strings nor binary are refused by strict_map_key.
    return unpackb(value, use_list=False, object_pairs_hook=hook, ext_hook=_refuse_extension, strict_map_key=True)


def _pairs_of_map(pairs: Pairs) -> Pairs:
    """A map as its pairs, so that a value hidden by a later equal key is looked at too. All empty ones are one."""
    return pairs or _EMPTY_MAP


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError("extension types are not allowed")


def look_at_all(value: bytes, message: Message, pairs: Pairs | None) -> None:
    """Raise NotAllowedError for anything but arrays, maps with string keys, ints, strings, nil and booleans.

    And where they nest too deep. value, message and pairs: what was given to ``unpack``, and what it gave; it forgets
    the pairs.
    """
    if pairs is None:
        _look_by_level(message)
        return
    try:
        if len(value.translate(None, _FORBIDDEN)) < len(value):
            _look_at(message)
            if tuple in _types_in(chain.from_iterable(pairs)):
                _look_at([thing for _, thing in pairs if type(thing) is tuple])
    finally:
        _forget(pairs)


def _look_at(things: Sequence[Any]) -> None:
    """What these things are, and what is in the arrays among them; how deep they nest is known to be allowed."""
    while tuple in (found := _types_in(things)):
        arrays = things if len(found) == 1 else [thing for thing in things if type(thing) is tuple]
        things = list(chain.from_iterable(arrays))


def _types_in(things: Iterable[Any]) -> set[type]:
    found = set(map(type, things))
    if not found <= _ALLOWED:
        raise NotAllowedError("floats, binary and extension types are not allowed, and keys of maps must be strings")
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
