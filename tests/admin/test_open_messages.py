"""Open messages from outside: seen, redriven, discarded, set aside. The members are raw records on a log in memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from kafka_marshal import Admin, Batches, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.adapters.memory.broker import AppendFate
from kafka_marshal.admin import Move, conversion, open_messages, repositioning
from kafka_marshal.admin.open_messages import OpenMessage, Settled
from kafka_marshal.admin.positions import Keep
from kafka_marshal.admin.session import Session, caught_up, never
from kafka_marshal.admin.transfer import Open, planned_export
from kafka_marshal.errors import AdminError, ConfigurationError, KafkaUnavailableError
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.node.jobs import progress_of_all
from kafka_marshal.observe.holes import read_at
from kafka_marshal.ports import KafkaGroup
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    CommitEntry,
    Heartbeat,
    Progress,
    Record,
    ReleasingPartition,
    SettleOffsets,
    SettlingMessages,
    Upgrade,
    decode,
    encode,
    key_hash,
    route_group,
    route_lease,
)
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.marker import marker
from tests.broker.helpers import eventually
from tests.fleet import Fleet

TOPIC, DATA, GROUP = "__marshal", "orders", "delays"
CPS, MESSAGES = 2, 20
#: Parked: offset → reason. One waits for its third try.
PARKED = {3: "ValueError", 5: "KeyError", 9: "ValueError", 11: "ValueError"}
WAITING = 7

Kind = str


def key_of(offset: int) -> bytes:
    return b"k%d" % (offset % 5)


class Place:
    """A log of two partitions, a data topic of one, and open messages that a raw member has left."""

    def __init__(self, kind: Kind, *, key: Callable[[int], bytes | None] = key_of) -> None:
        self.kind = kind
        self.cluster = MemoryCluster()
        self.cluster.create_topic(TOPIC, CPS, 1, required_settings(1), 10)
        for cp in range(CPS):
            self.append(marker("m", CPS), cp)
            self.append(Upgrade("m", "m", "m", SUPPORTED_LEVEL), cp)
        self.cluster.broker.create_topic(DATA, 1)
        for offset in range(MESSAGES):
            self.cluster.broker.produce(DATA, 0, b"value %d" % offset, key=key_of(offset))
        self.cp = route_lease(DATA, 0, CPS) if kind == "claimed" else route_group(GROUP, CPS)
        self.fleet = Fleet(GROUP, CPS, self.append)
        self.ids = ("w1/1", "w1", GROUP)
        self.generation = 0
        if kind == "claimed":
            self.epoch = self.append(ClaimingPartition(*self.ids, DATA, 0, 60_000), self.cp)
        else:
            self.fleet.configure()
            self.generation = self.fleet.join("w1", {DATA: 1}, session=60_000)
        self.park(PARKED)
        self.settle(opened=((WAITING, WAITING, self.hash_of(WAITING), 2),))
        if kind == "claimed":
            self.append(Heartbeat(*self.ids, DATA, 0, self.epoch, MESSAGES - 1), self.cp)
        else:
            self.fleet.commit("w1", self.generation, CommitEntry(DATA, 0, through=MESSAGES - 1))
        self.admin = Admin.on_cluster(lambda: self.cluster.connect("admin"), client_id="ann")

    def append(self, record: Record, cp: int = 0) -> int:
        return self.cluster.broker.produce(TOPIC, cp, encode(record))

    def hash_of(self, offset: int) -> int:
        return key_hash(key_of(offset), offset)

    def park(self, reasons: dict[int, str]) -> int:
        """The member parks these after five tries."""
        return self.settle(parked=tuple((at, self.hash_of(at), 5, reason) for at, reason in reasons.items()))

    def settle(self, opened: Any = (), parked: Any = (), done: Any = ()) -> int:
        """The member settles."""
        if self.kind == "claimed":
            record: Record = SettlingMessages(*self.ids, DATA, 0, self.epoch, 2**40, done, opened, parked)
        else:
            member = self.fleet.ids("w1")
            record = SettleOffsets(*member, self.generation, 2**40, DATA, 0, done, opened, parked)
        return self.append(record, self.cp)

    def progress(self) -> Progress:
        with caught_up(self.cluster.connect("look"), TOPIC, 10) as replica:
            world = replica.worlds[self.cp]
            if self.kind == "claimed":
                lease = world.lease(GROUP, DATA, 0)
                assert lease is not None
                return lease.progress.copy()
            group = world.group(GROUP)
            assert group is not None
            kept = group.kept(DATA, 0)
            assert kept is not None
            return kept.progress.copy()

    def holes(self) -> dict[int, str | None]:
        """Offset → why it is parked; None: it waits."""
        return {hole.first: hole.reason for hole in self.progress().open}

    def written(self) -> Iterator[SettlingMessages | SettleOffsets]:
        """What operators have written."""
        log = self.cluster.broker.log(TOPIC, self.cp)
        assert log is not None
        for message in log.messages:
            record = decode(message.value(), SUPPORTED_LEVEL)
            if isinstance(record, SettlingMessages | SettleOffsets) and record.client_id == "ann":
                yield record

    def places(self, *offsets: int) -> list[tuple[str, int, int]]:
        return [(DATA, 0, offset) for offset in offsets]


@pytest.fixture(params=["claimed", "coordinated"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


def offsets(places: tuple[tuple[str, int, int], ...]) -> list[int]:
    return [offset for _, _, offset in places]


def test_open_messages_are_listed_with_what_kafka_says_of_them(place: Place) -> None:
    found = place.admin.open_messages(GROUP)
    assert [each.offset for each in found] == [3, 5, 7, 9, 11]
    first, waiting = found[0], found[2]
    assert isinstance(first, OpenMessage)
    assert (first.group, first.topic, first.partition, first.key_hash) == (GROUP, DATA, 0, place.hash_of(3))
    assert (first.state, first.reason, first.delivery_count, first.client) == ("parked", "ValueError", 5, "w1")
    assert (first.key, first.value, first.gone, first.unread) == (b"k3", b"value 3", False, "")
    assert first.time is not None
    assert (waiting.state, waiting.reason, waiting.delivery_count, waiting.key) == ("waiting", None, 2, b"k2")
    assert [each.offset for each in place.admin.open_messages(GROUP, parked=True)] == [3, 5, 9, 11]
    assert place.admin.open_messages(GROUP, [(DATA, 1)]) == []
    with pytest.raises(AdminError, match="no group 'delay'; did you mean 'delays'"):
        place.admin.open_messages("delay")
    assert list(place.written()) == []


def test_what_retention_took_is_said_and_redriving_it_counts_it_as_done(place: Place) -> None:
    place.cluster.broker.delete_records(DATA, 0, 5)
    assert [(each.offset, each.gone, each.key) for each in place.admin.open_messages(GROUP)][:2] == [
        (3, True, None),
        (5, False, b"k0"),
    ]
    planned = place.admin.redrive(GROUP, "all", dry_run=True)
    assert list(place.written()) == []
    done = place.admin.redrive(GROUP, "all")
    assert done == planned
    assert (offsets(done.messages), offsets(done.gone)) == ([5, 9, 11], [3])
    assert place.holes() == {5: None, 7: None, 9: None, 11: None}
    assert place.progress().is_done(3)


def test_only_those_that_are_meant_are_redriven(place: Place) -> None:
    done = place.admin.redrive(GROUP, place.places(5, WAITING, 2, 5, MESSAGES))
    assert offsets(done.messages) == [5]
    assert {place[2]: why for place, why in done.left.items()} == {
        WAITING: "it waits for its next try already",
        2: f"it was done before: everything up to offset {MESSAGES - 1} is, but for what is open",
        MESSAGES: "it is not open: done, or not reached yet",
    }
    assert offsets(place.admin.redrive(GROUP, reason="ValueError").messages) == [3, 9, 11]
    assert set(place.holes().values()) == {None}
    assert place.admin.redrive(GROUP, "all").messages == ()
    assert all(hole.attempts == 0 for hole in place.progress().open if hole.first != WAITING)


def test_discarded_messages_count_as_done_those_that_wait_too(place: Place) -> None:
    done = place.admin.discard(GROUP, place.places(WAITING, 9))
    assert (done.action, offsets(done.messages)) == ("discard", [WAITING, 9])
    assert place.holes() == {3: "ValueError", 5: "KeyError", 11: "ValueError"}
    assert offsets(place.admin.discard(GROUP, "all").messages) == [3, 5, 11]
    assert place.progress().holes is None
    assert place.progress().is_done(MESSAGES - 1)


def test_a_message_that_keeps_failing_is_set_aside(place: Place) -> None:
    done = place.admin.park(GROUP, place.places(WAITING, 3))
    assert offsets(done.messages) == [WAITING]
    assert list(done.left.values()) == ["it is set aside already (ValueError)"]
    assert place.holes()[WAITING] == "OPERATOR"
    [hole] = [hole for hole in place.progress().open if hole.first == WAITING]
    assert (hole.attempts, hole.key_hash) == (2, place.hash_of(WAITING))
    place.admin.redrive(GROUP, place.places(WAITING))
    place.admin.park(GROUP, place.places(WAITING), reason="a bad one")
    assert place.holes()[WAITING] == "a bad one"


@pytest.mark.parametrize("action", ["redrive", "discard"])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_an_operator_that_is_killed_between_two_records_is_followed_by_another(
    place: Place, action: str, before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    shown = 0

    def passed() -> None:
        nonlocal shown
        shown += 1
        if shown == before:
            raise Killed

    monkeypatch.setattr(open_messages, "MOST_ENTRIES", 1)
    monkeypatch.setattr(open_messages, "passed", passed)
    act = getattr(place.admin, action)
    with pytest.raises(Killed):
        act(GROUP, "all")
    assert len([reason for reason in place.holes().values() if reason]) == len(PARKED) - before
    done = act(GROUP, "all")
    assert offsets(done.messages) == list(PARKED)[before:]
    settled = Counter(entry[0] for record in place.written() for entry in (*record.open, *record.done))
    assert settled == Counter(list(PARKED))  # each once


def test_of_two_operators_one_redrives_each_message(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has looked, and then finds that the first was faster, in part: nothing is freed twice."""
    other = Admin.on_cluster(lambda: place.cluster.connect("other"), client_id="bob")
    freed: list[Settled] = []

    def passed() -> None:
        monkeypatch.setattr(open_messages, "passed", lambda: None)
        freed.append(other.redrive(GROUP, place.places(5, 9)))
        place.park({9: "Again"})  # its owner has tried it, and failed again

    monkeypatch.setattr(open_messages, "MOST_ENTRIES", 1)
    monkeypatch.setattr(open_messages, "passed", passed)
    done = place.admin.redrive(GROUP, "all")
    assert offsets(freed[0].messages) == [5, 9]
    assert offsets(done.messages) == [3, 11]
    assert done.left == {}  # the two share the work
    assert place.holes()[9] == "Again"
    place.park({3: "Again", 5: "Again"})
    monkeypatch.setattr(open_messages, "passed", lambda: other.redrive(GROUP, place.places(5)))
    named = place.admin.redrive(GROUP, place.places(3, 5))
    assert [at[2] for at in named.left] == [5]
    assert all(why.startswith("it changed meanwhile: it is ") for why in named.left.values())


def test_a_copy_of_a_record_that_comes_late_frees_nothing_again(place: Place) -> None:
    place.admin.redrive(GROUP, place.places(3))
    [record] = place.written()
    place.park({3: "Again"})
    place.append(record, place.cp)
    assert place.holes()[3] == "Again"


def test_a_rate_is_kept(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    real = Session.wait_for

    def wait_for(self: Any, met: Callable[[], object], until: float) -> bool:
        if met is not never:
            return real(self, met, until)
        waits.append(until)
        return False

    monkeypatch.setattr(Session, "wait_for", wait_for)
    shown: list[tuple[int, int]] = []
    done = place.admin.redrive(GROUP, "all", rate=2, progress=lambda *at: shown.append(at))
    assert len(done.messages) == 4
    assert shown == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [round(until - waits[0]) for until in waits] == [0, 500, 1000, 1500]


def test_the_log_names_the_operator(place: Place) -> None:
    place.admin.redrive(GROUP, place.places(3))
    [found] = [each for each in place.admin.open_messages(GROUP) if each.offset == 3]
    assert (found.state, found.client, found.delivery_count) == ("waiting", "ann", 0)


def test_what_makes_no_sense_is_refused(place: Place) -> None:
    admin = place.admin
    refused: list[Callable[[], object]] = [
        lambda: admin.redrive(GROUP),
        lambda: admin.redrive(GROUP, place.places(3), reason="ValueError"),
        lambda: admin.redrive(GROUP, "some"),  # type: ignore[arg-type]
        lambda: admin.redrive(GROUP, [("orders", 0)]),  # type: ignore[list-item]
        lambda: admin.redrive(GROUP, [("orders", 0, -1)]),
        lambda: admin.redrive(GROUP, "all", rate=0),
        lambda: admin.discard(GROUP, [("orders", -1, 3)]),
        lambda: admin.park(GROUP, place.places(3), reason="x" * 65),
    ]
    for call in refused:
        with pytest.raises(ConfigurationError, match="Nothing was changed"):
            call()
    with pytest.raises(AdminError, match=r"no group 'delay'; did you mean 'delays'.*Nothing was changed"):
        admin.redrive("delay", "all")
    assert list(place.written()) == []


def test_another_topic_of_the_same_name_is_not_delivered_in_their_place(place: Place) -> None:
    place.cluster.broker.delete_topic(DATA)
    place.cluster.broker.create_topic(DATA, 1)
    with pytest.raises(AdminError, match=r"position lost.*Nothing was changed"):
        place.admin.redrive(GROUP, "all")
    assert len(place.admin.discard(GROUP, "all").messages) == len(PARKED)


# -- what happens to them where positions are moved --------------------------------------------------------------


@pytest.fixture
def idle(place: Place) -> Place:
    """The member has left."""
    if place.kind == "claimed":
        place.append(ReleasingPartition(*place.ids, DATA, 0, place.epoch, None), place.cp)
    else:
        place.fleet.leave("w1", place.generation)
    return place


def moved(place: Place, to: int) -> Move:
    with place.admin.pause(GROUP) as pause:
        pause.wait_released(5)
        (move,) = pause.reposition({(DATA, 0): to})
    return move


def test_a_new_position_leaves_what_was_set_aside_below_it(idle: Place) -> None:
    (planned,) = idle.admin.plan(GROUP, {(DATA, 0): 10})
    assert (planned.parked, planned.closed) == ((3, 5, 9), ((WAITING, WAITING),))
    move = moved(idle, 10)
    assert (move.parked, move.closed) == (planned.parked, planned.closed)
    assert idle.holes() == {3: "ValueError", 5: "KeyError", 9: "ValueError"}


def test_in_a_topic_that_was_recreated_nothing_stays_set_aside(idle: Place) -> None:
    idle.cluster.broker.delete_topic(DATA)
    idle.cluster.broker.create_topic(DATA, 1)
    for offset in range(6):
        idle.cluster.broker.produce(DATA, 0, b"new %d" % offset)
    (planned,) = idle.admin.plan(GROUP, {(DATA, 0): 6})
    assert (planned.parked, [first for first, _ in planned.closed]) == ((), [3, 5, 7, 9, 11]), (
        "the topic has none of them"
    )
    moved(idle, 6)
    assert (idle.holes(), idle.progress().stable) == ({}, 5)


def test_an_undo_leaves_what_is_not_done_as_it_is(idle: Place) -> None:
    """Workers have continued after the move, and left open messages: their offsets do not count as done since."""
    if idle.kind == "coordinated":
        pytest.skip("coordinated groups keep nothing above a position")
    progress = idle.progress()
    assert Keep(((30, 40),), since=1).above(1, progress) == (WAITING, ((8, 19), (30, 40)))


def test_a_move_that_fails_puts_open_messages_back(idle: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of the mover fails after a partition has moved."""
    if idle.kind == "coordinated":
        pytest.skip("one record moves all partitions of a coordinated group")
    before = idle.progress()
    real = repositioning._Mover._is_moved
    monkeypatch.setattr(
        repositioning._Mover, "_is_moved", lambda self, move, *, under_pause=False: not under_pause and real(self, move)
    )
    with pytest.raises(AdminError, match="Every position is as it was before"):
        moved(idle, 10)
    after = idle.progress()
    assert idle.holes() == {**PARKED, WAITING: None}
    assert [hole[4:] for hole in after.open] == [hole[4:] for hole in before.open]
    assert [at for at in range(MESSAGES + 3) if after.is_done(at)] == [
        at for at in range(MESSAGES + 3) if before.is_done(at)
    ]


def test_kafkas_own_group_has_no_place_for_them(idle: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = idle.cluster.connect("kafka")
    with caught_up(idle.cluster.connect("look"), TOPIC, 10) as replica:
        found = progress_of_all(replica.worlds, GROUP)
        kafka = KafkaGroup((), {})

        def export(open_messages: Open) -> tuple[int, int, int]:
            (move,) = planned_export(cluster, GROUP, kafka, found, force=False, open_messages=open_messages)
            return move.after, move.done_ahead, len(move.closed)

        with pytest.raises(AdminError, match=r"5 open messages \(orders \[0\]\).*--open repeat.*--open drop"):
            export(None)
        assert export("drop") == (MESSAGES, 0, 5)
        assert export("repeat") == (3, MESSAGES - 3, 0)
    cluster.close()


@pytest.mark.parametrize("killed_after", ["", "saved", "changing", "marked", "set aside"])
def test_a_conversion_carries_over_what_was_set_aside(
    idle: Place, killed_after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def passed(step: str) -> None:
        if step == killed_after:
            monkeypatch.setattr(conversion, "passed", lambda _: None)
            raise Killed

    to: Literal["claimed", "coordinated"] = "coordinated" if idle.kind == "claimed" else "claimed"
    file = tmp_path / "saved.json"
    with pytest.raises(AdminError, match=r"1 open message .*--open"):
        idle.admin.convert_group(GROUP, to, file=file)
    monkeypatch.setattr(conversion, "passed", passed)
    is_killed = killed_after in ("saved", "changing") or (to == "coordinated" and killed_after != "")
    if is_killed:
        with pytest.raises(Killed):
            idle.admin.convert_group(GROUP, to, file=file, open_messages="repeat")
    again = None if is_killed and killed_after != "saved" else "repeat"  # the file says it
    done = idle.admin.convert_group(GROUP, to, file=file, open_messages=again)  # type: ignore[arg-type]
    idle.kind, idle.cp = to, route_lease(DATA, 0, CPS) if to == "claimed" else route_group(GROUP, CPS)
    assert done.positions == {(DATA, 0): WAITING}
    assert [offset for _, _, offset in done.parked] == list(PARKED)
    assert idle.holes() == PARKED
    assert idle.progress().stable == WAITING - 1
    assert {hole.attempts for hole in idle.progress().open} == {5}


def test_a_conversion_that_drops_the_others(idle: Place, tmp_path: Path) -> None:
    to: Literal["claimed", "coordinated"] = "coordinated" if idle.kind == "claimed" else "claimed"
    idle.admin.convert_group(GROUP, to, file=tmp_path / "saved.json", open_messages="drop")
    idle.kind, idle.cp = to, route_lease(DATA, 0, CPS) if to == "claimed" else route_group(GROUP, CPS)
    assert (idle.holes(), idle.progress().stable) == (PARKED, MESSAGES - 1)


def test_nothing_of_a_shared_partition_needs_to_be_evicted() -> None:
    place = Place("claimed")
    place.append(ReleasingPartition(*place.ids, DATA, 0, place.epoch, None), place.cp)
    place.append(ClaimingShare("w2/1", "w2", GROUP, DATA, 0, 60_000), place.cp)
    (info,) = place.admin.progress(GROUP)
    assert (info.client_id, [each.keys for each in info.sharers]) == ("w2", [None])
    with pytest.raises(AdminError, match=r"orders \[0\]: is shared \('w2'\). Nothing was changed.*--member CLIENT"):
        place.admin.evict(GROUP, DATA, 0, force=True)


def test_a_sharer_is_evicted_with_all_its_shares_and_its_batches_are_free() -> None:
    place = Place("claimed")
    place.append(ReleasingPartition(*place.ids, DATA, 0, place.epoch, None), place.cp)
    share = place.append(ClaimingShare("w2/1", "w2", GROUP, DATA, 0, 60_000), place.cp)
    other = place.append(ClaimingShare("w3/1", "w3", GROUP, DATA, 0, 60_000), place.cp)
    (info,) = place.admin.held_by("w2")
    assert (info.client_id, info.epoch, len(info.sharers)) == ("w2", share, 2)
    with pytest.raises(AdminError, match="'w2' beat less than 60000 ms ago and may be alive"):
        place.admin.evict(GROUP, "w2")
    (was,) = place.admin.evict(GROUP, "w2", force=True)
    assert (was.client_id, was.epoch) == ("w2", share)
    (info,) = place.admin.progress(GROUP)
    assert [(each.client_id, each.epoch) for each in info.sharers] == [("w3", other)]


def test_a_pause_that_is_left_in_force_is_said_to_end_where_it_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    place, tick = Place("coordinated"), Session.tick
    late = {CPS - 1: 30_000}
    monkeypatch.setattr(
        Session, "tick", lambda self, cps: {cp: at + late.get(cp, 0) for cp, at in tick(self, cps).items()}
    )
    with place.admin.pause(GROUP, 60) as pause:
        until = pause.leave_in_force()
    ends = sorted(each.expires for each in place.admin.pauses(GROUP))
    assert until == ends[0] < ends[-1]


def test_an_evict_that_came_too_late_everywhere_says_so() -> None:
    place = Place("claimed")
    place.cluster.broker.faults.append = Hurry(place)
    with pytest.raises(AdminError, match=r"'w1' holds nothing of what it held .* somebody was faster"):
        place.admin.evict(GROUP, "w1", force=True)


class Hurry:
    """The holder releases it itself, and another claims it, just before the first release in its name."""

    def __init__(self, place: Place) -> None:
        self.place, self.is_over = place, False

    def __call__(self, client: str, topic: str, partition: int, value: bytes) -> AppendFate:
        if client == "admin" and isinstance(decode(value, SUPPORTED_LEVEL), ReleasingPartition) and not self.is_over:
            self.is_over, place = True, self.place
            place.append(ReleasingPartition(*place.ids, DATA, 0, place.epoch, MESSAGES - 1), place.cp)
            place.append(ClaimingPartition("w2/1", "w2", GROUP, DATA, 0, 60_000), place.cp)
        return AppendFate.WRITTEN


def test_a_sharer_that_is_drained_gives_up_its_shares() -> None:
    place = Place("claimed")
    place.append(ReleasingPartition(*place.ids, DATA, 0, place.epoch, None), place.cp)
    marshal = Marshal.on_cluster(place.cluster.connect("w2"), group_id=GROUP, client_id="w2", heartbeat_interval=0.3)
    with marshal, marshal.consumer([DATA], mode=Batches()) as consumer:
        eventually(lambda: place.admin.held_by("w2"), what="it shares the partition")

        def work() -> None:
            for batch in consumer.batches(timeout=0.1):
                batch.done()

        thread = threading.Thread(target=work)
        thread.start()
        (was,) = place.admin.drain(GROUP, "w2", timeout=10)
        assert (was.client_id, was.topic, was.partition) == ("w2", DATA, 0)
        assert place.admin.held_by("w2") == []
        marshal.stop()
        thread.join(20)


def test_brokers_that_go_away_end_a_read(place: Place) -> None:
    cluster = place.cluster.connect("reader")
    marks = cluster.watermarks([(DATA, 0)], 5)
    cluster.watermarks = lambda partitions, timeout_s: marks  # type: ignore[method-assign]
    place.cluster.broker.set_reachable("reader", False)
    with pytest.raises(KafkaUnavailableError, match=r"nothing was read of orders \[0\]"):
        read_at(cluster, {(DATA, 0): [3]}, lambda message: message.offset(), 0.3)
    cluster.close()
