"""House rules on words and calls: messages, log lines, forbidden texts, waits and clocks of tests."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rationalizer.chapters import PROTOCOL
from tests.test_house_rules import (
    MODULES,
    OUR_FILES,
    PYTHON_FILES,
    ROOT,
    Function,
    named,
    nodes_of,
    text_files,
    tree_of,
)

#: The rules of docs/protocol, which users need not know. An audit's findings, and what tests say, name them.
RULE_LETTERS = "".join(sorted(set(re.findall(r"^- \*\*([A-Z])\d+\*\*", PROTOCOL, re.MULTILINE))))
RULE_NUMBER = re.compile(rf"\b[{RULE_LETTERS}]\d{{1,2}}\b")
MAY_NAME_RULES = (
    *("rationalizer", "kafka_marshal.testing"),
    *("kafka_marshal.pipeline.audit.observer", "kafka_marshal.pipeline.audit.hole_observer"),
)


def texts_of(tree: ast.Module) -> Iterator[ast.Constant]:
    """All string constants but docstrings and what is logged at DEBUG."""
    quiet: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            quiet |= set(ast.walk(node.body[0]))
        if isinstance(node, ast.Call) and any(ast.unparse(each) == "logging.DEBUG" for each in node.args):
            quiet |= set(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in quiet:
            yield node


def test_no_message_names_a_rule_by_its_number() -> None:
    assert set("CEGKLPST") <= set(RULE_LETTERS)
    found = [
        f"{named(path)}:{node.lineno}: {str(node.value)[-60:]}"
        for name, path in MODULES.items()
        if not name.startswith(MAY_NAME_RULES)
        for node in texts_of(tree_of(path))
        if RULE_NUMBER.search(str(node.value))
    ]
    assert found == []


#: A counted noun with a verb that is right for many only: "1 message come again".
COUNTED = re.compile(
    r"""count\([^{}'"]+, ['"][a-z ]+['"]\)\} (?:(?:above|with|of) \w+ )?(come|go|were|are|have|do|wait)\b"""
)


def test_verbs_agree_with_what_is_counted() -> None:
    assert COUNTED.search("{count(again, 'message')} come again")
    found = [f"{named(path)}: {hit[0]}" for path in MODULES.values() for hit in COUNTED.finditer(path.read_text())]
    assert found == [], "give count() both: 'message comes again', 'messages come again'"


def test_the_library_logs_in_one_way() -> None:
    """Through ``logs.log``, so that each line has an event."""
    found = []
    for name, path in MODULES.items():
        if name.startswith(("kafka_marshal.testing", "kafka_marshal.logs")):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                call = ast.unparse(node.func)
                if re.fullmatch(r"(logger|logging)\.(debug|info|warning|error|exception|critical|log)", call):
                    found.append(f"{named(path)}:{node.lineno}: {call}")
    assert found == []


def test_no_field_of_a_log_line_is_one_that_logging_has_itself() -> None:
    own = {*vars(logging.makeLogRecord({})), "message", "asctime"}
    names: set[str] = set()
    for name, path in MODULES.items():
        if name == "kafka_marshal.logs":
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("log", "_add", "_add_last"):
                names |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    assert {"topic", "reason"} <= names
    assert names & own == set()


#: Written so that no pattern matches itself.
FORBIDDEN = {
    "a folder of one machine": re.compile(r"(?<![\w.~])/(?:root|work)(?:/|\b(?![-\w]))"),
    "a registry's host": re.compile(
        r"repo\d?[.]maven[.]org|pypi[.]org|pythonhosted[.]org|npmjs[.](?:com|org)|proxy[.]golang[.]org", re.IGNORECASE
    ),
    "work left undone": re.compile(r"\b(?:T[O]DO|F[I]XME|X[X]X)\b"),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if FORBIDDEN[what].search(line):
                found.append(f"{named(path)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_tests_wait_for_conditions_not_for_times() -> None:
    """A sleep is in a loop that polls or paces something."""
    loops = (ast.While, ast.For, ast.AsyncFor)
    found = []

    def visit(node: ast.AST, path: Path, in_loop: bool) -> None:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep") and not in_loop:
            found.append(f"{named(path)}:{node.lineno}")
        for child in ast.iter_child_nodes(node):
            visit(child, path, in_loop or isinstance(node, loops))

    for path in PYTHON_FILES:
        if path.is_relative_to(ROOT / "tests") and not path.is_relative_to(ROOT / "tests" / "campaigns"):
            visit(tree_of(path), path, False)
    assert found == []


def run_at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node evaluated when the module is imported."""
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, Function):
            left += [*node.decorator_list, *node.args.defaults, *(each for each in node.args.kw_defaults if each)]
        elif not isinstance(node, ast.Lambda):
            yield node
            left += ast.iter_child_nodes(node)


CLOCKS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "now", "utcnow"}


def test_no_test_reads_a_clock_at_import() -> None:
    """In a long test run the import is half an hour before the test."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in OUR_FILES
        if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"
        for node in run_at_import(tree_of(path))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in CLOCKS
    ]
    assert not found, found
