"""Writing values in ways that a tidy writer never would: odd forms, forbidden kinds, bombs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tests.rationalizer.oracle.msgpack_by_hand import (
    shortest,
    spellings_of_array_header,
    spellings_of_int,
    spellings_of_map_header,
    spellings_of_text_header,
)

T = TypeVar("T")


class Choose(Protocol):
    """Picks one of the options, which are never empty."""

    def __call__(self, options: Sequence[T], /) -> T: ...


@dataclass(frozen=True)
class Raw:
    """Bytes that stand in a tree as they are: what `parse` would refuse, or never gives."""

    value: bytes

    def __repr__(self) -> str:
        return f"Raw({self.value[:40].hex(' ')}{'…' if len(self.value) > 40 else ''})"


@dataclass(frozen=True)
class Pairs:
    """A map as a list of pairs, so that keys may come twice or be no strings."""

    pairs: tuple[tuple[Any, Any], ...]


def shortest_of(options: Sequence[T], /) -> T:
    """The choice that makes `spell` write canonical forms."""
    return options[0]


def spell(tree: object, choose: Choose = shortest_of) -> bytes:
    """`tree` as msgpack, each header in a form that `choose` picks among all there are."""
    if isinstance(tree, Raw):
        return tree.value
    if isinstance(tree, Pairs):
        body = b"".join(spell(key, choose) + spell(item, choose) for key, item in tree.pairs)
        return choose(spellings_of_map_header(len(tree.pairs))) + body
    if isinstance(tree, (list, tuple)):
        return choose(spellings_of_array_header(len(tree))) + b"".join(spell(item, choose) for item in tree)
    if isinstance(tree, dict):
        return spell(Pairs(tuple(tree.items())), choose)
    if isinstance(tree, str):
        text = tree.encode("utf-8")
        return choose(spellings_of_text_header(len(text))) + text
    if isinstance(tree, int) and not isinstance(tree, bool):
        return choose(spellings_of_int(tree))
    return shortest(tree)


def nested(depth: int, inside: object = None, as_map: bool = False) -> object:
    """`depth` arrays (or maps) one inside the other, with nothing or `inside` in the innermost."""
    tree: object = [] if inside is None else [inside]
    if as_map:
        tree = {} if inside is None else {"k": inside}
    for _ in range(depth - 1):
        tree = {"k": tree} if as_map else [tree]
    return tree


EDGE_INTS = (
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    99,
    100,
    600_000,
    600_001,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
EDGE_TEXTS = (
    "",
    "x",
    "x" * 249,
    "x" * 250,
    "x" * 255,
    "x" * 256,
    "é" * 124,
    "é" * 125,
    "é" * 127,
    "é" * 128,
    "\U0001f600" * 62 + "x",
    "\U0001f600" * 62 + "xx",
    "\U0001f600" * 63 + "xxx",
    "\U0001f600" * 64,
    "\x00",
    "a\x1fb",
    " ",
    "~",
    "\x7f",
    "\x80",
    "\x9f",
    "é\x00",
    "\x1fé",
    "é\x7f",
    "é\x80",
    "é\xa0",
    "\xa0",
    "a/b",
    "\u2028",
    "\ufeff",
    "\uffff",
    "e\u0301",
)
# What E2 forbids wherever it stands.
FORBIDDEN = (
    Raw(b"\xc1"),
    Raw(b"\xca\x3f\x80\x00\x00"),  # 1.0 as float 32
    Raw(b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00"),  # 1.0 as float 64
    Raw(b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),  # NaN
    Raw(b"\xc4\x00"),
    Raw(b"\xc4\x01g"),
    Raw(b"\xc5\x00\x01g"),
    Raw(b"\xc6\x00\x00\x00\x01g"),
    Raw(b"\xc7\x00\x05"),
    Raw(b"\xc8\x00\x01\x05x"),
    Raw(b"\xc9\x00\x00\x00\x01\x05x"),
    Raw(b"\xd4\x01x"),
    Raw(b"\xd5\x01xx"),
    Raw(b"\xd6\xff\x00\x00\x00\x00"),  # a timestamp
    Raw(b"\xd7\xff\x00\x00\x00\x00\x00\x00\x00\x00"),
    Raw(b"\xd8\x01" + b"x" * 16),
    Raw(b"\xc7\x0c\xff" + b"\x00" * 12),
    Raw(b"\xd7\xff" + b"\xff" * 8),  # a timestamp with too many nanoseconds
    Raw(b"\xc7\x0c\xff" + b"\xff" * 12),
    Raw(b"\xc7\x05\xff" + b"\x00" * 5),  # a timestamp of no known length
    Raw(b"\xa1\xff"),
    Raw(b"\xa2\xc0\xaf"),  # overlong "/"
    Raw(b"\xa3\xed\xa0\x80"),  # a surrogate
    Raw(b"\xa4\xf4\x90\x80\x80"),  # above U+10FFFF
    Raw(b"\xa2\xe2\x82"),  # cut short
    Raw(b"\xdd\xff\xff\xff\xff"),
    Raw(b"\xdf\xff\xff\xff\xff"),
    Raw(b"\xdb\xff\xff\xff\xff"),
    Raw(b"\xc6\xff\xff\xff\xff"),
    Raw(b"\xdc\xff\xff" + b"\xc0" * 10),
    Raw(b"\x91" * 900 + b"\xc0"),
    Raw(b"\x81\xa1k" * 300 + b"\xc0"),
    Raw(b"\x91" * 2000 + b"\xc0"),
    Raw(b"\x81\xa1k" * 2000 + b"\xc0"),
    Pairs(((1, 1),)),
    Pairs(((None, 1),)),
    Pairs(((True, 1),)),
    Pairs((([], 1),)),
    Pairs((({}, 1),)),
    Pairs(((Raw(b"\xc4\x01k"), 1),)),
    Pairs(((Raw(b"\xa1\xff"), 1),)),
    Pairs((("k", Raw(b"\xc4\x00")),)),
    Pairs((("k", Raw(b"\xca\x3f\x80\x00\x00")), ("k", 1))),  # hidden by a later equal key
    Pairs((("k", Raw(b"\xc4\x00")), ("l", 0), ("k", 1))),
    Pairs((("k", nested(8)), ("k", 1))),
    Pairs((("k", Pairs(((1, 1),))), ("k", 1))),
)
# Allowed as msgpack, though rarely where a field is looked for.
ODD = (
    None,
    True,
    False,
    [],
    [None],
    {},
    {"k": {"k": [1, -1]}},
    Pairs((("k", 1), ("k", 2))),
    Pairs((("", 1), ("\x00", 2), ("k", None))),
    *(nested(depth) for depth in (4, 5, 6, 7, 8)),
    *(nested(depth, as_map=True) for depth in (4, 5, 6, 7, 8)),
    *(nested(depth, inside=1) for depth in (5, 6, 7, 8)),
    [["t", 0, 0, None]],
    [[0, 0]],
    [[1, 0]],
    [[0, 0], [0, 0, 0]],
    [[0, 0], [0]],
    [[0, 2**63 - 1]],
    [[0, 2**63]],
    [[-1, 0]],
    [[False, True]],
)
EVERYTHING_ODD: tuple[Any, ...] = (*EDGE_INTS, *EDGE_TEXTS, *FORBIDDEN, *ODD)


def paths(tree: object) -> Iterator[tuple[int, ...]]:
    """The way to every node of a tree of arrays; the tree itself is the empty path."""
    yield ()
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from ((index, *rest) for rest in paths(item))


def replaced(tree: Any, path: tuple[int, ...], item: Any) -> Any:
    """A copy of `tree` with `item` at `path`."""
    if not path:
        return item
    copy = list(tree)
    copy[path[0]] = replaced(copy[path[0]], path[1:], item)
    return copy
