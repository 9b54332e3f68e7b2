"""msgpack, one thing after another: does anything begin in a way that E2 allows nowhere?

Checking what was built takes a step for each thing, several times what building it took. A regular expression goes
over the bytes instead, and nothing is allocated. It steps over a container's header only, so what is within follows.
"""

from __future__ import annotations

import re
from typing import Final

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
