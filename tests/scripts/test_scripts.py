"""The rules of docs/protocol as scripts to read: one file for each rule or family.

Those that a replica applies lie here, of coordinated groups in `groups/` and `checkpoints/`, of shares and of open
messages in `sharing/`; those that members follow in `engine/`, and what many handlers of one member wait for in
`transactions/`.
`groups/` also has the situations that two designs of Kafka's consumer describe, each in a script named after it.

    pytest tests/scripts --rewrite-scripts

writes what comes of each command into the scripts; read the diff before you commit it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rationalizer import RejectedValueError, World, codes, decode
from rationalizer.levels import SHARING_LEVEL, SUPPORTED_LEVEL
from rationalizer.plane import Entry
from rationalizer.wire.records import KINDS
from tests.rationalizer.chapters import PROTOCOL
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.oracle.compare import same_after, same_state
from tests.rationalizer.oracle.layout import HIGHEST_LEVEL
from tests.scripts.blocks import Blocks
from tests.scripts.group_cells import CheckpointCellMet, GroupCellMet, SettleCellMet
from tests.scripts.members import Members
from tests.scripts.records import options_of, record_of, words_of
from tests.scripts.replica import CellMet, Replica
from tests.scripts.runner import FOLDER, SCRIPTS, ScriptError, difference, played
from tests.scripts.sharing_records import ShareCell
from tests.tables import groups as of_groups
from tests.tables.leases import TRANSITIONS
from tests.tables.shares import SHARE_COLUMNS, SHARE_TRANSITIONS, ShareTransition

ALL = [path for paths in SCRIPTS.values() for path in paths]
OF_A_REPLICA = [*SCRIPTS[""], *SCRIPTS["groups"], *SCRIPTS["checkpoints"], *SCRIPTS["sharing"]]
#: A rule's script begins with its letter and number; all others are situations.
#: Rules of members in groups that take checkpoints.
NO_SCRIPT_YET = {"X11", "X12", "X13", "X14", "X15", "X16", "X17", "X18", "X19", "X20"}
RULE = re.compile(r"[a-z]\d\d_")
by_file = pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
of_a_replica = pytest.mark.parametrize("path", OF_A_REPLICA, ids=lambda path: path.stem)


@cache
def run(path: Path) -> tuple[str, Replica]:
    """The script of a replica as it comes out now, and what its log went through."""
    replica = Replica()
    return played(path.read_text(encoding="utf-8"), replica.play), replica


@by_file
def test_script(path: Path, request: pytest.FixtureRequest) -> None:
    says = path.read_text(encoding="utf-8")
    player = Blocks if path in SCRIPTS["transactions"] else Members
    prints = run(path)[0] if path in OF_A_REPLICA else played(says, player().play)
    if request.config.getoption("--rewrite-scripts"):
        path.write_text(prints, encoding="utf-8")
    elif says != prints:
        pytest.fail(difference(path, says, prints), pytrace=False)


def small_logs(path: Path) -> Iterator[tuple[World, list[Entry]]]:
    """The script's logs, and what each leads to; without 60,000 ranges or 1,000 members, which take a minute."""
    for partition, partitions, log in run(path)[1].logs:
        at_once = World(partition, partitions)
        at_once.apply_many(log)
        if at_once.listed <= 500 and all(len(value or b"") <= 10_000 for _, _, value in log):
            yield at_once, log


@of_a_replica
def test_the_oracle_and_apply_many_conclude_the_same(path: Path) -> None:
    for at_once, log in small_logs(path):
        partition, partitions = at_once.partition, at_once.partitions
        if at_once.level > HIGHEST_LEVEL:
            continue  # the oracle has yet to learn it
        oracle = OracleWorld(partition, partitions, SUPPORTED_LEVEL)
        same_after(log, World(partition, partitions), oracle)
        same_state(at_once, oracle)


@of_a_replica
def test_a_replica_that_starts_from_a_snapshot_concludes_the_same(path: Path) -> None:
    for at_once, log in small_logs(path):
        world = World(at_once.partition, at_once.partitions)
        for entry in log:
            restarted = World.restore(world.snapshot(), world.partitions)
            assert restarted.apply(*entry) == world.apply(*entry)
            assert restarted.digest() == world.digest()
            if world.required_level is not None:
                break  # it stands before that record, and so does its snapshot


def test_each_cell_of_the_table_of_transitions_is_met() -> None:
    """And each record in one ends as the table says."""
    table: set[CellMet] = {
        (row, standing, getattr(row, standing))
        for row in TRANSITIONS
        for standing in ("free", "fresh", "unknown", "stale")
    }
    met: set[CellMet] = set().union(*(run(path)[1].cells for path in OF_A_REPLICA))
    assert words(table - met) == [], "no script has these"
    assert words(met - table) == [], "the table does not have these"


def test_each_cell_of_the_table_of_groups_is_met() -> None:
    """And each record in one ends as the table says, with that effect."""
    table: set[GroupCellMet] = {
        (row, column, ending)
        for row in of_groups.TRANSITIONS
        for column in of_groups.COLUMNS
        for ending in getattr(row, column)
    }
    met: set[GroupCellMet] = set().union(*(run(path)[1].group_cells for path in OF_A_REPLICA))
    assert group_words(table - met) == [], "no script has these"
    assert group_words(met - table) == [], "the table does not have these"


def test_each_cell_of_the_table_of_checkpoints_is_met() -> None:
    """And each record in one ends as the table says, with that effect."""
    table: set[CheckpointCellMet] = {
        (row, column, ending)
        for row in of_groups.CHECKPOINT_TRANSITIONS
        for column in of_groups.CHECKPOINT_COLUMNS
        for ending in getattr(row, column)
    }
    met: set[CheckpointCellMet] = set().union(*(run(path)[1].checkpoint_cells for path in OF_A_REPLICA))
    assert group_words(table - met) == [], "no script has these"
    assert group_words(met - table) == [], "the table does not have these"


def test_each_cell_of_the_table_of_what_settles_is_met() -> None:
    """And each record in one ends as the table says, with that effect."""
    table = set(table_of_settling())
    met: set[SettleCellMet] = set().union(*(run(path)[1].settle_cells for path in OF_A_REPLICA))
    assert group_words(table - met) == [], "no script has these"
    assert group_words(met - table) == [], "the table does not have these"


def test_each_cell_of_the_table_of_shares_is_met() -> None:
    """And each record in one ends as the table says."""
    table = set(table_of_shares())
    met: set[ShareCell] = set().union(*(run(path)[1].share_cells for path in OF_A_REPLICA))
    found = [{(row.record, row.nil_epoch, *rest) for row, *rest in cells} for cells in (table - met, met - table)]
    assert sorted(found[0]) == [], "no script has these"
    assert sorted(found[1]) == [], "the table does not have these"


#: The tables of chapter 7b, cell by cell, each with the scripts that have it; --rewrite-scripts writes it, too.
CELLS = FOLDER / "sharing" / "cells.md"
#: What a record of level 4 ends with before the tables have a say.
BEFORE_THE_TABLES = (codes.WRONG_PARTITION, codes.PAUSED, codes.WRONG_KIND)


def test_each_cell_of_chapter_7b_names_its_scripts(request: pytest.FixtureRequest) -> None:
    wanted = {share_words(row, column, code): set[str]() for row, column, code in table_of_shares()}
    wanted |= {settle_words(*cell): set() for cell in table_of_settling()}
    of_level = sorted(kind.name for kind in KINDS.values() if kind.level == SHARING_LEVEL)
    wanted |= {f"{name} | any | {code}": set() for name in of_level for code in BEFORE_THE_TABLES}
    del wanted[f"SettleOffsets | any | {codes.PAUSED}"]  # it hands in
    for path in OF_A_REPLICA:
        replica = run(path)[1]
        has = {share_words(row, column, code) for row, column, code in replica.share_cells}
        has |= {settle_words(*cell) for cell in replica.settle_cells}
        has |= {f"{name} | any | {code}" for name, code in replica.ends}
        for cell in has & wanted.keys():
            wanted[cell].add(path.stem)
    lines = [f"| {cell} | {', '.join(sorted(found)) or 'none'} |" for cell, found in wanted.items()]
    told = "\n".join(["| record | state | code | scripts |", "|---|---|---|---|", *lines]) + "\n"
    if request.config.getoption("--rewrite-scripts"):
        CELLS.write_text(told, encoding="utf-8")
    assert [line for line in lines if line.endswith("| none |")] == []
    assert CELLS.read_text(encoding="utf-8") == told


def table_of_shares() -> list[ShareCell]:
    columns = [(row, column) for row in SHARE_TRANSITIONS for column in SHARE_COLUMNS]
    return [(row, column, code) for row, column in columns for code in getattr(row, column)]


def table_of_settling() -> list[SettleCellMet]:
    columns = [(row, column) for row in of_groups.SETTLE_TRANSITIONS for column in of_groups.SETTLE_COLUMNS]
    return [(row, column, ending) for row, column in columns for ending in getattr(row, column)]


def share_words(row: ShareTransition, column: str, code: str) -> str:
    return f"{row.record}{', epoch nil' * row.nil_epoch} | {SHARE_COLUMNS[column]} | {code}"


def settle_words(row: of_groups.SettleTransition, column: str, ending: of_groups.Ending) -> str:
    return f"{row.record}, {row.who.value} | {of_groups.SETTLE_COLUMNS[column]} | {ending.code} ({ending.effect.value})"


def group_words(cells: set[GroupCellMet] | set[CheckpointCellMet] | set[SettleCellMet]) -> list[str]:
    return sorted(
        f"{row.record} {row.who.value}, {column}: {ending.code} {ending.effect.value}" for row, column, ending in cells
    )


def test_each_move_of_the_state_diagram_is_made_and_no_other() -> None:
    made: set[tuple[str, str]] = set().union(*(run(path)[1].moves for path in OF_A_REPLICA))
    assert made == {(move.before, move.after) for move in of_groups.MOVES}


def words(cells: set[CellMet]) -> list[str]:
    return sorted(
        f"{row.record}{' (epoch nil)' * row.nil_epoch} by {row.sender.value}, {standing}: {code} ({row.rule})"
        for row, standing, code in cells
    )


@by_file
def test_each_step_says_why(path: Path) -> None:
    head, *blocks = path.read_text(encoding="utf-8").split("\n\n")
    assert all(line.startswith("# ") for line in head.splitlines())
    assert [block for block in blocks if not block.startswith("# ")] == []


def test_each_outcome_is_met_by_each_record_type_that_can_have_it_and_by_no_other() -> None:
    met: set[tuple[str, str]] = set().union(*(run(path)[1].ends for path in OF_A_REPLICA))
    ends = {(name, code) for name, code in met if code != codes.UPGRADE_REQUIRED}  # no outcome of the log
    listed = {(name, row.code) for row in codes.TABLE for name in row.records.split(", ")}
    by_any = {code for name, code in listed if name == "any"}
    assert {kind.name for kind in KINDS.values()} - {name for name, code in ends if code == codes.OK} == set()
    assert by_any - {code for _, code in ends} == set()
    assert {(name, code) for name, code in listed - ends if name != "any"} == set(), "no script has these"
    assert {(name, code) for name, code in ends - listed if code not in by_any} == set(), (
        "the table does not have these"
    )


def test_each_rule_has_its_script() -> None:
    """A script's name begins with its rule; a family's other members are named in its text.

    (F: tests/sinks. M8, what options refuse: tests/client/test_transactions.py.
    U12: tests/client/test_assign.py. U13: tests/client/test_shared_reads.py. U14: tests/engine/test_hot_keys.py.)
    """
    rules = set(re.findall(r"^- \*\*((?:[^\WDEFLQS]\d+)|L3|S1|D2|D3)\*\*", PROTOCOL, re.MULTILINE))
    named = {rule for path in ALL for rule in re.findall(r"\b[A-Z]\d+\b", path.read_text(encoding="utf-8"))}
    assert len(rules) > 60
    assert sorted(rules - named - NO_SCRIPT_YET) == ["M8", "U12", "U13", "U14"]
    for path in ALL:
        if RULE.match(path.stem) is None:
            continue
        letter, number = path.stem[0].upper(), int(path.stem[1:3])
        assert path.read_text(encoding="utf-8").startswith(f"# {letter}{number}: "), path.name


def test_each_case_of_the_scenarios_has_its_script() -> None:
    """Those of the section "Interesting scenarios to consider" of Kafka's design, by their numbers."""
    cases = {
        "coordinator_failover_or_connection_loss": 3,
        "partition_changes_for_subscribed_topics": 4,
        "offset_commits_during_rebalance": 4,
        "heartbeats_during_rebalance": 4,
        "coordinator_failure_during_rebalance": 5,
        "slow_consumers": 7,
    }
    wanted = {f"{name}_{number}" for name, count in cases.items() for number in range(1, count + 1)}
    assert wanted - {path.stem for path in SCRIPTS["groups"]} == set()


def test_each_record_type_is_said_in_the_words_in_which_it_is_written() -> None:
    said: set[str] = set()
    for value in (value for path in OF_A_REPLICA for log in run(path)[1].logs for _, _, value in log[2]):
        try:
            record = decode(value or b"", SUPPORTED_LEVEL)
        except RejectedValueError:
            continue
        text = words_of(record, lambda key: -1, 0)
        if "its topic" not in text:
            words, options = options_of(text.split())
            assert record_of((record.instance_id, record.client_id), words, options, 0, lambda key: -1) == record, text
            said.add(type(record).__name__)
    assert said == {kind.name for kind in KINDS.values()}


def test_a_command_that_means_nothing_is_named_with_its_line() -> None:
    about_groups = ("a1 joins flights", "a1 lets go flights", "a1 commits offsets flights:0>", "a1 configures speed=3")
    for command in (
        "a1 dances flights:0",
        "a1 beats flights:0 speed=3",
        "nobody ticks",
        "lease",
        "value {",
        *about_groups,
    ):
        with pytest.raises(ScriptError, match="line 2, '"):
            played(f"log a1=a/1\n{command}\n----\n", Replica().play)
    for command in ("a dances", "a takes speed=3", "nobody takes", "lease", "kafka gone", "a loses heart", "z ticks"):
        with pytest.raises(ScriptError, match="line 2, '"):
            played(f"a starts flights\n{command}\n----\n", Members().play)
