"""One planted bug: a line of the product, and what stands there instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutation", "StaleMutationError", "apply", "mutated"]

_NEXT = re.compile(r"\s*(async )?(def|class) ")


class StaleMutationError(AssertionError):
    """The line that a mutation replaces is not there, or not once: the product has changed, and the list must."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A line that is replaced by another one, which breaks a rule of PROTOCOL.md."""

    name: str
    #: From the top of the repository.
    file: str
    #: The whole line, without its indentation, and what stands there instead.
    old: str
    new: str
    #: Of PROTOCOL.md.
    rule: str
    #: Where the line stands several times: how the line of the function (or class) begins in which it is meant.
    within: str = ""

    @property
    def is_in_core(self) -> bool:
        """In the rules or the engine."""
        return self.file.startswith(("rationalizer/", "marshal/kafka_marshal/engine/"))


def mutated(mutation: Mutation, text: str) -> str:
    """A file's text with the mutation in it. Raises StaleMutationError unless its line is there exactly once."""
    lines = text.splitlines(keepends=True)
    begin, end = 0, len(lines)
    if mutation.within:
        starts = [place for place, line in enumerate(lines) if line.strip().startswith(mutation.within)]
        if len(starts) != 1:
            raise StaleMutationError(
                f"{mutation.name}: {mutation.file} has {len(starts)} lines {mutation.within!r}, not one"
            )
        begin = starts[0]
        end = next((place for place in range(begin + 1, end) if _NEXT.match(lines[place])), end)
    found = [place for place in range(begin, end) if lines[place].strip() == mutation.old]
    if len(found) != 1:
        where = f" within {mutation.within!r}" if mutation.within else ""
        raise StaleMutationError(
            f"{mutation.name}: {mutation.file}{where} has {len(found)} lines {mutation.old!r}, not one"
        )
    place = found[0]
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    lines[place] = f"{indent}{mutation.new}\n"
    return "".join(lines)


def apply(mutation: Mutation, tree: Path) -> None:
    """Plant it in a copy of the repository."""
    path = tree / mutation.file
    path.write_text(mutated(mutation, path.read_text(encoding="utf-8")), encoding="utf-8")
