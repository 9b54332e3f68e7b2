"""Text from elsewhere, made safe for terminals, logs and pages: any client that may append can write ids to the log.

An id may hold an escape sequence that renames the terminal's window, a bidi override that shows another name than it
is, a line separator that begins a new line in a log.
"""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with everything that is not plainly visible escaped: controls, bidi and zero-width marks, odd spaces.

    ``str.isprintable`` is false for just those: categories C* and Z*, except the space.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
