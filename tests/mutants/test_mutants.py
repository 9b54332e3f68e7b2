"""The list of planted bugs holds, and five of them, drawn by chance, are caught in every run of the tests."""

from __future__ import annotations

import ast
from functools import cache
from random import SystemRandom

import pytest

from kafka_marshal.testing.simulation import Scenario, simulate
from rationalizer import Outcome, World
from tests.mutants import MUTATIONS, Mutation, StaleMutationError, mutated
from tests.mutants.__main__ import main
from tests.mutants.drawn import draw
from tests.mutants.groups import GROUPS
from tests.mutants.oracle import OracleJudge
from tests.mutants.proofs import Sizes, units
from tests.mutants.runner import ROOT, catchers, run_all


@cache
def product(file: str) -> str:
    return ast.dump(ast.parse((ROOT / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_still_applies_and_compiles_to_something_else(mutation: Mutation) -> None:
    changed = mutated(mutation)
    assert ast.dump(ast.parse(changed)) != product(mutation.file)
    compile(changed, mutation.file, "exec")


def test_there_are_enough_of_them_and_no_two_alike() -> None:
    assert len(MUTATIONS) >= 40
    assert len(GROUPS) >= 40
    assert sum(mutation.is_in_core for mutation in MUTATIONS) >= 30
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert len({(x.at, x.old, x.new) for x in MUTATIONS}) == len(MUTATIONS)


def test_a_line_that_is_not_there_once_is_refused() -> None:
    methods = "".join(f"    def {name}(self):\n        return 1\n\n" for name in "ab")
    text = f"def a():\n    return 1\n\n\nclass K:\n{methods}"
    with pytest.raises(StaleMutationError, match="2 lines 'return 1' at 'a'"):
        mutated(Mutation("x", "a", "return 1", "return 2", "C1"), text)
    with pytest.raises(StaleMutationError, match="0 lines 'return 3' at 'b'"):
        mutated(Mutation("x", "b", "return 3", "return 2", "C1"), text)
    with pytest.raises(StaleMutationError, match="0 lines"):
        mutated(Mutation("x", "c", "return 1", "return 2", "C1"), text)
    at = Mutation("x", "K.a", "return 1", "return 2", "C1")
    assert mutated(at, text) == text.replace("def a(self):\n        return 1", "def a(self):\n        return 2")


def test_the_list_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "latest claim,stale at"]) == 0
    assert capsys.readouterr().out.count("       + ") == 2
    assert main(["--only", "no such bug"]) == 2


def test_lines_are_drawn_by_chance_the_same_ones_for_a_seed() -> None:
    drawn = draw(ROOT, 40, seed=7)
    assert drawn == draw(ROOT, 40, seed=7) != draw(ROOT, 40, seed=8)
    assert len(drawn) == 40
    for mutation in drawn:
        test_each_still_applies_and_compiles_to_something_else(mutation)


# Drawn by chance: a second try would plant other bugs.
@pytest.mark.flaky(reruns=0)
@pytest.mark.slow
@pytest.mark.timeout(600)  # where the unit that caught a bug last no longer does, all of them run
def test_three_drawn_by_chance_are_caught_and_the_product_passes_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    seed = SystemRandom().randrange(1_000_000)
    status = main(["--some", "3", "--seed", str(seed)])
    said = capsys.readouterr().out
    assert status == 0, f"make mutants ARGS='--some 3 --seed {seed}'\n{said}"
    assert "3 caught" in said and "the product itself passes" in said


def test_each_unit_that_caught_a_bug_is_still_there() -> None:
    assert set(catchers().values()) <= {unit.name for unit in units(Sizes())}
    assert set(catchers()) <= {mutation.name for mutation in MUTATIONS}


@pytest.mark.slow
def test_what_is_no_python_is_no_proof() -> None:
    """A mutation that can't be imported is reported as raised; the control row shows that the product passes."""
    nonsense = Mutation("nonsense", "Lease.freshness", "if self.client_id is None:", "if self.client_id is", "C1")
    rows = list(run_all([nonsense], ["--only", "--first", "log 0"], budget_s=30))
    assert [(row.by, row.is_right) for row in rows] == [("raised", True), ("", True)]
    assert "SyntaxError" in rows[0].what


# A violation counts even if a second try has none: CI's --reruns is not for these.
@pytest.mark.flaky(reruns=0)
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_stories_hold_against_the_oracle() -> None:
    simulate(seeds=1, judge=OracleJudge).raise_for_violation()


# A violation counts even if a second try has none: CI's --reruns is not for these.
@pytest.mark.flaky(reruns=0)
def test_a_judge_gets_each_record_and_its_objection_counts() -> None:
    class Doubtful:
        def __init__(self, scenario: Scenario) -> None:
            self.told: list[tuple[int, int]] = []

        def judge(self, cp: int, offset: int, timestamp_ms: int, value: bytes, outcome: Outcome, world: World) -> str:
            assert world.next_offset == offset + 1 == len([at for at in self.told if at[0] == cp]) + 1
            self.told.append((cp, offset))
            return "I doubt it" if len(self.told) == 100 else ""

    [broken] = simulate(seeds=1, judge=Doubtful, small=False).broken
    assert broken.violation is not None
    assert broken.violation.promise == "rules"
    assert "I doubt it" in broken.violation.message
