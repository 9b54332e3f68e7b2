"""Nothing outside the engine changes an engine but ``Engine.take``: no other call, no assignment."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.inputs import GIVEN
from tests.test_house_rules import MODULES, tree_of

#: What an engine, or a part of it, is called elsewhere.
NAMES = {"engine", "_engine", "_delivery", "_manual", "_member"}
KINDS = {
    *("Engine", "ConsumerEngine", "Run", "Assignment", "Delivery", "RangeDelivery", "ManualLease", "GroupClient"),
    *("Tracker", "RangeRun", "Grant", "Lanes"),
}
#: The way in, the way out, and what only looks.
CALLS = {
    *("take", "take_effects", "get", "items", "keys", "values", "pop", "wait", "offset", "find", "read", "room"),
    *(
        "opens_at",
        "lease",
        "progress",
        "whole_progress",
        "metadata",
        "state",
        "known_stable",
        "is_asked",
        "is_held",
        "has_marks",
        "may_hand_over",
        "uncommitted",
        "oldest_cut",
        "is_held_up",
        "patience_ms",
        "held_back",
        "copy",
        "text",
        "at",
        "dropped",
        "open_from",
        "topic_id",
        "log_time",
    ),
}
#: What user threads change without the lock, which the engine reads (``engine/inputs.py``): they note in a run what
#: they have delivered, lanes have a separate lock, and what records an engine ends by itself.
SHARED = {
    *("run.refused", "run.since", "run.holder", "lanes.handlers", "owner.is_ending", "engine.recorder"),
    *("lanes.open", "lanes.close", "lanes.reopened"),
    # Open messages of a partition: this only looks.
    *("engine.source.view.open", "self._engine.source.view.open"),
}


def of_engine(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression leads through an engine."""
    while True:
        match node:
            case ast.Name(id=name):
                return name in names
            case ast.Attribute(attr=name) if name in NAMES:
                return True
            case ast.Call(func=ast.Name(id="list" | "sorted" | "tuple"), args=[first, *_]):
                node = first
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case _:
                return False


def named_in(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def names_of_engines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The local names that a part of an engine has."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    names = {"engine"} | {x.arg for x in arguments if x.annotation is not None and named_in(x.annotation) & KINDS}
    for _ in range(3):
        for node in ast.walk(function):
            match node:
                case ast.Assign(value=value, targets=targets) if of_engine(value, names):
                    found: list[ast.expr] = targets
                case (
                    ast.AnnAssign(value=ast.expr() as value, target=target) | ast.NamedExpr(value=value, target=target)
                ):
                    found = [target] if of_engine(value, names) else []
                case ast.For(iter=value, target=target) | ast.comprehension(iter=value, target=target):
                    found = [target] if of_engine(value, names) else []
                case _:
                    continue
            plain = [x for each in found for x in (each.elts if isinstance(each, ast.Tuple) else [each])]
            names |= {each.id for each in plain if isinstance(each, ast.Name)}
    return names


def changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where a module may change an engine by another way: line and what is called or set."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names = names_of_engines(function)
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(value=value, attr=name) as target) if of_engine(value, names):
                    if name not in CALLS and not {ast.unparse(target), ast.unparse(value)} & SHARED:
                        yield node.lineno, ast.unparse(target)
                case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()) if of_engine(value, names):
                    if ast.unparse(node) not in SHARED:
                        yield node.lineno, ast.unparse(node)
                case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()) if of_engine(value, names):
                    yield node.lineno, ast.unparse(node)


def test_nothing_else_changes_an_engine() -> None:
    found: list[str] = []
    looked_at = 0
    for name, path in MODULES.items():
        is_inside = name.startswith(("kafka_marshal.engine", "kafka_marshal.testing"))
        if is_inside or "kafka_marshal.engine" not in path.read_text(encoding="utf-8"):
            continue
        looked_at += 1
        found += [f"{name}:{line}: {what}" for line, what in sorted(set(changes(tree_of(path))))]
    assert found == []
    assert looked_at > 30


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("self._engine.delivery.done([message], now)", ["self._engine.delivery.done"]),
        ("self._engine.closing = True", ["self._engine.closing"]),
        ("x = self._engine.assignments[key]; x.buffer.give_up(3)", ["x.buffer.give_up"]),
        ("for x in list(engine.consumers.values()): x.errors.append(error)", ["x.errors.append"]),
        ("if (x := engine.groups.get(key)) is not None: x.pieces[key] = 1", ["x.pieces[key]"]),
        ("run.assignment.lease.stop()", ["run.assignment.lease.stop"]),
        ("del driver.engine.consumers[1]", ["driver.engine.consumers[1]"]),
        ("engine.take(None, engine.step, now); run.since = now; return engine.consumers.get(number)", []),
    ],
)
def test_each_other_way_is_found(body: str, found: list[str]) -> None:
    tree = ast.parse(f"def function(self, engine, run: Run, key, now):\n    {body}")
    assert [what for _, what in changes(tree)] == found


def test_what_is_passed_to_the_engine_is_marked() -> None:
    """A recording ends at a function that is not: only those come again in a replay."""
    marked, passed = {each.__name__ for each in GIVEN}, set[str]()
    for name, path in MODULES.items():
        if not name.startswith(("kafka_marshal.engine", "kafka_marshal.testing")):
            for node in ast.walk(tree_of(path)):
                match node:
                    case ast.Call(func=ast.Attribute(value=of, attr="take"), args=[_, ast.Attribute(attr=found), *_]):
                        passed |= {found} if of_engine(of, {"engine"}) else set()
                    case ast.Call(func=ast.Attribute(attr="_take"), args=[ast.Attribute(attr=found), *_]):
                        passed.add(found)
    assert len(passed) > 40 and Engine.step in GIVEN
    assert passed - marked == set()
