"""A group forked at a checkpoint, and two groups compared; on a cluster in memory, with workers that count."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Admin, AdminError, CheckpointPolicy, Marshal, Restore
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.admin.session import Asked, Session, caught_up
from kafka_marshal.checkpoints import CheckpointPiece, Folder, RestorePiece
from kafka_marshal.engine.groups.checkpoints.forks import Fork, of_whom
from kafka_marshal.errors import ConfigurationError, StateMissingError
from rationalizer import CommitEntry, Group, Record, encode, route_group
from rationalizer.limits import MAX_KEY_HASH
from tests.client.conftest import wait_until
from tests.client.counting import Ledger, counted
from tests.faults.stories import TOPIC, memory_cluster
from tests.fleet import Fleet, cut, started

LOG, PARTITIONS = "__marshal", 4
POLICY = CheckpointPolicy(every=None, drain=0.5, timeout=2.0)
Raise = Callable[[int], None]


class Worker:
    """A member of a group that counts in a thread."""

    def __init__(self, place: Place, group: str, name: str, policy: CheckpointPolicy) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.whole: list[Restore] = []
        self.ledger = Ledger(place.states, lambda what, **more: self.said.append((what, more)))
        self.ledger.restore = self._restore  # type: ignore[method-assign]
        self.marshal = Marshal.on_cluster(
            place.cluster.connect(name), group_id=group, client_id=name, heartbeat_interval=0.3
        )
        self.consumer = self.ledger.consumer(self.marshal, TOPIC, policy, session_timeout=0.6)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _restore(self, restore: Restore) -> None:
        self.whole.append(restore)
        Ledger.restore(self.ledger, restore)

    def _work(self) -> None:
        try:
            for message in self.consumer:
                self.ledger.handle(message)
        except BaseException as error:  # noqa: BLE001 - the test reads it
            self.error = error

    @property
    def whys(self) -> list[tuple[str, int]]:
        return sorted((more["why"], more["partition"]) for what, more in self.said if what == "restored")

    def leave(self) -> None:
        self.marshal.stop()
        self._thread.join(20)
        self.marshal.close()

    def die(self) -> None:
        """It is cut off as if it were killed."""
        self.marshal.terminate()
        self._thread.join(20)


class Place:
    """A log, a topic of four partitions, a folder of states, and workers of several groups."""

    def __init__(self, folder: Path) -> None:
        self.cluster: MemoryCluster = memory_cluster(PARTITIONS, 0)
        folder.mkdir()
        self.states = Folder(folder)
        self.workers: list[Worker] = []
        self.admin = Admin.on_cluster(lambda: self.cluster.connect("admin"), heartbeat_interval=0.3)

    def start(self, group: str, name: str, policy: CheckpointPolicy = POLICY) -> Worker:
        self.workers.append(Worker(self, group, name, policy))
        return self.workers[-1]

    def produce(self, count: int) -> None:
        for _ in range(count):
            for partition in range(PARTITIONS):
                self.cluster.broker.produce(TOPIC, partition, b"x")

    def append(self, record: Record, cp: int) -> int:
        return self.cluster.broker.produce(LOG, cp, encode(record))

    def group(self, name: str) -> Group | None:
        with caught_up(self.cluster.connect("look"), LOG, 10) as replica:
            return replica.worlds[route_group(name, len(replica.worlds))].group(name)

    def source(self, count: int = 20) -> tuple[Worker, int]:
        """A group that has counted so far, and its checkpoint."""
        worker = self.start("flights", "w1")
        self.produce(count)
        self.await_counted(worker, count)
        return worker, self.admin.checkpoint("flights").id

    def await_counted(self, worker: Worker, count: int, partitions: int = PARTITIONS) -> None:
        """It has counted these messages of each partition, each once."""
        wanted = Counter({(p, offset): 1 for p in range(partitions) for offset in range(count)})
        wait_until(lambda: worker.error or counted([worker.ledger]) == wanted, 30, "counts")
        assert worker.error is None

    def close(self) -> None:
        for worker in self.workers:
            worker.leave()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "states")
    yield made
    made.close()


def test_a_fork_counts_on_from_the_checkpoint_and_the_group_continues(place: Place) -> None:
    source, checkpoint = place.source()
    place.produce(5)
    place.await_counted(source, 25)
    planned = place.admin.fork("flights", checkpoint, "canary", dry_run=True)
    assert place.group("canary") is None
    assert [(x.partition, x.position, x.waiting, x.gone) for x in planned.partitions] == [
        (partition, 20, 5, 0) for partition in range(PARTITIONS)
    ]
    forked = place.admin.fork("flights", checkpoint, "canary")
    assert (forked.partitions, forked.checkpoint) == (planned.partitions, checkpoint)
    assert {x.id: x.kind for x in place.admin.checkpoints("flights")}[checkpoint] == "pinned"
    assert {x.id: x.kind for x in place.admin.checkpoints("canary")}[forked.begins or 0] == "pinned"
    canary = place.start("canary", "c1")
    place.await_counted(canary, 25)
    assert canary.whys == [("forked", partition) for partition in range(PARTITIONS)]
    assert {piece.group_id for restore in canary.whole for piece in restore.pieces} == {"flights"}
    assert sorted(more["offset"] for what, more in canary.said if what == "handled") == sorted([*range(20, 25)] * 4)
    place.produce(5)
    place.await_counted(canary, 30)
    place.await_counted(source, 30)
    assert source.whys == [("joined", partition) for partition in range(PARTITIONS)], "it was not touched"


def test_a_killed_fork_begins_again_until_it_has_saved_its_own_states(place: Place, tmp_path: Path) -> None:
    source, checkpoint = place.source()
    place.admin.fork("flights", checkpoint, "canary")
    first = place.start("canary", "c1")
    place.produce(3)
    place.await_counted(first, 23)
    first.die()
    second = place.start("canary", "c2")
    place.await_counted(second, 23)
    assert {why for why, _ in second.whys} == {"forked"}
    place.admin.checkpoint("canary")
    assert len(list((tmp_path / "states" / "flights" / TOPIC / "0").iterdir())) >= 1, "the group's are still there"
    second.die()
    third = place.start("canary", "c3")
    place.await_counted(third, 23)
    assert {why for why, _ in third.whys} <= {"lost", "joined"}
    assert {piece.group_id for restore in third.whole for piece in restore.pieces} == {"canary"}
    place.await_counted(source, 23)


def test_what_was_not_worked_on_is_saved_at_the_first_checkpoint_too(place: Place) -> None:
    source, checkpoint = place.source()
    place.admin.fork("flights", checkpoint, "canary")
    canary = place.start("canary", "c1")
    place.await_counted(canary, 20)
    place.admin.checkpoint("canary")  # nothing was done since
    assert {more["partitions"][0] for what, more in canary.said if what == "saved"} <= set(range(PARTITIONS))
    assert sum(len(more["partitions"]) for what, more in canary.said if what == "saved") == PARTITIONS
    canary.leave()
    with pytest.raises(AdminError, match="has positions already"):  # equal ones, but the states are its own by now
        place.admin.fork("flights", checkpoint, "canary")
    place.admin.checkpoint("flights")
    place.admin.retire("flights", checkpoint)
    place.produce(2)
    later = place.start("canary", "c2")
    place.await_counted(later, 22)
    assert {piece.group_id for restore in later.whole for piece in restore.pieces} == {"canary"}
    place.await_counted(source, 22)


def test_a_fork_goes_back_to_where_it_began(place: Place) -> None:
    _, checkpoint = place.source()
    begins = place.admin.fork("flights", checkpoint, "canary").begins
    canary = place.start("canary", "c1")
    place.produce(4)
    place.await_counted(canary, 24)
    place.admin.checkpoint("canary")
    assert begins is not None
    place.admin.rollback("canary", begins)
    wait_until(lambda: len(canary.whys) == 2 * PARTITIONS)
    place.await_counted(canary, 24)
    assert canary.whys == sorted(("forked", partition) for partition in [*range(PARTITIONS)] * 2)


def test_some_partitions(place: Place) -> None:
    _, checkpoint = place.source()
    forked = place.admin.fork("flights", checkpoint, "canary", [(TOPIC, 0), (TOPIC, 2)])
    assert [each.partition for each in forked.partitions] == [0, 2]
    canary = place.group("canary")
    assert canary is not None
    assert [(partition, kept.progress.stable) for _, partition, kept in canary.all_progress()] == [(0, 19), (2, 19)]
    with pytest.raises(AdminError, match=r"'flights' has no position on .* \[9\]. Nothing was changed"):
        place.admin.fork("flights", checkpoint, "other", [(TOPIC, 9)])


def test_what_is_refused(place: Place) -> None:
    worker, checkpoint = place.source()
    admin = place.admin
    with pytest.raises(AdminError, match="does not know a group 'nobody'"):
        admin.fork("nobody", checkpoint, "canary")
    with pytest.raises(ConfigurationError, match="is the group itself"):
        admin.fork("flights", checkpoint, "flights")
    newest = admin.checkpoint("flights").id
    admin.retire("flights", checkpoint)
    with pytest.raises(AdminError, match=f"keeps no checkpoint {checkpoint}"):
        admin.fork("flights", checkpoint, "canary")
    assert place.group("canary") is None
    place.produce(5)
    place.await_counted(worker, 25)
    place.cluster.broker.delete_records(TOPIC, 1, 22)
    with pytest.raises(AdminError, match=r"retention has deleted messages .*\[1\]"):
        admin.fork("flights", newest, "canary")
    admin.fork("flights", newest, "canary", force=True)
    with pytest.raises(AdminError, match="has saved no states yet: it was forked"):
        admin.fork("canary", admin.checkpoints("canary")[-1].id, "second")
    canary = place.start("canary", "c1")
    place.produce(1)
    wait_until(lambda: len(canary.whys) == PARTITIONS)
    with pytest.raises(AdminError, match=r"may be at work|is alive"):
        admin.fork("flights", newest, "canary", force=True, timeout=0.2)
    admin.checkpoint("canary")
    canary.leave()
    with pytest.raises(AdminError, match=r"'canary' has positions already .*forget-group canary"):
        admin.fork("flights", newest, "canary", force=True)
    admin.forget("canary")
    assert admin.fork("flights", newest, "canary", force=True).begins is not None
    assert worker.error is None


def test_a_state_that_is_missing_is_named_with_the_group_to_fork_again(place: Place, tmp_path: Path) -> None:
    _, checkpoint = place.source()
    place.admin.fork("flights", checkpoint, "canary")
    for file in (tmp_path / "states" / "flights" / TOPIC / "3").iterdir():
        file.unlink()
    canary = place.start("canary", "c1")
    wait_until(lambda: canary.error is not None)
    assert isinstance(canary.error, StateMissingError)
    assert "fork flights again: kafka-marshal checkpoints flights" in str(canary.error)
    assert "rollback" not in str(canary.error)


class Killed(BaseException):
    """The admin ends here."""


@pytest.mark.parametrize("step", range(19))
def test_killed_between_any_two_records_it_is_finished_by_a_second_call(
    place: Place, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, checkpoint = place.source(6)
    ask, sent = Session.ask, [0]

    def asked(session: Session, *records: tuple[int, Record]) -> list[Asked]:
        if session.group_id == "canary" and sent[0] >= step:
            raise Killed
        sent[0] += session.group_id == "canary"
        return ask(session, *records)

    monkeypatch.setattr(Session, "ask", asked)
    monkeypatch.setattr("kafka_marshal.admin.forking._SESSION_MS", 1_000)
    with pytest.raises(BaseException) as raised:
        place.admin.fork("flights", checkpoint, "canary")
    assert isinstance(raised.value, Killed | AdminError)
    monkeypatch.undo()
    place.admin.resume("canary")
    place.admin.fork("flights", checkpoint, "canary", timeout=30)
    canary = place.start("canary", "c1")
    place.produce(2)
    place.await_counted(canary, 8)
    place.await_counted(source, 8)


def test_shares_of_keys_ranges_marks_and_starts_are_carried_over(place: Place) -> None:
    half, mark = MAX_KEY_HASH // 2, 2**62 + 7
    fleet = Fleet("keys", 1, place.append)
    fleet.configure(accept_range_fetch=(TOPIC,))
    first = fleet.begin("w1", 0)
    generation = fleet.join("w1", {TOPIC: PARTITIONS}, session=600_000, share=True)
    fleet.commit("w1", generation, *started(TOPIC, 0, 1, 2, 3, through=4))
    one = fleet.begin("w1", first)
    fleet.answer("w1", generation, one, cut(TOPIC, 0, 9), CommitEntry(TOPIC, 1, ranges=((7, 8), (mark, mark))))
    two = fleet.begin("w1", one)
    fleet.answer("w1", generation, two, cut(TOPIC, 0, 15, half + 1))
    begins = place.admin.fork("keys", two, "canary").begins
    canary, keys = place.group("canary"), place.group("keys")
    assert canary is not None
    assert keys is not None
    assert canary.settings == keys.settings
    for partition in range(PARTITIONS):
        here, there = canary.kept(TOPIC, partition), keys.kept(TOPIC, partition)
        assert here is not None
        assert there is not None
        assert here.initial == there.initial == 4
        assert here.progress.done_through == there.progress.done_through
        assert here.progress.ranges == there.progress.ranges
        assert canary.states((TOPIC, partition)) == [(0, MAX_KEY_HASH, begins)]
        states, groups = of_whom(here.metadata, canary.states((TOPIC, partition)))
        assert list(states) == keys.states((TOPIC, partition))
        assert groups == ((0, MAX_KEY_HASH, "keys"),)
    assert canary.states((TOPIC, 0)) != keys.states((TOPIC, 0)) == [(0, half, one), (half + 1, MAX_KEY_HASH, two)]


def test_a_piece_of_both_groups_states_is_loaded_from_both(tmp_path: Path) -> None:
    half = MAX_KEY_HASH // 2
    mark = Fork(50, "flights", 19, ((0, half, 17), (half + 1, MAX_KEY_HASH, 19)))
    assert Fork.read(mark.text) == mark
    for wrong in ("mine", mark.text[:-1], mark.text.replace("[0,", "[1,"), mark.text.replace("19", '"19"'), None):
        assert Fork.read(wrong) is None
    quarter = half // 2
    states, groups = of_whom(mark.text, [(0, quarter, 60), (quarter + 1, MAX_KEY_HASH, 50)])
    assert states == ((0, quarter, 60), (quarter + 1, half, 17), (half + 1, MAX_KEY_HASH, 19))
    assert groups == ((quarter + 1, MAX_KEY_HASH, "flights"),)
    assert of_whom(mark.text, [(0, MAX_KEY_HASH, 60)]) == (((0, MAX_KEY_HASH, 60),), ())
    at = (7, 10, ())
    through = ((0, MAX_KEY_HASH, 9),)
    mixed = RestorePiece.of("canary", (TOPIC, 0), (0, MAX_KEY_HASH), *at, states, groups, through, -1)
    groups = ((half + 1, MAX_KEY_HASH, "flights"),)
    whole = RestorePiece.of(
        "canary",
        (TOPIC, 0),
        (half + 1, MAX_KEY_HASH),
        *at,
        states[2:],
        ((half + 1, MAX_KEY_HASH, "flights"),),
        through,
        -1,
    )
    assert (mixed.group_id, whole.group_id) == ("canary", "flights")
    store = Folder(tmp_path)
    saved = [("canary", 60, 0, quarter), ("flights", 17, 0, half), ("flights", 19, half + 1, MAX_KEY_HASH)]
    for group, checkpoint, lo, hi in saved:
        store.save(checkpoint, CheckpointPiece(TOPIC, 0, lo, hi, group_id=group), json.dumps([group, lo]).encode())
    assert [(part.lo, json.loads(part.state)) for part in store.load_parts(mixed)] == [
        (0, ["canary", 0]),
        (quarter + 1, ["flights", 0]),
        (half + 1, ["flights", half + 1]),
    ]
    assert json.loads(store.load(whole)) == ["flights", half + 1]


def test_two_groups_compared(place: Place) -> None:
    source, checkpoint = place.source()
    place.admin.fork("flights", checkpoint, "canary")

    def differs(one: RestorePiece, two: RestorePiece) -> object:
        left, right = place.states.load(one), place.states.load(two)
        return left == right or f"{len(json.loads(left))} and {len(json.loads(right))}"

    found = place.admin.compare("flights", "canary", differs)
    assert [(x.partition, x.position, x.other, x.messages, x.verdict, x.states) for x in found] == [
        (partition, 20, 20, 0, "equal", "") for partition in range(PARTITIONS)
    ]
    place.produce(5)
    place.await_counted(source, 25)
    place.admin.checkpoint("flights")
    found = place.admin.compare("flights", "canary", differs)
    assert {(x.position, x.other, x.messages, x.verdict, x.states) for x in found} == {(25, 20, 5, "behind", None)}
    assert {x.verdict for x in place.admin.compare("canary", "flights")} == {"ahead"}
    canary = place.start("canary", "c1")
    place.await_counted(canary, 25)
    with canary.ledger.lock:
        canary.ledger.counts[2]["new", 1] = 1  # this release counts something else
    place.admin.checkpoint("canary")
    found = place.admin.compare("flights", "canary", differs)
    assert [(x.verdict, x.states) for x in found] == [("equal", "")] * 2 + [("equal", "25 and 26")] + [("equal", "")]
    assert place.admin.compare("flights", "canary", lambda *_: False)[0].states == "they differ"
    with pytest.raises(AdminError, match="does not know a group"):
        place.admin.compare("flights", "nobody")
