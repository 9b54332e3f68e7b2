"""The places that a new record type, effect or policy touches, as listed in HACKING.md: none can be forgotten."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import kafka_marshal
import rationalizer
from kafka_marshal.client.health import Health
from kafka_marshal.engine import policies
from kafka_marshal.engine.effects import Effect
from kafka_marshal.engine.inputs import GIVEN
from kafka_marshal.engine.policies import Policy
from kafka_marshal.pipeline.audit.observer import Observer
from rationalizer import Upgrade, World, encode
from rationalizer.groups.machine import GroupPlane
from rationalizer.leases.machine import LeasePlane
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.plane import handlers_of
from rationalizer.wire.records import KINDS
from tests.campaigns.fuzz.author import UNKNOWN_TYPES, Author
from tests.rationalizer.group_author import write_group_log
from tests.rationalizer.oracle import layout
from tests.rationalizer.sharers import write_sharing_log
from tests.rationalizer.strategies import by_seed, write_log
from tests.tables.leases import TRANSITIONS
from tests.tables.shares import SHARE_TRANSITIONS
from tests.test_house_rules import MODULES, PYTHON_FILES, ROOT, named, nodes_of, tree_of

NAMES = {number: kind.name for number, kind in KINDS.items()}
#: Those that the oracle knows, and its author writes.
OF_THE_ORACLE = {number: kind.name for number, kind in KINDS.items() if kind.level <= layout.HIGHEST_LEVEL}
WRITE = (write_log, write_group_log, write_sharing_log)
TEST = re.compile(r"^def (test_\w+)", re.MULTILINE)
OF_ONE_LEASE = {kind.name for kind in KINDS.values() if kind.names_lease}


def test_every_record_type_is_exported() -> None:
    assert set(NAMES.values()) <= set(rationalizer.__all__)


def test_every_record_type_about_one_lease_has_its_rows_in_the_table_of_transitions() -> None:
    assert {row.record for row in TRANSITIONS} | {row.record for row in SHARE_TRANSITIONS} == OF_ONE_LEASE


def test_every_record_type_has_an_oracle_row() -> None:
    assert {number: name for number, (name, _) in layout.known_types(SUPPORTED_LEVEL).items()} == OF_THE_ORACLE
    assert set(layout.NAMES_ONE_LEASE) == OF_ONE_LEASE & set(OF_THE_ORACLE.values())


def type_of(value: bytes | None) -> str | None:
    """The record's name, at the highest level that there is."""
    world = World(0, 1)
    world.apply(0, 0, encode(Upgrade("1", "a", "g", SUPPORTED_LEVEL)))
    return world.apply(1, 0, value).type


def test_every_record_type_is_written_by_the_oracles_author_and_by_the_fuzzs() -> None:
    log = [entry for write in WRITE for entry in write(by_seed(0), 400)[0]]
    fuzz = Author(0, 0, 1)
    for values in ([value for _, _, value in log], [fuzz.next() for _ in range(3_000)]):
        written = {type_of(value) for value in values}
        assert written - {None} == set(OF_THE_ORACLE.values())
    assert set(NAMES).isdisjoint(UNKNOWN_TYPES)


def test_the_audit_follows_every_record_type() -> None:
    """The audit would report a record type that changes a lease or a group and that it does not know as a violation."""
    accepted: set[str | None] = set()
    for write in WRITE:
        for seed in range(5):
            log, _ = write(by_seed(seed), 160)
            observer = Observer(World(0, 1), lambda table, rows: None)
            observer.replay(log)
            assert observer.violations == {}
            world = World(0, 1)
            accepted |= {outcome.type for outcome in (world.apply(*entry) for entry in log) if outcome.accepted}
    assert accepted == set(OF_THE_ORACLE.values())


def reads_by_position(node: ast.AST) -> bool:
    """Whether it is ``message[5]``, or a comparison of ``outcome.type`` with a ``__name__``."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("message", "outcome.message"):
        return not (isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str))
    if isinstance(node, ast.Compare) and ast.unparse(node.left) == "outcome.type":
        return any(ast.unparse(each).endswith(".__name__") for each in node.comparators)
    return False


def test_messages_are_read_by_name_outside_the_core() -> None:
    """``message.epoch``: a field that a new record type has in front of it makes no difference."""
    found = []
    for name, path in MODULES.items():
        if name.startswith("kafka_marshal.") or "history" in name:
            found += [f"{named(path)}: {ast.unparse(node)}" for node in nodes_of(path) if reads_by_position(node)]
    assert found == []


def test_what_is_compared_with_the_name_of_a_record_type_is_one() -> None:
    """A misspelt ``outcome.type == "Hearbeat"`` would never be true."""
    for name, path in MODULES.items():
        for node in nodes_of(path) if "outcome.type ==" in path.read_text(encoding="utf-8") else ():
            if isinstance(node, ast.Compare) and ast.unparse(node.left) == "outcome.type":
                texts = {each.value for each in node.comparators if isinstance(each, ast.Constant)}
                assert texts <= set(NAMES.values()), f"{name}:{node.lineno}"


def test_each_record_type_has_one_handler() -> None:
    owners = [World(0, 1), LeasePlane(0, 1), GroupPlane(0, 1)]
    handled = sorted(number for owner in owners for number in handlers_of(owner))
    assert [NAMES[number] for number in handled] == [NAMES[number] for number in sorted(NAMES)]


def holding(*texts: str) -> list[Path]:
    """Python files that contain all of these."""
    return [path for path in PYTHON_FILES if all(text in path.read_text(encoding="utf-8") for text in texts)]


def listed_together(tree: ast.Module) -> Iterator[tuple[int, set[str]]]:
    """Names in one tuple, one union, or one pattern: ``(A, B)``, ``A | B``, ``case A() | B()``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple):
            yield node.lineno, {each.id for each in node.elts if isinstance(each, ast.Name)}
        elif isinstance(node, ast.MatchOr):
            classes = [each.cls for each in node.patterns if isinstance(each, ast.MatchClass)]
            yield node.lineno, {each.id for each in classes if isinstance(each, ast.Name)}
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            yield node.lineno, set(ast.unparse(node).split(" | "))


def test_nobody_lists_the_record_types_about_one_lease() -> None:
    """``isinstance(record, LeaseRecord)``, ``Outcome.leases``: a new one is in no list that would have to name it."""
    found = [
        f"{named(path)}:{line}"
        for path in holding("ClaimingPartition", "ReleasingPartition")
        for line, names in listed_together(tree_of(path))
        if len(names & OF_ONE_LEASE) >= 4
    ]
    assert found == []


def test_every_effect_is_handled_wherever_effects_are_carried_out() -> None:
    carriers = 0
    for path in holding("match effect:"):
        for node in nodes_of(path):
            if isinstance(node, ast.Match) and ast.unparse(node.subject) == "effect":
                carriers += 1
                patterns = [each.cls for each in ast.walk(node) if isinstance(each, ast.MatchClass)]
                known = {each.id for each in patterns if isinstance(each, ast.Name)}
                assert {each.__name__ for each in get_args(Effect)} <= known, f"{named(path)}:{node.lineno}"
    assert carriers == 4


def test_every_input_is_given_by_something() -> None:
    outside = [path for name, path in MODULES.items() if not name.startswith("kafka_marshal.engine")]
    named = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for path in outside
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert GIVEN and {each.__name__ for each in GIVEN} <= named


def test_every_policy_is_exported_and_on_its_page() -> None:
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    own = [each for each in Policy.__subclasses__() if each.__module__ == policies.__name__]
    public = {each.__name__ for each in own if not each.__name__.startswith("_")}
    assert public <= set(kafka_marshal.__all__)
    assert public == set(re.findall(r"^\| `(\w+)\(.*?\)` \|", page, re.MULTILINE))


def test_every_figure_of_health_is_on_its_page() -> None:
    page = (ROOT / "docs" / "health.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    named_there = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {each.name for each in fields(Health)} - named_there == set()


def test_the_page_names_files_that_exist() -> None:
    page = (ROOT / "HACKING.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 140
    paths = set(re.findall(r"`((?:rationalizer|marshal|tests|docs)/[\w/.*-]+)`", page))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not list(ROOT.glob(path))] == []
    tests = set(re.findall(r"`(test_\w+)`", page))
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in TEST.findall(path.read_text(encoding="utf-8"))
    }
    assert tests - defined == set()
