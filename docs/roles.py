"""Docstrings name classes by Sphinx' roles (``:class:`Marshal```); the site shows the name alone."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":[a-z]+:`[~.]?([^`]+)`")


class Roles(Extension):
    """For mkdocstrings: plain code in place of a role."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
