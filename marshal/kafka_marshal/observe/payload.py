"""A message's bytes, made readable: as JSON, as text, or as bytes."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

Form = Literal["auto", "text", "json", "hex"]

#: Bytes of a value, and of a key or header, that are shown by default.
MOST_BYTES = 16_384
MOST_SHORT_BYTES = 400

#: Bytes in one line of hex.
_LINE = 16


@dataclass(frozen=True, slots=True)
class PayloadLines:
    """Bytes as readable lines, not escaped yet."""

    form: str
    lines: list[str]
    #: The number of bytes, and how many of them are not shown.
    size: int
    cut: int = 0


class _UnfaithfulError(ValueError):
    """This JSON would change if it were written again."""


def shown(value: bytes | None, form: Form, most: int) -> PayloadLines:
    """The value as JSON, text or bytes: the first of these that fits (auto), or the requested one."""
    if value is None:
        return PayloadLines("null", [], 0)
    if form in ("auto", "json") and len(value) <= most and (lines := _json_lines(value)) is not None:
        return PayloadLines("JSON", lines, len(value))
    part = value[:most]
    if form != "hex" and (form == "text" or _is_text(value, most)):
        return PayloadLines(
            "text", part.decode("utf-8", "backslashreplace").split("\n"), len(value), len(value) - len(part)
        )
    return PayloadLines("hex", _hex_lines(part), len(value), len(value) - len(part))


def _json_lines(value: bytes) -> list[str] | None:
    """Indented JSON, if it is an object or a list and indenting loses nothing; else None."""
    try:
        found = json.loads(value, parse_float=_faithful, parse_constant=_faithful, object_pairs_hook=_unique)
        return json.dumps(found, indent=2, ensure_ascii=False).split("\n") if isinstance(found, (dict, list)) else None
    except (ValueError, RecursionError):
        return None


def _faithful(number: str) -> float:
    found = float(number)
    if not number[-1:].isdigit() or Decimal(repr(found)) != Decimal(number):
        raise _UnfaithfulError
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _UnfaithfulError
    return found


def _is_text(value: bytes, most: int) -> bool:
    """Whether it is UTF-8 without control characters, except line ends. A character cut at the end is ignored."""
    try:
        text = value[: most + 4].decode("utf-8", "strict" if len(value) <= most + 4 else "ignore")
    except UnicodeDecodeError:
        return False
    if len(value) > most + 4 and len(text.encode()) < most:  # "ignore" has left out more than a cut character
        return False
    return all(character.isprintable() or character in "\r\n\t" for character in text)


def _hex_lines(value: bytes) -> list[str]:
    """Offset, bytes, and their ASCII characters."""
    lines = []
    for at in range(0, len(value), _LINE):
        part = value[at : at + _LINE]
        plain = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{at:08x}  {part.hex(' '):<{3 * _LINE - 1}}  {plain}")
    return lines


def short(value: bytes | None) -> str:
    """A key or a header on one line."""
    if value is None:
        return "null"
    part, rest = value[:MOST_SHORT_BYTES], len(value) - MOST_SHORT_BYTES
    text = part.decode("utf-8", "backslashreplace") if _is_text(value, MOST_SHORT_BYTES) else None
    more = f" … ({rest:,} more bytes)" if rest > 0 else ""
    return (f"0x{part.hex()}" if text is None else json.dumps(text, ensure_ascii=False)) + more


def utf8(value: bytes) -> str | None:
    """The text; None: it is not UTF-8."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return None


def bytes_json(name: str, value: bytes | None) -> dict[str, object]:
    """The bytes as text (null if they are not UTF-8), and as base64."""
    coded = None if value is None else base64.b64encode(value).decode("ascii")
    return {name: None if value is None else utf8(value), f"{name}_base64": coded}
