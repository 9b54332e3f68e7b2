"""One planted bug: a line of the product, and its replacement."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).parents[2]
PRODUCT = ("rationalizer", "marshal/kafka_marshal")
CORE = ("rationalizer/", "marshal/kafka_marshal/engine/")

#: CPython 3.11 may fail with a SystemError if several threads parse at a time.
_PARSING = Lock()


class StaleMutationError(AssertionError):
    """The line of a mutation does not exist exactly once: the product has changed, and the list must, too."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A line that is replaced by another one, which breaks a rule of docs/protocol.

    Anchored by function: its file and class are looked up, so that it may move.
    """

    name: str
    #: The function (or class) of the line, ``poll`` or ``Consumer.poll``; for a constant, its name.
    at: str
    #: The whole line without indentation, and its replacement.
    old: str
    new: str
    #: Of docs/protocol.
    rule: str

    @property
    def file(self) -> str:
        """The path from the top of the repository."""
        return self._place()[0]

    @property
    def is_in_core(self) -> bool:
        """Whether it is in the rules or the engine."""
        return self.file.startswith(CORE)

    def _place(self) -> tuple[str, int]:
        return _found(self, [(file, text) for file, text in _product().items()])


@cache
def _product() -> dict[str, str]:
    paths = [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@cache
def _spans(text: str) -> tuple[tuple[str, int, int], ...]:
    """Qualified name, first and last line of each function, class and constant, counted from 0."""

    def visit(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                begin = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                yield f"{prefix}.{child.name}", begin - 1, child.end_lineno or begin
                name = f"{prefix}.{child.name}"
            elif isinstance(child, (ast.Assign, ast.AnnAssign)) and isinstance(node, ast.Module):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                yield f".{ast.unparse(targets[0])}", child.lineno - 1, child.end_lineno or child.lineno
            yield from visit(child, name)

    with _PARSING:
        return tuple(visit(ast.parse(text), ""))


def _found(mutation: Mutation, texts: list[tuple[str, str]]) -> tuple[str, int]:
    """The file, and the line there, counted from 0."""
    found: set[tuple[str, int]] = set()
    for file, text in texts:
        if mutation.old not in text:
            continue
        lines = [line.strip() for line in text.splitlines()]
        for name, begin, end in _spans(text):
            if name.endswith(f".{mutation.at}"):
                found |= {(file, place) for place in range(begin, end) if lines[place] == mutation.old}
    if len(found) != 1:
        raise StaleMutationError(f"{mutation.name}: {len(found)} lines {mutation.old!r} at {mutation.at!r}, not one")
    return found.pop()


def mutated(mutation: Mutation, text: str | None = None) -> str:
    """The mutated text of the product's file, or of the given text. Raises StaleMutationError."""
    file, place = mutation._place() if text is None else _found(mutation, [("", text)])
    lines = (_product()[file] if text is None else text).splitlines(keepends=True)
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    lines[place] = f"{indent}{mutation.new}\n"
    return "".join(lines)


def apply(mutation: Mutation, tree: Path) -> None:
    """Plant it in a copy of the repository."""
    (tree / mutation.file).write_text(mutated(mutation), encoding="utf-8")
