"""The core stays pure: no I/O, clock, randomness, threads, logging or environment, and no order that hashes decide."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "rationalizer"
MODULES = sorted(CORE.rglob("*.py"))
FORBIDDEN = {"asyncio", "datetime", "io", "logging", "os", "pathlib", "random", "secrets", "socket", "threading"}
FORBIDDEN |= {"subprocess", "time", "uuid"}


def _imports(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_only_the_standard_library_msgpack_and_xxhash_are_imported(module: Path) -> None:
    imports = _imports(ast.parse(module.read_text(encoding="utf-8")))
    assert imports <= set(sys.stdlib_module_names) | {"msgpack", "xxhash", "rationalizer"}
    assert not imports & FORBIDDEN


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_nothing_opens_prints_or_hashes(module: Path) -> None:
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "hash", "id", "input", "eval", "exec"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_modules_are_short(module: Path) -> None:
    lines = module.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 800
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 80, f"{node.name} is too long"
