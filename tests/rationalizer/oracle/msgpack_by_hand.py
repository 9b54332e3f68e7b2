"""The part of msgpack that E1 and E2 allow, read and written byte by byte.

`parse` takes one whole value and gives nil as None, booleans, ints, strings, arrays as lists and maps as
dicts; anything that E2's first three sentences forbid is a `NotMsgpackError`. `shortest` writes the canonical
form of S1. `spellings_*` list every form that msgpack has for the same value (E2: all of them count).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

Tree: TypeAlias = "bool | int | str | list[Tree] | dict[str, Tree] | None"

LONGEST_VALUE = 1_048_576
DEEPEST = 8


class NotMsgpackError(ValueError):
    """The bytes are not one msgpack array of the kinds that E2 allows."""


class _Cursor:
    """Bytes and a position; running out of bytes is an error, never a short answer."""

    def __init__(self, value: bytes) -> None:
        self.value = value
        self.at = 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.value):
            raise NotMsgpackError(f"{count} bytes wanted at {self.at}, {len(self.value) - self.at} left")
        piece = self.value[self.at : self.at + count]
        self.at += count
        return piece

    def unsigned(self, count: int) -> int:
        number = 0
        for byte in self.take(count):
            number = number * 256 + byte
        return number

    def signed(self, count: int) -> int:
        number = self.unsigned(count)
        return number - 256**count if number >= 256**count // 2 else number


def parse(value: bytes, longest: int = LONGEST_VALUE) -> list[Tree]:
    """The array that `value`, of `longest` bytes at most, spells.

    Raises NotMsgpackError where E2's first three sentences are broken anywhere inside it.
    """
    if len(value) > longest:
        raise NotMsgpackError(f"{len(value)} bytes")
    cursor = _Cursor(value)
    tree = _read(cursor, 1)
    if cursor.at != len(value):
        raise NotMsgpackError(f"{len(value) - cursor.at} bytes after the end")
    if not isinstance(tree, list):
        raise NotMsgpackError("not an array")
    return tree


def _read(cursor: _Cursor, depth: int) -> Tree:
    lead = cursor.unsigned(1)
    if lead <= 0x7F:
        return lead
    if lead <= 0x8F:
        return _map(cursor, lead - 0x80, depth)
    if lead <= 0x9F:
        return _array(cursor, lead - 0x90, depth)
    if lead <= 0xBF:
        return _text(cursor, lead - 0xA0)
    if lead >= 0xE0:
        return lead - 256
    return _read_long(cursor, lead, depth)


def _read_long(cursor: _Cursor, lead: int, depth: int) -> Tree:
    if lead == 0xC0:
        return None
    if lead == 0xC2:
        return False
    if lead == 0xC3:
        return True
    if lead in (0xCC, 0xCD, 0xCE, 0xCF):
        return cursor.unsigned({0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}[lead])
    if lead in (0xD0, 0xD1, 0xD2, 0xD3):
        return cursor.signed({0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}[lead])
    if lead in (0xD9, 0xDA, 0xDB):
        return _text(cursor, cursor.unsigned({0xD9: 1, 0xDA: 2, 0xDB: 4}[lead]))
    if lead in (0xDC, 0xDD):
        return _array(cursor, cursor.unsigned({0xDC: 2, 0xDD: 4}[lead]), depth)
    if lead in (0xDE, 0xDF):
        return _map(cursor, cursor.unsigned({0xDE: 2, 0xDF: 4}[lead]), depth)
    # What is left: 0xC1 (never used), bin, ext, fixext and floats.
    raise NotMsgpackError(f"byte {lead:#04x} is of no allowed kind")


def _text(cursor: _Cursor, length: int) -> str:
    piece = cursor.take(length)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotMsgpackError(f"invalid UTF-8: {error}") from error


def _array(cursor: _Cursor, length: int, depth: int) -> list[Tree]:
    if depth > DEEPEST:
        raise NotMsgpackError("nested too deep")
    items: list[Tree] = []
    for _ in range(length):
        items.append(_read(cursor, depth + 1))
    return items


def _map(cursor: _Cursor, length: int, depth: int) -> dict[str, Tree]:
    if depth > DEEPEST:
        raise NotMsgpackError("nested too deep")
    items: dict[str, Tree] = {}
    for _ in range(length):
        key = _read(cursor, depth + 1)
        if not isinstance(key, str):
            raise NotMsgpackError("a map key that is no string")
        items[key] = _read(cursor, depth + 1)
    return items


def _big_endian(number: int, count: int) -> bytes:
    return bytes(number // 256**place % 256 for place in range(count - 1, -1, -1))


def spellings_of_int(number: int) -> list[bytes]:
    """Every msgpack form of `number` (-2^63 … 2^64-1), the shortest first."""
    found = []
    if -32 <= number <= 127:
        found.append(bytes([number % 256]))
    for lead, count in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        if 0 <= number < 256**count:
            found.append(bytes([lead]) + _big_endian(number, count))
    for lead, count in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        if -(256**count) // 2 <= number < 256**count // 2:
            found.append(bytes([lead]) + _big_endian(number % 256**count, count))
    return sorted(found, key=len)  # stable: of equal lengths the unsigned form stays in front


def _headers(length: int, fix: int, fix_limit: int, long: tuple[tuple[int, int], ...]) -> list[bytes]:
    found = [bytes([fix + length])] if length < fix_limit else []
    for lead, count in long:
        if length < 256**count:
            found.append(bytes([lead]) + _big_endian(length, count))
    return found


def spellings_of_text_header(length: int) -> list[bytes]:
    """Every header of a string of `length` bytes, the shortest first."""
    return _headers(length, 0xA0, 32, ((0xD9, 1), (0xDA, 2), (0xDB, 4)))


def spellings_of_array_header(length: int) -> list[bytes]:
    """Every header of an array of `length` items, the shortest first."""
    return _headers(length, 0x90, 16, ((0xDC, 2), (0xDD, 4)))


def spellings_of_map_header(length: int) -> list[bytes]:
    """Every header of a map of `length` pairs, the shortest first."""
    return _headers(length, 0x80, 16, ((0xDE, 2), (0xDF, 4)))


@lru_cache(maxsize=4096)
def _shortest_int(number: int) -> bytes:
    return spellings_of_int(number)[0]


@lru_cache(maxsize=4096)
def _shortest_text_header(length: int) -> bytes:
    return spellings_of_text_header(length)[0]


def shortest(tree: object) -> bytes:
    """The msgpack of `tree` in its shortest forms (S1, and what a tidy writer appends)."""
    if tree is None:
        return b"\xc0"
    if tree is False:
        return b"\xc2"
    if tree is True:
        return b"\xc3"
    if isinstance(tree, int):
        return _shortest_int(int(tree))
    if isinstance(tree, str):
        text = tree.encode("utf-8")
        return _shortest_text_header(len(text)) + text
    if isinstance(tree, (list, tuple)):
        return spellings_of_array_header(len(tree))[0] + b"".join(shortest(item) for item in tree)
    if isinstance(tree, dict):
        pairs = b"".join(shortest(key) + shortest(item) for key, item in tree.items())
        return spellings_of_map_header(len(tree))[0] + pairs
    raise TypeError(f"{type(tree).__name__} is not of E2's kinds")
