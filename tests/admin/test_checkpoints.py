"""Checkpoints from outside: taken, kept, gone back to. The members are raw records on a log in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Admin, CheckpointEndedError, Restore
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.adapters.memory.broker import AppendFate
from kafka_marshal.admin.session import caught_up
from kafka_marshal.checkpoints import RestorePiece
from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS
from kafka_marshal.errors import AdminError, ConfigurationError, KafkaUnavailableError, StaleEpochError, WrongKindError
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.sinks import SqliteSink
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    Group,
    Record,
    Rollback,
    SettleOffsets,
    Upgrade,
    decode,
    encode,
)
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.marker import marker
from rationalizer.wire.wellformed import REACHED_AND_LEAVES, REFUSED
from tests.fleet import Fleet, cut, started

TOPIC, DATA, GROUP = "__marshal", "flights", "delays"
LONG = 600_000


class Place:
    """A log of one partition, a data topic of two with 20 messages each, and a group of raw members."""

    def __init__(self, level: int = SUPPORTED_LEVEL) -> None:
        self.cluster = MemoryCluster()
        self.cluster.create_topic(TOPIC, 1, 1, required_settings(1), 10)
        self.append(marker("m", 1))
        self.append(Upgrade("m", "m", "m", level))
        self.cluster.broker.create_topic(DATA, 2)
        for partition in range(2):
            for number in range(20):
                self.cluster.broker.produce(DATA, partition, str(number).encode())
        self.fleet = Fleet(GROUP, 1, self.append)
        self.admin = Admin.on_cluster(lambda: self.cluster.connect("admin"), client_id="ann")

    def append(self, record: Record, cp: int = 0) -> int:
        return self.cluster.broker.produce(TOPIC, cp, encode(record))

    def group(self) -> Group:
        with caught_up(self.cluster.connect("look"), TOPIC, 10) as replica:
            group = replica.worlds[0].group(GROUP)
            assert group is not None
            return group

    def two_members(self) -> int:
        """w1 has partition 0, w2 partition 1; the first checkpoint is there. Returns the generation."""
        self.fleet.configure()
        first = self.fleet.begin("w1", 0)
        generation = self.fleet.join("w1", {DATA: 2}, session=LONG)
        self.fleet.commit("w1", generation, *started(DATA, 0, 1))
        generation = self.fleet.join("w2", {DATA: 2}, session=LONG)
        barrier = self.fleet.begin("w1", first, keep=0)
        return self.fleet.answer("w1", generation, barrier, cut(DATA, 0, 4), cut(DATA, 1, 4))

    def answers(self, *answers: Callable[[int, int], object]) -> threading.Thread:
        """As soon as a barrier is open, each of these is called with (generation, its id)."""

        def run() -> None:
            until = time.monotonic() + 10
            while (group := self.group()).checkpoints is None or group.checkpoints.barrier is None:
                assert time.monotonic() < until
                time.sleep(0.01)
            for answer in answers:
                answer(group.generation, group.checkpoints.barrier.id)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def run_out(self, generation: int) -> None:
        """The open barrier is over, and a heartbeat closes it."""
        while (found := self.group().checkpoints) is not None and found.barrier is not None:
            time.sleep(0.05)
            self.fleet.beat("w1", generation)

    def taken(self, through: int) -> int:
        """A complete checkpoint in which both partitions are done through this offset."""
        group = self.group()
        assert group.checkpoints is not None
        barrier = self.fleet.begin("w1", group.checkpoints.newest, keep=16)
        self.fleet.answer("w1", group.generation, barrier, cut(DATA, 0, through))
        self.fleet.answer("w2", group.generation, barrier, cut(DATA, 1, through))
        return barrier


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def two(place: Place) -> int:
    return place.two_members()


def test_a_checkpoint_is_taken_and_pinned(place: Place, two: int) -> None:
    fleet = place.fleet
    answering = place.answers(
        lambda generation, barrier: fleet.answer("w1", generation, barrier, cut(DATA, 0, 19)),
        lambda generation, barrier: fleet.answer("w2", generation, barrier, cut(DATA, 1, 19)),
    )
    taken = place.admin.checkpoint(GROUP, pin=True)
    answering.join()
    assert (taken.members, taken.owners, taken.older, taken.pinned) == (2, 2, (), True)
    kept = place.admin.checkpoints(GROUP)
    assert [each.kind for each in kept] == ["pinned", "pinned"]
    assert (kept[-1].id, kept[-1].is_newest) == (taken.id, True)
    assert kept[-1].oldest is not None
    assert kept[-1].oldest.cut == taken.id
    place.admin.pin(GROUP, taken.id)  # once more: nothing is appended
    with pytest.raises(AdminError, match="it is the newest"):
        place.admin.retire(GROUP, taken.id)
    place.admin.retire(GROUP, kept[0].id)
    with pytest.raises(AdminError, match="keeps no checkpoint"):
        place.admin.retire(GROUP, kept[0].id)
    with pytest.raises(AdminError, match="retired, undone, or never complete"):
        place.admin.pin(GROUP, kept[0].id)


def test_pieces_that_are_older_in_it_are_named(place: Place, two: int) -> None:
    answering = place.answers(
        lambda generation, barrier: place.fleet.answer("w1", generation, barrier, cut(DATA, 0, 19)),
        lambda *_: place.run_out(two),
    )
    taken = place.admin.checkpoint(GROUP, timeout=0.2)
    answering.join()
    ((older),) = taken.older
    assert (older.partition, older.client, older.why) == (1, "w2", "not answered")
    assert older.cut is not None
    assert older.cut < taken.id
    assert (taken.members, taken.owners) == (1, 2)
    # It answers, and leaves out a piece with messages waiting: in flight for too long, or not saved.
    answering = place.answers(
        lambda generation, barrier: place.fleet.answer("w1", generation, barrier),
        lambda generation, barrier: place.fleet.answer("w2", generation, barrier),
    )
    (older,) = place.admin.checkpoint(GROUP).older
    answering.join()
    assert (older.partition, older.client) == (1, "w2")
    assert "in flight" in older.why


@pytest.mark.parametrize("refuses", [True, False])
def test_one_that_ends_names_the_members(place: Place, two: int, refuses: bool) -> None:
    fleet = place.fleet
    answering = place.answers(
        *(
            (
                lambda generation, barrier: fleet.answer("w1", generation, barrier, answer=REFUSED),
                lambda generation, barrier: fleet.answer("w2", generation, barrier, answer=REFUSED),
            )
            if refuses
            else (lambda *_: place.run_out(two),)
        )
    )
    with pytest.raises(CheckpointEndedError, match="Nothing moved") as ended:
        place.admin.checkpoint(GROUP, timeout=0.2)
    answering.join()
    assert ended.value.refused == (("w1", "w2") if refuses else ())
    assert ended.value.waits_for == (() if refuses else ("w1", "w2"))


def test_what_takes_none_is_refused_by_name(place: Place) -> None:
    place.append(ClaimingPartition("i", "c", "claims", DATA, 0, 3_000))
    with pytest.raises(WrongKindError):
        place.admin.checkpoint("claims")
    for call in (
        place.admin.checkpoint,
        place.admin.checkpoints,
        place.admin.end_checkpoints,
        lambda group: place.admin.pin(group, 7),
        lambda group: place.admin.retire(group, 7),
        lambda group: place.admin.rollback(group, 7),
        place.admin.start_checkpoints,
    ):
        with pytest.raises(AdminError, match="does not know a group"):
            call("nobody")
    place.fleet.configure()
    with pytest.raises(AdminError, match="--start"):
        place.admin.checkpoint(GROUP)
    for wrong in ({"timeout": 0.01}, {"timeout": 4_000}, {"pin": 1}):
        with pytest.raises(ConfigurationError):
            place.admin.checkpoint(GROUP, **wrong)
    for to in ("newest", -1, 1.5, datetime(2026, 1, 1)):  # noqa: DTZ001 - one without a zone
        with pytest.raises(ConfigurationError):
            place.admin.rollback(GROUP, to)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="stay_paused"):
        place.admin.rollback(GROUP, 7, undo=lambda restore: None)


# -- going back ----------------------------------------------------------------------------------------------------


def test_a_rollback_and_its_dry_run(place: Place, two: int) -> None:
    good, bad = place.taken(9), place.taken(14)
    planned = place.admin.rollback(GROUP, good, dry_run=True)
    assert (planned.to, planned.generation, planned.dropped) == (good, None, (bad,))
    assert [(x.before, x.after, x.messages, x.gone) for x in planned.partitions] == [(15, 10, 5, 0)] * 2
    done = place.admin.rollback(GROUP, good)
    group = place.group()
    assert group.checkpoints is not None
    assert (done.generation, group.checkpoints.newest) == (group.generation, good)
    kinds = {each.id: each.kind for each in place.admin.checkpoints(GROUP)}
    assert kinds[good] == "pinned"
    assert bad not in kinds
    kept = group.kept(DATA, 1)
    assert kept is not None
    assert kept.progress.stable == 9
    again = place.admin.rollback(GROUP, good)
    assert again.generation is not None and done.generation is not None
    assert again.generation > done.generation
    assert sum(each.messages for each in again.partitions) == 0


def test_the_targets_of_a_rollback(place: Place, two: int) -> None:
    good = place.taken(9)
    between = datetime.now(UTC)
    while datetime.now(UTC) - between < timedelta(milliseconds=2):  # log time is in milliseconds
        time.sleep(0.001)
    place.taken(14)
    assert place.admin.rollback(GROUP, between, dry_run=True).to == good
    first = place.admin.checkpoints(GROUP)[0].id
    initial = place.admin.rollback(GROUP, "initial", dry_run=True)
    assert (initial.to, [each.after for each in initial.partitions]) == (first, [0, 0])
    with pytest.raises(AdminError, match="keeps no checkpoint that was complete by"):
        place.admin.rollback(GROUP, between - timedelta(days=1))
    place.admin.retire(GROUP, first)
    with pytest.raises(AdminError, match="does not keep its first checkpoint"):
        place.admin.rollback(GROUP, "initial")


def test_what_retention_took_is_refused_without_force(place: Place, two: int) -> None:
    good = place.taken(9)
    place.taken(14)
    place.cluster.broker.delete_records(DATA, 0, 12)
    planned = place.admin.rollback(GROUP, good, dry_run=True)
    assert [(x.messages, x.gone) for x in planned.partitions] == [(3, 2), (5, 0)]
    with pytest.raises(AdminError, match=r"flights \[0\]: 2 offsets.*force"):
        place.admin.rollback(GROUP, good)
    assert place.admin.rollback(GROUP, good, force=True).generation is not None


def test_a_generation_that_moved_on_is_tried_again_but_not_another_rollback(place: Place, two: int) -> None:
    good = place.taken(9)
    newest = place.taken(14)
    fleet = place.fleet
    before: list[Callable[[], object]] = [lambda: fleet.join("w3", {DATA: 2}, session=LONG)]

    # A member joins after the admin has looked, and before its record.
    admin = _with_a_record_before(place, Rollback, before)
    assert admin.rollback(GROUP, newest).generation is not None
    generation = place.group().generation

    def other() -> None:
        place.append(Rollback("o", "olga", GROUP, generation, good))

    admin = _with_a_record_before(place, Rollback, [other])
    with pytest.raises(AdminError, match="'olga' has put the group back"):
        admin.rollback(GROUP, newest)
    assert place.group().generation > generation


def _with_a_record_before(place: Place, kind: type[Record], calls: list[Callable[[], object]]) -> Admin:
    """An admin before whose first record of this kind something else happens."""

    def fate(client: str, topic: str, partition: int, value: bytes) -> AppendFate:
        if calls and client == "admin" and isinstance(decode(value, SUPPORTED_LEVEL), kind):
            calls.pop()()
        return AppendFate.WRITTEN if place.cluster.broker.reachable("admin") else AppendFate.LOST

    place.cluster.broker.faults.append = fate
    return place.admin


def test_a_log_that_is_away_leaves_it_unknown(place: Place, two: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kafka_marshal.admin.session.ANSWER_TIMEOUT_S", 0.5)
    good = place.taken(9)
    place.admin.pin(GROUP, good)
    admin = _with_a_record_before(place, Rollback, [lambda: place.cluster.broker.set_reachable("admin", False)])
    with pytest.raises(KafkaUnavailableError, match=r"unknown whether .* checkpoints delays"):
        admin.rollback(GROUP, good)


def test_undo_a_deploy(place: Place, two: int) -> None:
    good = place.taken(9)
    place.taken(14)
    told: list[Restore] = []

    def leave() -> None:
        """Both members see the pause and leave at a barrier."""
        until = time.monotonic() + 10
        while not _paused(place):
            assert time.monotonic() < until
            time.sleep(0.01)
        group = place.group()
        assert group.checkpoints is not None
        barrier = place.fleet.begin("w1", group.checkpoints.newest, keep=0)
        for client in ("w1", "w2"):
            place.fleet.answer(client, group.generation, barrier, answer=REACHED_AND_LEAVES)

    leaving = threading.Thread(target=leave)
    leaving.start()
    done = place.admin.rollback(GROUP, good, stay_paused=60, undo=told.append)
    leaving.join()
    assert done.paused_by == "ann"
    assert _paused(place)
    (restore,) = told
    assert (restore.checkpoint, restore.why) == (good, "rollback")
    assert [(x.epoch, x.position, x.states[0][2]) for x in restore.pieces] == [(done.generation, 10, good)] * 2
    assert restore.positions == {(DATA, 0): 10, (DATA, 1): 10}
    place.admin.resume(GROUP)
    assert not _paused(place)


def test_the_restore_of_a_rollback_rewinds_a_sink(place: Place, tmp_path: Path) -> None:
    """As `rollback --undo` does: rows of the new release go, and its writers are refused from then on."""
    place.fleet.configure()
    generation = place.fleet.join("w1", {DATA: 2}, session=100)
    place.fleet.commit("w1", generation, *started(DATA, 0, 1))
    place.fleet.leave("w1", generation)
    first = place.admin.start_checkpoints(GROUP)
    sink = SqliteSink(tmp_path / "results.db")
    with sink.transaction(GROUP, [(DATA, 0, generation, 4)], kind="coordinated") as tx:
        tx.execute("CREATE TABLE results (place INTEGER)")
        tx.executemany("INSERT INTO results VALUES (?)", [(number,) for number in range(5)])

    def undo(tx: Any, piece: RestorePiece, position: int, ranges: object) -> None:
        if piece.partition == 0:
            tx.execute("DELETE FROM results WHERE place >= ?", (position,))

    done = place.admin.rollback(GROUP, first, stay_paused=60, undo=lambda restore: sink.restore(restore, undo))
    assert done.generation is not None
    assert done.generation > generation
    with (
        pytest.raises(StaleEpochError),
        sink.transaction(GROUP, [(DATA, 0, generation, 5)], kind="coordinated") as tx,
    ):
        pass
    with sink.transaction(GROUP, [(DATA, 0, done.generation + 1, 0)], kind="coordinated") as tx:
        assert tx.execute("SELECT count(*) FROM results").fetchone() == (0,)


def test_where_undo_fails_the_group_stays_paused_and_the_same_admin_carries_on(place: Place) -> None:
    place.fleet.configure()
    first = place.fleet.begin("w1", 0)

    def fail(restore: Restore) -> None:
        raise RuntimeError("the database is away")

    with pytest.raises(RuntimeError) as failed:
        place.admin.rollback(GROUP, first, stay_paused=60, undo=fail)
    assert "stays paused by 'ann'" in failed.value.__notes__[0]
    assert _paused(place)
    again = Admin.on_cluster(lambda: place.cluster.connect("admin"), client_id="ann")
    assert again.rollback(GROUP, first, stay_paused=60, undo=lambda restore: None).paused_by == "ann"
    assert _paused(place)


def _paused(place: Place) -> bool:
    with caught_up(place.cluster.connect("look"), TOPIC, 10) as replica:
        return replica.worlds[0].pause(GROUP) is not None


# -- the first checkpoint, and the end --------------------------------------------------------------------------------


def test_a_group_with_progress_begins_and_ends(place: Place) -> None:
    place.fleet.configure()
    generation = place.fleet.join("w1", {DATA: 2}, session=100)
    place.fleet.commit("w1", generation, *started(DATA, 0, 1, through=6))
    first = place.admin.start_checkpoints(GROUP, hold=True, keep=4)  # it dies, and is buried
    group = place.group()
    assert group.checkpoints is not None
    assert (group.checkpoints.newest, group.checkpoints.keep, group.checkpoints.hold) == (first, 4, True)
    assert not group.members
    assert not _paused(place)
    with pytest.raises(AdminError, match="takes checkpoints already"):
        place.admin.start_checkpoints(GROUP)
    place.admin.end_checkpoints(GROUP)
    group = place.group()
    assert group.checkpoints is None
    kept = group.kept(DATA, 0)
    assert kept is not None
    assert kept.progress.stable == 6


def test_a_topic_below_the_level_is_refused() -> None:
    place = Place(level=2)
    place.fleet.configure()
    generation = place.fleet.join("w1", {DATA: 2}, session=100)
    place.fleet.leave("w1", generation)
    log = place.cluster.broker.log(TOPIC, 0)
    assert log is not None
    before = log.end
    with pytest.raises(AdminError, match="kafka-marshal upgrade"):
        place.admin.start_checkpoints(GROUP)
    assert log.end == before, "nobody was paused for that"
    with pytest.raises(AdminError, match="kafka-marshal upgrade"):
        place.admin.checkpoint(GROUP)
    assert place.admin.upgrade() == [0]
    assert place.admin.start_checkpoints(GROUP)


def test_a_group_with_open_messages_is_refused(place: Place) -> None:
    place.fleet.configure()
    generation = place.fleet.join("w1", {DATA: 2}, session=100)
    place.fleet.commit("w1", generation, *started(DATA, 0, 1))
    place.append(SettleOffsets(*place.fleet.ids("w1"), generation, 99, DATA, 1, parked=((5, 8, 5, "Bad"),)))
    with pytest.raises(AdminError, match=r"flights \[1\] that wait .* kafka-marshal discard delays --all"):
        place.admin.start_checkpoints(GROUP)
    assert place.group().checkpoints is None
    assert not _paused(place)
    place.admin.discard(GROUP, "all")
    place.fleet.leave("w1", generation)
    assert place.admin.start_checkpoints(GROUP)


def test_a_group_that_processes_in_transactions_is_refused(place: Place) -> None:
    place.fleet.configure()
    generation = place.fleet.join("w1", {DATA: 2}, session=100)
    place.fleet.commit("w1", generation, *started(DATA, 0, 1))
    place.fleet.commit("w1", generation, CommitEntry(DATA, 1, ranges=((KAFKA_COUNTS, KAFKA_COUNTS),)))
    with pytest.raises(AdminError, match="release-group delays --partition flights:1=0"):
        place.admin.start_checkpoints(GROUP)
    assert place.group().checkpoints is None
    assert not _paused(place)
