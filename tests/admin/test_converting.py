"""Conversion of a group to the other kind: what is carried over, what is not, and a kill at every step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from kafka_marshal import AdminError, ConfigurationError, GroupPausedError
from kafka_marshal.admin.conversion import Repeat
from kafka_marshal.errors import WrongKindError
from rationalizer import CommitEntry, ReleaseGroup
from rationalizer.limits import MAX_KEY_HASH
from tests.admin.conftest import HI, Group
from tests.admin.test_transfer import commit, empty, end, home, join, stable

__all__ = ["empty"]

Kind = Literal["claimed", "coordinated"]

OFFSETS = {0: 10, 1: 29, 2: 20}


def lay(group: Group, kind: Kind) -> None:
    """A group of this kind, without members, with positions and some offsets done beyond them."""
    if kind == "claimed":
        group.lay({0: (9, -1, [(12, 14)]), 1: (28, 28, []), 2: (19, -1, [])})
        return
    member = join(group)
    done = [CommitEntry(group.data, partition, through=offset - 1) for partition, offset in OFFSETS.items()]
    commit(group, member, *done, CommitEntry(group.data, 0, ranges=((12, 14),), metadata="mine"))
    commit(group, member, CommitEntry(group.data, 2, 0, 99, through=24))
    end(group, member)


def positions(group: Group) -> tuple[Kind | None, dict[int, int]]:
    """The group's kind, and the next offset of each partition."""
    claimed = {partition: done[0] + 1 for partition, done in group.progress().items()}
    coordinated = {partition: done + 1 for partition, done in stable(group).items()}
    assert not (claimed and coordinated)
    known = any(world.group(group.group) for world in group.worlds().values())
    return ("coordinated" if known else "claimed" if claimed else None), claimed or coordinated


def other(kind: Kind) -> Kind:
    return "claimed" if kind == "coordinated" else "coordinated"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "saved.json"


@pytest.mark.parametrize("to", ["claimed", "coordinated"])
def test_positions_are_carried_over_and_what_is_not_is_named(empty: Group, to: Kind, file: Path) -> None:
    lay(empty, other(to))
    admin = empty.admin()
    planned = admin.convert_group(empty.group, to, file=file, dry_run=True)
    assert not file.exists()
    assert positions(empty) == (other(to), OFFSETS)
    done = admin.convert_group(empty.group, to, file=file)
    assert positions(empty) == (to, OFFSETS)
    assert done == planned
    assert done.positions == {(empty.data, partition): offset for partition, offset in OFFSETS.items()}
    by_key = [Repeat(empty.data, 2, 20, 24, 0, 99)] if to == "claimed" else []
    assert list(done.repeats) == [Repeat(empty.data, 0, 12, 14, 0, MAX_KEY_HASH), *by_key]
    assert admin.pauses(empty.group) == []
    assert json.loads(file.read_text())["phase"] == "done"
    with pytest.raises(AdminError, match=f"is a {to} group already"):
        admin.convert_group(empty.group, to, file=file)
    back = admin.convert_group(empty.group, other(to), file=file)
    assert positions(empty) == (other(to), OFFSETS)
    assert not back.repeats


def test_workers_of_the_other_kind_continue_where_it_was(empty: Group, file: Path) -> None:
    lay(empty, "coordinated")
    empty.admin().convert_group(empty.group, "claimed", file=file)
    member = empty.start("a")
    expected = {(partition, offset) for partition, first in OFFSETS.items() for offset in range(first, 30)}
    empty.at_rest(type(empty.seen())(expected))
    assert not member.errors


def test_members_of_a_coordinated_group_continue_where_it_was(empty: Group, file: Path) -> None:
    lay(empty, "claimed")
    empty.admin().convert_group(empty.group, "coordinated", file=file)
    member = join(empty)
    commit(empty, member, CommitEntry(empty.data, 0, through=14))
    assert stable(empty) == {0: 14, 1: 28, 2: 19}


def test_a_group_at_work_is_not_converted(empty: Group, file: Path) -> None:
    empty.start("a")
    empty.at_rest(empty.everything())
    with pytest.raises(AdminError, match=r"is alive: 'a' beat meanwhile\. Nothing was changed, nobody was paused"):
        empty.admin().convert_group(empty.group, "coordinated", file=file)
    assert positions(empty)[0] == "claimed"
    assert not file.exists()
    for member in empty.threads:
        member.end()
    empty.admin().convert_group(empty.group, "coordinated", file=file)
    assert positions(empty) == ("coordinated", dict.fromkeys(range(3), 30))


def test_a_worker_of_the_old_kind_is_refused_afterwards(empty: Group, file: Path) -> None:
    lay(empty, "claimed")
    empty.admin().convert_group(empty.group, "coordinated", file=file)
    with pytest.raises(WrongKindError, match=r"mode=Group\(\)"):
        empty.member("late").consumer([empty.data])
    assert positions(empty) == ("coordinated", OFFSETS)


def test_what_can_not_be_converted(empty: Group, file: Path, tmp_path: Path) -> None:
    admin = empty.admin()
    with pytest.raises(AdminError, match="knows no group"):
        admin.convert_group(empty.group, "claimed", file=file)
    lay(empty, "claimed")
    with pytest.raises(AdminError, match="is a claimed group already"):
        admin.convert_group(empty.group, "claimed", file=file)
    with pytest.raises(ConfigurationError, match="to"):
        admin.convert_group(empty.group, "both", file=file)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="can't be saved there"):
        admin.convert_group(empty.group, "coordinated", file=tmp_path / "no folder" / "file")
    file.write_text("{}")
    with pytest.raises(ConfigurationError, match="no file of convert-group"):
        admin.convert_group(empty.group, "coordinated", file=file)
    assert positions(empty) == ("claimed", OFFSETS)
    assert admin.pauses(empty.group) == []


# -- killed ------------------------------------------------------------------------------------------------------------


def run_killed(group: Group, to: Kind, file: Path, at: int | None = None) -> list[str]:
    """The steps of a conversion; [] if it was killed."""
    arguments: dict[str, Any] = {
        "bootstrap": group.bootstrap,
        "coordination": group.coordination,
        "group": group.group,
        "hi": HI,
        "to": to,
        "file": str(file),
        "at": at,
    }
    script = str(Path(__file__).with_name("killed_conversion.py"))
    done = subprocess.run([sys.executable, script, json.dumps(arguments)], capture_output=True, text=True, timeout=90)
    assert done.returncode == (0 if at is None else -9), done.stderr
    return [] if at is not None else json.loads(done.stdout)


def one_of_each_kind(names: list[str]) -> list[int]:
    """The first step of each kind, and the very last: the rest repeat them in other CPs."""
    kinds: dict[str, int] = {}
    for at, name in enumerate(names, 1):
        kinds.setdefault(name.rpartition(" in ")[0] or name, at)
    return sorted({*kinds.values(), len(names)})


def test_each_kind_of_step_is_in_the_short_form() -> None:
    names = ["saved", "before X in 0", "after X in 0", "before X in 1", "after X in 1", "before Y in 0", "after Y in 0"]
    assert one_of_each_kind(names) == [1, 2, 3, 6, 7]
    assert one_of_each_kind(names[:5]) == [1, 2, 3, 5]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "each", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["each kind", "each step"]
)
@pytest.mark.parametrize("to", [pytest.param("claimed", marks=pytest.mark.campaign), "coordinated"])
def test_killed_between_any_two_steps_it_is_finished_by_the_next_run(
    empty: Group, to: Kind, each: bool, tmp_path: Path
) -> None:
    """In both directions, killed once at each step: positions don't change."""
    group = empty
    lay(group, other(to))
    names = run_killed(group, to, tmp_path / "whole.json")
    group.admin().convert_group(group.group, other(to), file=tmp_path / "back.json")
    assert names[-1].startswith("after ReleaseGroup")
    for at in range(1, len(names) + 1) if each else one_of_each_kind(names):
        file = tmp_path / f"{at}.json"
        run_killed(group, to, file, at)
        finished = json.loads(file.read_text())["phase"] == "done" if file.exists() else False
        admin = group.admin()
        if finished:
            assert positions(group) == (to, OFFSETS), names[at - 1]
            admin.resume(group.group)
        else:
            if not file.exists():
                admin.resume(group.group)
            admin.convert_group(group.group, to, file=file)
            assert positions(group) == (to, OFFSETS), names[at - 1]
        assert admin.pauses(group.group) == [], names[at - 1]
        admin.convert_group(group.group, other(to), file=tmp_path / "back.json")
        assert positions(group) == (other(to), OFFSETS), names[at - 1]


def test_a_group_that_was_at_work_in_between_is_not_set_back(empty: Group, file: Path) -> None:
    lay(empty, "claimed")
    names = run_killed(empty, "coordinated", file)
    empty.admin().convert_group(empty.group, "claimed", file=file)
    at = names.index("changing") + 1
    run_killed(empty, "coordinated", file, at)
    empty.admin().resume(empty.group)
    member = empty.start("a")
    expected = {(partition, offset) for partition, first in OFFSETS.items() for offset in range(first, 30)}
    empty.at_rest(type(empty.seen())(expected))
    member.end()
    with pytest.raises(AdminError, match="was at work after its conversion was interrupted"):
        empty.admin().convert_group(empty.group, "coordinated", file=file)
    assert positions(empty) == ("claimed", dict.fromkeys(range(3), 30))
    done = empty.admin().convert_group(empty.group, "coordinated", file=file, force=True)
    assert done.resumed
    assert positions(empty) == ("coordinated", OFFSETS)


def test_the_file_of_another_conversion_is_not_taken(empty: Group, file: Path) -> None:
    lay(empty, "claimed")
    names = run_killed(empty, "coordinated", file)
    empty.admin().convert_group(empty.group, "claimed", file=file)
    run_killed(empty, "coordinated", file, names.index("changing") + 1)
    planned = empty.admin().convert_group(empty.group, "coordinated", file=file, dry_run=True)
    assert planned.resumed
    assert positions(empty) == ("claimed", OFFSETS)
    with pytest.raises(ConfigurationError, match="was not finished"):
        empty.admin().convert_group(empty.group, "claimed", file=file)
    assert len(empty.admin().pauses(empty.group)) == 3, "the dead one's pause is in force still"
    empty.admin().convert_group(empty.group, "coordinated", file=file)
    assert positions(empty) == ("coordinated", OFFSETS)


def test_another_admins_pause_is_respected(empty: Group, file: Path) -> None:
    lay(empty, "claimed")
    empty.append((home(empty), ReleaseGroup("raw-1", "ops", empty.group, 2**50)))
    with pytest.raises(GroupPausedError, match="is paused by 'ops'"):
        empty.admin().convert_group(empty.group, "coordinated", file=file)
    assert not file.exists()
