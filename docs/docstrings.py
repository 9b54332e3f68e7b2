"""Docstrings for the site: names in Sphinx' roles (``:class:`Marshal```) and doctests become code in Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":[a-z]+:`[~.]?([^`]+)`")
DOCTEST = re.compile(r"(?:^(?:>>>|\.\.\.)(?: .*)?\n?)+", re.MULTILINE)


def in_markdown(text: str) -> str:
    """The docstring as the site shows it."""
    return DOCTEST.sub(_fence, ROLE.sub(r"`\1`", text))


def _fence(found: re.Match[str]) -> str:
    lines = [line[4:].replace("  # doctest: +SKIP", "") for line in found[0].splitlines()]
    return "\n".join(("```python", *lines, "```", ""))


class Docstrings(Extension):
    """For mkdocstrings."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)
