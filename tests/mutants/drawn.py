"""Random bugs: lines of rules and engine, drawn by chance, each changed in one place.

A comparison is replaced, a condition is negated or loses a part, a sum loses a part or its sign, ``min`` becomes
``max``, a statement is removed. Some results are no bugs: those that passed must be judged by a person.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random

from tests.mutants.mutation import Mutation, StaleMutationError, mutated

#: Folders of the lines.
FOLDERS = ("rationalizer", "marshal/kafka_marshal/engine")
#: It writes tables of docs/protocol and contains no rule.
LEFT_OUT = "docs.py"

_SIGNS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}


def draw(root: Path, count: int, seed: int) -> list[Mutation]:
    """Draw ``count`` mutations, always the same ones for a seed and a commit."""
    found = list(_all(root))
    Random(seed).shuffle(found)
    return list(islice((mutation for mutation in found if _is_program(mutation)), count))


@cache
def _all(root: Path) -> tuple[Mutation, ...]:
    files = [path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py")) if path.name != LEFT_OUT]
    return tuple(mutation for path in files for mutation in _of_file(root, path))


def _of_file(root: Path, path: Path) -> Iterator[Mutation]:
    text = path.read_text(encoding="utf-8")
    lines, file = text.splitlines(), str(path.relative_to(root))
    for function in [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]:
        if function.name == "__init__":
            continue  # a removal there is noticed at once
        for node in ast.walk(function):
            if isinstance(node, (ast.expr, ast.stmt)) and node.lineno == node.end_lineno:
                yield from (_planted(file, lines, node, new, function.name) for new in _changes(node, lines))


def _planted(file: str, lines: list[str], node: ast.expr | ast.stmt, new: str, at: str) -> Mutation:
    line = lines[node.lineno - 1]
    raw = line.encode()  # columns are bytes
    changed = (raw[: node.col_offset] + new.encode() + raw[node.end_col_offset :]).decode()
    return Mutation(f"{file.rpartition('/')[2]} {node.lineno}", at, line.strip(), changed.strip(), "?")


def _is_program(mutation: Mutation) -> bool:
    try:
        ast.parse(mutated(mutation))
    except (SyntaxError, StaleMutationError):
        return False
    return mutation.old != mutation.new


def _changes(node: ast.AST, lines: list[str]) -> Iterator[str]:
    """Replacements of an expression or a statement on one line."""

    def said(part: ast.expr) -> str:
        return lines[part.lineno - 1].encode()[part.col_offset : part.end_col_offset].decode()

    match node:
        case ast.Compare(left=left, ops=[sign], comparators=[right]):
            yield from (f"{said(left)} {other} {said(right)}" for other in _SIGNS[type(sign)])
        case ast.BoolOp(op=op, values=values):
            word = " and " if isinstance(op, ast.And) else " or "
            for place in range(len(values)):
                yield word.join(said(value) for value in [*values[:place], *values[place + 1 :]])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield said(operand)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            yield said(left)
            yield f"{said(left)} {'-' if isinstance(op, ast.Add) else '+'} {said(right)}"
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            yield ("max" if name == "min" else "min") + said(node).removeprefix(name)
        case ast.Return(value=ast.Constant(value=bool() as answer)):
            yield f"return {not answer}"
        case ast.Return(value=None) | ast.Continue() | ast.Break() | ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "pass"
        case _:
            return
