"""Import of positions from Kafka's consumer groups and export to them, with a real consumer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from confluent_kafka import Consumer, TopicPartition

from kafka_marshal import AdminError, ConfigurationError, GroupPausedError
from kafka_marshal.admin.conversion import Repeat
from kafka_marshal.errors import WrongKindError
from rationalizer import CommitEntry, CommitOffsets, JoinGroup, LeaveGroup, ReleaseGroup, Upgrade, route_group
from rationalizer.limits import MAX_KEY_HASH
from tests.admin.conftest import HI, Group, wait_until

PROTOCOLS = ["classic", "consumer"]


@pytest.fixture
def empty(group: Group) -> Iterator[Group]:
    """Three partitions of 30 messages; the log is at level 2."""
    group.fill(3, 30)
    group.append(*((cp, Upgrade("raw-1", "raw", "raw", 2)) for cp in range(3)))
    yield group


def consumer(group: Group, protocol: str, reset: str = "error") -> Consumer:
    settings: dict[str, Any] = {
        "bootstrap.servers": group.bootstrap,
        "group.id": group.group,
        "client.id": "theirs",
        "group.protocol": protocol,
        "auto.offset.reset": reset,
        "enable.auto.commit": False,
    }
    made = Consumer(settings)
    made.subscribe([group.data])
    return made


def read(kafka: Consumer, messages: int) -> list[tuple[int, int]]:
    """(partition, offset) of the next ``messages`` messages."""
    found: list[tuple[int, int]] = []
    while len(found) < messages:
        message = kafka.poll(1.0)
        if message is not None:
            assert message.error() is None, message.error()
            found.append((message.partition() or 0, message.offset() or 0))
    return found


def commit_half(group: Group, protocol: str) -> dict[int, int]:
    """A real consumer reads everything and commits part of it; partition → offset."""
    offsets = {0: 10, 1: 25, 2: 0}
    kafka = consumer(group, protocol, "earliest")
    read(kafka, 90)
    committed = [
        TopicPartition(group.data, partition, offset, f"m{partition}") for partition, offset in offsets.items()
    ]
    kafka.commit(offsets=committed, asynchronous=False)
    kafka.close()
    return offsets


def home(group: Group) -> int:
    return route_group(group.group, 3)


def stable(group: Group) -> dict[int, int]:
    found = group.worlds()[home(group)].group(group.group)
    return {} if found is None else {partition: kept.progress.stable for _, partition, kept in found.all_progress()}


def join(group: Group, client: str = "a") -> str:
    """A member, by a raw record; its member_id."""
    ids = (f"{client}-1", client, group.group)
    group.append((home(group), JoinGroup(*ids, "", 0, 30_000, "sticky", False, "", ((group.data, 3),))))
    found = group.worlds()[home(group)].group(group.group)
    assert found is not None
    return found.clients[client].member_id


def commit(group: Group, member_id: str, *entries: CommitEntry, client: str = "a") -> None:
    found = group.worlds()[home(group)].group(group.group)
    assert found is not None
    ids = (f"{client}-1", client, group.group)
    group.append((home(group), CommitOffsets(*ids, member_id, found.generation, False, entries)))


def end(group: Group, member_id: str, client: str = "a") -> None:
    found = group.worlds()[home(group)].group(group.group)
    assert found is not None
    group.append((home(group), LeaveGroup(f"{client}-1", client, group.group, member_id, found.generation)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_what_a_consumer_committed_is_where_a_coordinated_group_begins(empty: Group, protocol: str) -> None:
    offsets = commit_half(empty, protocol)
    admin = empty.admin()
    planned = admin.import_group(empty.group, dry_run=True)
    assert stable(empty) == {}
    moves = admin.import_group(empty.group)
    assert [(move.partition, move.before, move.after) for move in moves] == [(0, None, 10), (1, None, 25), (2, None, 0)]
    assert moves == planned
    assert stable(empty) == {partition: offset - 1 for partition, offset in offsets.items()}
    worlds = empty.worlds()
    assert all(world.group(empty.group) is not None for world in worlds.values()), "it is marked everywhere (G2)"
    found = worlds[home(empty)].group(empty.group)
    assert found is not None
    assert [kept.metadata for _, _, kept in found.all_progress()] == ["m0", "m1", "m2"]
    assert admin.pauses(empty.group) == []
    assert all(move.before == move.after for move in admin.import_group(empty.group)), "once more changes nothing"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_consumer_continues_where_a_coordinated_group_was(empty: Group, protocol: str) -> None:
    member = join(empty)
    entries = [CommitEntry(empty.data, 0, through=9), CommitEntry(empty.data, 1, through=28, metadata="mine")]
    commit(empty, member, *entries, CommitEntry(empty.data, 2, through=19))
    commit(empty, member, CommitEntry(empty.data, 2, ranges=((22, 24),)))
    with pytest.raises(AdminError, match=r"may be at work: after 1 s .a. are not silent"):
        empty.admin().export_group(empty.group, timeout=1)
    end(empty, member)
    moves = empty.admin().export_group(empty.group)
    assert [(x.partition, x.before, x.after, x.done_ahead) for x in moves] == [
        (0, None, 10, 0),
        (1, None, 29, 0),
        (2, None, 20, 3),
    ]
    assert empty.cluster.kafka_group(empty.group, 10).committed == {
        (empty.data, 0): (10, ""),
        (empty.data, 1): (29, "mine"),
        (empty.data, 2): (20, ""),
    }
    kafka = consumer(empty, protocol)
    assert sorted(read(kafka, 31)) == [
        *((0, offset) for offset in range(10, 30)),
        (1, 29),
        *((2, offset) for offset in range(20, 30)),
    ]
    kafka.close()


def test_a_claimed_group_can_be_exported_too(group: Group) -> None:
    group.fill(3, 30)
    group.lay({0: (9, -1, []), 1: (9, 9, [(12, 14)])})
    moves = group.admin().export_group(group.group)
    assert [(x.partition, x.after, x.done_ahead) for x in moves] == [(0, 10, 0), (1, 10, 3)]
    assert group.cluster.kafka_group(group.group, 10).committed == {
        (group.data, 0): (10, ""),
        (group.data, 1): (10, ""),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_nothing_is_changed_while_the_kafka_group_has_members(empty: Group, protocol: str) -> None:
    member = join(empty)
    commit(empty, member, CommitEntry(empty.data, 0, through=20))
    end(empty, member)
    kafka = consumer(empty, protocol, "earliest")
    read(kafka, 1)
    kafka.commit(offsets=[TopicPartition(empty.data, 0, 3)], asynchronous=False)
    for call in (empty.admin().import_group, empty.admin().export_group):
        with pytest.raises(AdminError, match="has members: theirs"):
            call(empty.group, force=True)
    assert stable(empty) == {0: 20}
    assert empty.cluster.kafka_group(empty.group, 10).committed == {(empty.data, 0): (3, "")}
    kafka.close()


def test_positions_are_replaced_only_by_force(empty: Group) -> None:
    empty.cluster.commit_for_group(empty.group, {(empty.data, 0): (3, "")}, 10)
    member = join(empty)
    commit(empty, member, CommitEntry(empty.data, 0, through=20))
    with pytest.raises(AdminError, match=r"may be at work: after 1 s .a. are not silent"):
        empty.admin().import_group(empty.group, force=True, timeout=1)
    end(empty, member)
    with pytest.raises(AdminError, match=r"has positions already.*21 → 3"):
        empty.admin().import_group(empty.group)
    assert stable(empty) == {0: 20}
    empty.admin().import_group(empty.group, force=True)
    assert stable(empty) == {0: 2}
    empty.cluster.commit_for_group(empty.group, {(empty.data, 0): (7, "")}, 10)
    with pytest.raises(AdminError, match=r"committed more than is done here.*7 → 3"):
        empty.admin().export_group(empty.group)
    assert empty.cluster.kafka_group(empty.group, 10).committed == {(empty.data, 0): (7, "")}
    empty.admin().export_group(empty.group, force=True)
    assert empty.cluster.kafka_group(empty.group, 10).committed == {(empty.data, 0): (3, "")}


def test_what_can_not_be_imported(empty: Group, group: Group) -> None:
    with pytest.raises(AdminError, match="no committed offsets"):
        empty.admin().import_group(empty.group)
    with pytest.raises(AdminError, match="has no positions here"):
        empty.admin().export_group(empty.group)
    empty.cluster.commit_for_group(empty.group, {(empty.data, 0): (3, "")}, 10)
    empty.lay({0: (9, -1, [])})
    with pytest.raises(WrongKindError, match="convert-group"):
        empty.admin().import_group(empty.group)
    with pytest.raises(ConfigurationError):
        empty.admin().import_group("")


def test_positions_of_a_topic_that_is_gone_are_left_out(empty: Group) -> None:
    member = join(empty)
    commit(empty, member, CommitEntry(empty.data, 0, through=20), CommitEntry(empty.data, 1, through=99))
    end(empty, member)
    moves = empty.admin().export_group(empty.group)
    assert [bool(move.lost) for move in moves] == [False, True]
    assert empty.cluster.kafka_group(empty.group, 10).committed == {(empty.data, 0): (21, "")}


# -- Conversion of a group to the other kind: what is carried over, what is not, and a kill at every step ---------


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


# Admins killed with -9 at every step: one with the same client_id finishes, or any admin ends the pause.


PARTITIONS, MESSAGES, TARGET = 3, 12, 4

AGAIN = Counter({(p, o): 1 for p in range(PARTITIONS) for o in range(TARGET, MESSAGES)})

#: (record before which it dies, CPs in which the group is paused then, partitions that have moved)
STEPS = [("pause 2", 1, 0), ("claim 1", 3, 0), ("claim 3", 3, 0), ("move 1", 3, 0), ("move 2", 3, 1), ("end 1", 3, 3)]


def start_killed(group: Group, step: str, sent: str, expires_in: float = 60) -> subprocess.Popen[str]:
    arguments = {
        "bootstrap": group.bootstrap,
        "coordination": group.coordination,
        "group": group.group,
        "client_id": "ops",
        "hi": HI,
        "topic": group.data,
        "positions": [(partition, TARGET) for partition in range(PARTITIONS)],
        "before": step,
        "signal": sent,
        "expires_in": expires_in,
    }
    script = str(Path(__file__).with_name("killed_admin.py"))
    return subprocess.Popen([sys.executable, script, json.dumps(arguments)], stderr=subprocess.PIPE, text=True)


def kill_at(group: Group, step: str) -> None:
    with start_killed(group, step, "SIGKILL") as process:
        process.communicate(timeout=180)
        assert process.returncode == -9


def moved(group: Group) -> int:
    """Number of partitions at their target; no member works on the others."""
    stable = [x.stable for x in group.admin().progress(group.group) if x.topic == group.data]
    assert set(stable) <= {TARGET - 1, MESSAGES - 1}
    return stable.count(TARGET - 1)


@pytest.fixture
def working(group: Group) -> Group:
    group.fill(PARTITIONS, MESSAGES)
    for name in ("a", "b"):
        group.start(name)
    group.at_rest(group.everything())
    return group


@pytest.mark.parametrize(("step", "paused", "positions"), STEPS, ids=[step[0].replace(" ", "-") for step in STEPS])
def test_the_next_run_with_its_client_id_finishes(working: Group, step: str, paused: int, positions: int) -> None:
    kill_at(working, step)
    assert [x.client_id for x in working.admin().pauses(working.group)] == ["ops"] * paused
    if paused == PARTITIONS:
        assert moved(working) == positions
    with pytest.raises(GroupPausedError, match="'ops'"):
        working.admin("another").pause(working.group).start()
    with working.admin("ops").pause(working.group) as pause:
        pause.wait_released(10)
        # Leases of the dead admin need not go stale first.
        assert "ops" not in {lease.client_id for lease in working.admin().progress(working.group)}
        targets = {(working.data, partition): TARGET for partition in range(PARTITIONS)}
        assert sorted(move.after for move in pause.reposition(targets)) == [TARGET] * PARTITIONS
        assert moved(working) == PARTITIONS
    working.at_rest(working.everything() + AGAIN)
    assert all(member.is_alive() and not member.errors for member in working.threads)


@pytest.mark.parametrize(("step", "positions"), [("claim 2", 0), ("move 2", 1)], ids=["claim-2", "move-2"])
def test_anybody_can_end_its_pause_and_it_holds_nothing_any_more(working: Group, step: str, positions: int) -> None:
    kill_at(working, step)
    assert moved(working) == positions
    assert len(working.admin().resume(working.group)) == 3
    assert working.admin().pauses(working.group) == []
    assert "ops" not in {lease.client_id for lease in working.admin().progress(working.group)}
    wait_until(lambda: set(working.stable().values()) == {MESSAGES - 1})
    # Moved partitions were read again from there on; the others were not.
    extra = working.seen() - working.everything()
    assert sum(extra.values()) == positions * (MESSAGES - TARGET)
    assert all(offset >= TARGET and count == 1 for (_, offset), count in extra.items())


def test_an_admin_that_slept_through_its_pause_moves_nothing(working: Group) -> None:
    """SIGSTOP right before the first position is written; members resume; then it continues."""
    with start_killed(working, "move 1", "SIGSTOP", expires_in=1.0) as process:
        wait_until(lambda: os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT))
        working.publish(working.data, PARTITIONS, 3)
        working.messages += 3
        working.at_rest(working.everything())
        process.send_signal(signal.SIGCONT)
        _, complaint = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "AdminError: moving failed in its last step" in complaint
    assert set(working.stable().values()) == {working.messages - 1}
    assert working.seen() == working.everything()
