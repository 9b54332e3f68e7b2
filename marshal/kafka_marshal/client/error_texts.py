"""The texts about an exception that a handler raised: its class, its message, its place and its traceback.

They work for every exception, even if its own methods raise. Secrets that a text names are hidden (:mod:`.secret`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Final

from kafka_marshal.secret import hide, scrub

#: The text of an exception is cut to this many characters: it might be a whole page of HTML.
MOST_REASON: Final = 1_000

#: This many characters are searched for secrets: a secret that is cut in two lies beyond MOST_REASON.
_SEARCHED: Final = 2 * MOST_REASON

#: A traceback has the last FRAMES frames of each exception, and at most MOST_TRACE bytes.
FRAMES: Final = 8
MOST_TRACE: Final = 4_096

#: An exception, its cause, and the cause of that.
_CHAIN: Final = 3

#: Our own frames, which call handlers, do not help: they are left out.
_OURS: Final = str(Path(__file__).parent)

_DIRECT = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
_FIRST = "\n\nThe above exception is the first of this group:\n\n"


def class_name(error: BaseException) -> str:
    """The class, with its module unless it is built in."""
    kind = type(error)
    module = str(kind.__module__)
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def reason_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """The text of an exception; its class if it has none, or can't return it. secrets: hidden, too."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the __str__ of a user's class may raise
        text = ""
    text = hide(scrub(text[:_SEARCHED].strip()), secrets) or type(error).__name__
    return text if len(text) <= MOST_REASON else f"{text[: MOST_REASON - 1]}…"


def place_of(error: BaseException) -> tuple[str, int]:
    """File and line that raised it, or, if it was never raised, its cause; ("", 0): not known."""
    at = error.__traceback__
    if at is None and error.__cause__ is not None:
        at = error.__cause__.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return ("", 0) if at is None else (at.tb_frame.f_code.co_filename, at.tb_lineno)


def trace_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Its traceback, as Python prints it: the last frames of it and of its causes, cut to MOST_TRACE bytes."""
    text, secrets = "", tuple(secrets)
    each: BaseException | None = error
    for _ in range(_CHAIN):
        if each is None:
            break
        frames = "".join(traceback.format_list(_frames(each.__traceback__)))
        text = f"{hide(scrub(frames), secrets)}{class_name(each)}: {reason_of(each, secrets)}{text}"
        each, link = _before(each)
        text = text if each is None else f"{link}{text}"
    cut = text.lstrip("\n").encode("utf-8", "backslashreplace")
    return cut.decode() if len(cut) <= MOST_TRACE else f"…{cut[3 - MOST_TRACE :].decode('utf-8', 'ignore')}"


def _frames(tb: TracebackType | None) -> traceback.StackSummary:
    found = traceback.extract_tb(tb, limit=-FRAMES)
    while found and found[0].filename.startswith(_OURS):
        del found[0]
    return found


def _before(error: BaseException) -> tuple[BaseException | None, str]:
    """The exception that caused this one (None: none), and the text that links them."""
    if error.__cause__ is not None:
        return error.__cause__, _DIRECT
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0], _FIRST
    return (None, "") if error.__suppress_context__ else (error.__context__, _MEANWHILE)
