"""Open messages in `status`, `group` and `check`, and partitions that several share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.cli.status import _group_state
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.observe import problems
from kafka_marshal.observe import problems as module
from kafka_marshal.observe.meter import RateMeter
from kafka_marshal.observe.problems import _waiting, crowded_text, mixed_texts, open_problems, open_text, problems_of
from kafka_marshal.observe.rows import GroupRow, LeaseRow
from kafka_marshal.observe.view import LiveView
from kafka_marshal.types import Sharer, reason_until
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SettlingMessages,
    Upgrade,
    World,
    encode,
)
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.marker import marker

LOG, DATA, GROUP = "__marshal", "orders", "delays"
W1, W2 = ("w1/1", "w1", GROUP), ("w2/1", "w2", GROUP)
BEGIN = 1_700_000_000_000
HI = 3_000


class Scene:
    """A log in memory, written at the times of a clock that stands."""

    def __init__(self) -> None:
        self.now = float(BEGIN)
        self.cluster = MemoryCluster(clock=lambda: self.now)
        self.cluster.create_topic(LOG, 1, 1, required_settings(1), 10)
        self.cluster.broker.create_topic(DATA, 1)
        for number in range(30):
            self.cluster.broker.produce(DATA, 0, b"%d" % number)
        self.append(marker("m", 1), Upgrade("m", "m", "m", SUPPORTED_LEVEL))

    def append(self, *records: Record) -> int:
        return [self.cluster.broker.produce(LOG, 0, encode(record)) for record in records][-1]

    def beat_on(self, ms: int, *beats: Record) -> None:
        """These come each second for this long: a silent log counts for no worker."""
        for _ in range(ms // 1_000):
            self.now += 1_000
            self.append(*beats)

    def group(self, judge: Callable[[LiveView, GroupRow], Any]) -> Any:
        view = LiveView(self.cluster.connect("view"), LOG, 5, now=lambda: self.now)
        try:
            view.catch_up(lambda done, of_all: None)
            view.look_at_data()
            (row,) = view.groups(GROUP)
            return judge(view, row)
        finally:
            view.replica.close()

    def check(self, **limits: int) -> list[tuple[str, int, str]]:
        found = self.group(lambda view, row: open_problems(self.cluster.connect("check"), view, row, **limits))
        return [(each.kind, each.amount, each.text) for each in found]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def park(scene: Scene) -> None:
    """3 and 5 are set aside, the second a minute later; 7 waits, all else is done."""
    epoch = scene.append(ClaimingPartition(*W1, DATA, 0, 60_000))
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, open=((7, 7, 1, 2),), parked=((3, 1, 5, "ValueError"),)))
    scene.now += 60_000
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, parked=((5, 1, 5, "KeyError"),)))
    scene.append(Heartbeat(*W1, DATA, 0, epoch, 29), ReleasingPartition(*W1, DATA, 0, epoch, None))


def test_what_is_set_aside_is_counted_and_too_much_of_it_is_a_problem(scene: Scene) -> None:
    park(scene)
    row = scene.group(lambda view, row: row)
    assert (row.parked, row.open_messages, row.lag) == (2, 1, 1)
    assert open_text(row) == "2 set aside (1 ValueError, 1 KeyError), 1 waiting for the next try"
    assert scene.check() == []
    assert scene.check(max_parked=2) == []
    ((kind, amount, text),) = scene.check(max_parked=1)
    assert (kind, amount) == ("parked", 2)
    assert text.startswith("2 messages set aside, more than 1. kafka-marshal open-messages delays --parked lists them")
    scene.now += 30_000
    ((kind, amount, text),) = scene.check(max_parked_ms=60_000)
    assert (kind, amount) == ("parked", 1)
    assert text.startswith("1 message set aside for more than 1 min, up to 1 min 30 s")
    assert scene.check(max_parked_ms=100_000) == []


def check_pruned(scene: Scene, before: int, **limits: int) -> list[tuple[str, int, str]]:
    """What `check` says where the log begins at that offset: the state is that of a snapshot."""

    def judge(view: LiveView, row: GroupRow) -> list[tuple[str, int, str]]:
        scene.cluster.broker.delete_records(LOG, 0, before)
        found = open_problems(scene.cluster.connect("check"), view, row, **limits)
        return [(each.kind, each.amount, each.text) for each in found]

    found: list[tuple[str, int, str]] = scene.group(judge)
    return found


@pytest.mark.parametrize(
    ("later", "most", "means"), [(0, 30, "up to 1 min"), (30, 50, "can't be known"), (30, 200, "")]
)
def test_a_prune_makes_nothing_that_is_set_aside_younger(scene: Scene, later: int, most: int, means: str) -> None:
    """It is as old as the first record that is left; where that is too young, and its message is not, it says so."""
    park(scene)
    scene.now += later * 1000
    before = scene.append(Heartbeat(*W2, DATA, 1, 0, None))
    scene.now += (60 - later) * 1000
    found = check_pruned(scene, before, max_parked_ms=most * 1000)
    if not means:
        assert found == []  # the messages themselves are younger
        return
    ((kind, amount, text),) = found
    assert (kind, amount) == ("parked", 2)
    assert means in text


def test_a_batch_that_hangs_is_named_after_a_prune(scene: Scene) -> None:
    first, second = share(scene)
    beats = Heartbeat(*W1, DATA, 0, first, None), Heartbeat(*W2, DATA, 0, second, None)
    before = scene.append(*beats)
    for _ in range(70_000 // HI):
        scene.now += HI
        scene.append(*beats)
    found = check_pruned(scene, before)
    assert [each[0] for each in found] == ["stuck_batch", "stuck_batch"]


def test_messages_that_fail_for_ever_are_a_problem_however_often_they_are_tried(scene: Scene) -> None:
    """With Retry(attempts=None) each try is a record: none waits for long."""
    epoch = scene.append(ClaimingPartition(*W1, DATA, 0, 60_000))
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, open=((7, 7, 1, 9),)))
    assert scene.check() == []
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, open=((7, 7, 1, 10),)))
    ((kind, amount, text),) = scene.check()
    assert (kind, amount) == ("stuck_try", 1)
    assert text.startswith("orders 0: 1 message has failed 10 times or more")


def test_the_first_message_that_is_set_aside_as_crashed_is_a_problem(scene: Scene) -> None:
    park(scene)
    assert "parked" not in [each.kind for each in problems_of(scene.group(lambda view, row: row))]
    epoch = scene.append(ClaimingPartition(*W1, DATA, 0, 60_000))
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, parked=((7, 1, 5, "CRASHED"),)))
    (problem,) = [x for x in problems_of(scene.group(lambda view, row: row)) if x.kind == "parked"]
    assert problem.amount == 1
    assert problem.text.startswith("orders 0: 1 message set aside as CRASHED")


@pytest.mark.parametrize("is_held", [True, False])
def test_a_message_whose_time_is_long_over_is_a_problem(scene: Scene, is_held: bool) -> None:
    epoch = scene.append(ClaimingPartition(*W1, DATA, 0, HI))
    due = BEGIN + 60_000
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, parked=((7, 1, 2, reason_until(due)),)))
    if not is_held:
        scene.append(ReleasingPartition(*W1, DATA, 0, epoch, None))
    beat = Heartbeat(*(W1 if is_held else W2), DATA, 0, epoch, 29)  # the log is not silent
    scene.beat_on(60_000 + problems.OVERDUE_MS, beat)
    assert scene.check() == []
    scene.beat_on(1_000, beat)
    ((kind, amount, text),) = scene.check()
    assert (kind, amount) == ("stuck_try", 1)
    assert text.startswith(
        "orders 0: 1 message was to be tried by now, up to 10 min 1 s ago, and later ones of the same"
    )
    assert ("see its log and health()" if is_held else "No worker has them: start one") in text
    assert text.endswith("kafka-marshal open-messages delays lists them as later, redrive has them tried")
    row = scene.group(lambda view, row: row)
    assert row.parked == 0


def test_a_message_of_a_paused_group_waits_for_its_end(scene: Scene) -> None:
    epoch = scene.append(ClaimingPartition(*W1, DATA, 0, HI))
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, parked=((7, 1, 2, reason_until(BEGIN)),)))
    scene.beat_on(problems.OVERDUE_MS + 1_000, Heartbeat(*W1, DATA, 0, epoch, 29))
    assert [kind for kind, *_ in scene.check()] == ["stuck_try"]
    scene.append(ReleaseGroup("op", "op", GROUP, int(scene.now) + 600_000))
    scene.beat_on(2_000, Heartbeat(*W1, DATA, 0, epoch, 29))
    assert scene.check() == []


def test_a_list_that_is_half_full_or_full_is_a_problem(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the limit of open messages and at it: `check`, `status` and `group` say so (H5)."""
    park(scene)
    for most, means in ((6, None), (5, "At the limit nothing more is set aside"), (3, "can't be set aside any more")):
        monkeypatch.setattr(module, "MAX_HOLES", most)
        monkeypatch.setattr(problems, "MAX_HOLES", most)
        row = scene.group(lambda view, row: row)
        if means is None:
            assert scene.check() == []
            assert crowded_text(row) == []
            continue
        found = [(each.kind, 0, each.text) for each in problems_of(row)]
        ((kind, _, text),) = scene.check() or found[:1]  # at the limit it comes before all else
        assert kind == "holes"
        assert text.startswith(f"orders 0: 3 of {most} open messages that a partition may have.")
        assert means in text
        assert "Nothing is lost" in text
        assert "kafka-marshal open-messages delays" in text
        assert open_text(row).endswith(f", 3 of the {most} that a partition may have open")
        state = _group_state(row, []).text
        assert "2 set aside" in state
        assert f"3 of the {most} that a partition may have open" in state


def test_a_part_of_the_log_that_is_half_full_or_full_is_a_problem(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the open messages of all groups: workers add none at the limit."""
    park(scene)
    other = ("x1/1", "x1", "another")
    epoch = scene.append(ClaimingPartition(*other, DATA, 0, 60_000))
    scene.append(SettlingMessages(*other, DATA, 0, epoch, 99, open=((2, 2, 1, 2),)))
    for most, means in ((8, None), (7, "At the limit nothing more is set aside"), (4, "can't be set aside any more")):
        monkeypatch.setattr(module, "MANY_HOLES", most)
        found = scene.check()
        if means is None:
            assert found == []
            continue
        ((kind, _, text),) = found
        assert kind == "holes"
        assert text.startswith(
            f"orders 0: 4 of {most} open messages that all groups together in __marshal [0] may have."
        )
        assert means in text


def test_a_worker_that_stands_still_with_messages_that_wait_is_told_what_to_do(scene: Scene) -> None:
    """A message that fails again and again holds its key back: `check` names the commands, not only a hung handler."""
    epoch = scene.append(ClaimingPartition(*W1, DATA, 0, HI))
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, open=((7, 7, 1, 2),)))
    row = scene.group(lambda view, row: row)
    waiting = _waiting(row, row.leases)
    assert "kafka-marshal open-messages delays lists them, and says how to set one aside" in waiting
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, parked=((7, 1, 5, "Bad"),)))
    row = scene.group(lambda view, row: row)
    assert _waiting(row, row.leases) == ""


def test_messages_that_wait_long_for_their_next_try_are_a_problem(scene: Scene) -> None:
    """As with a handler that hangs: the worker beats, and progress has passed what is open."""
    epoch = scene.append(ClaimingPartition(*W1, DATA, 0, 60_000))
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, open=((7, 7, 1, 2), (9, 9, 1, 1))))
    scene.append(Heartbeat(*W1, DATA, 0, epoch, 29))
    scene.now += 59_000
    scene.append(Heartbeat(*W1, DATA, 0, epoch, None))
    assert scene.check() == []
    scene.now += 2_000
    scene.append(Heartbeat(*W1, DATA, 0, epoch, None))
    ((kind, amount, text),) = scene.check()
    assert (kind, amount) == ("stuck_try", 2)
    assert text.startswith("orders 0: 2 messages wait for the next try, for up to 1 min")
    assert "Nothing is lost" in text and "kafka-marshal open-messages delays lists them" in text
    scene.append(SettlingMessages(*W1, DATA, 0, epoch, 99, open=((7, 7, 1, 3),), parked=((9, 1, 5, "Bad"),)))
    assert scene.check() == []


def share(scene: Scene) -> tuple[int, int]:
    """Two workers share the partition; each has a batch."""
    first = scene.append(ClaimingShare(*W1, DATA, 0, HI, start=0))
    second = scene.append(ClaimingShare(*W2, DATA, 0, HI))
    scene.append(SettlingMessages(*W1, DATA, 0, first, 99, take=(10, 29, False)))
    scene.append(SettlingMessages(*W2, DATA, 0, second, 99, take=(5, 29, False)))
    return first, second


def test_a_shared_partition_has_its_sharers(scene: Scene) -> None:
    share(scene)
    row = scene.group(lambda view, row: row)
    (lease,) = row.leases
    assert (lease.holder, [member.client for member in row.members]) == ("w1, w2", ["w1", "w2"])
    assert (row.worker_count, row.idle, row.lag) == (2, [], 30)
    assert [member.lag for member in row.members] == [10 + 7, 5 + 7]
    assert [[each.place for each in member.leases] for member in row.members] == [["0 (by batches)"]] * 2
    assert open_text(row) == "15 in workers' batches"
    assert [problem.kind for problem in problems_of(row)] == []


def test_a_batch_that_a_living_worker_does_not_end_is_named(scene: Scene) -> None:
    first, second = share(scene)
    beats = Heartbeat(*W1, DATA, 0, first, None), Heartbeat(*W2, DATA, 0, second, None)
    scene.beat_on(50_000, *beats)
    assert scene.check() == []
    scene.beat_on(20_000, *beats)
    scene.append(SettlingMessages(*W2, DATA, 0, second, 99, done=((10, 14),)))
    ((kind, amount, text),) = scene.check()
    assert (kind, amount) == ("stuck_batch", 1)
    assert text.startswith("orders 0: w1 has had offsets 0 to 9 for 1 min 10 s and beats: a handler hangs?")
    for _ in range(3):  # now it does not beat any more: it is gone, and another member gets its batch
        scene.now += HI
        scene.append(Heartbeat(*W2, DATA, 0, second, None))
    assert scene.check() == []


def test_a_partition_that_is_shared_by_keys_has_a_row_for_each_part(scene: Scene) -> None:
    """Keys that no worker names have no holder; the others' progress is their own."""
    quarter = 2**61
    first = scene.append(ClaimingShare(*W1, DATA, 0, HI, 0, quarter - 1, 0))
    scene.append(ClaimingShare(*W2, DATA, 0, HI, quarter, 2 * quarter - 1))
    scene.append(Heartbeat(*W1, DATA, 0, first, 19))
    row = scene.group(lambda view, row: row)
    found = [(each.place, each.holder, each.next, each.lag, each.state) for each in row.leases]
    assert found == [
        ("0 (0-25%)", "w1", 20, 2, "seen"),
        ("0 (25-50%)", "w2", 0, 7, "seen"),
        ("0 (50-100%)", "-", 0, 15, "free"),
    ]
    assert [(each.client, each.leases) for each in row.members] == [
        ("w1", [row.leases[0]]),
        ("w2", [row.leases[1]]),
    ]
    (problem,) = problems_of(row)
    assert (problem.kind, problem.text) == (
        "no_holder",
        "keys without a holder (orders 0 (50-100%)), 15 messages waiting",
    )
    scene.append(ClaimingShare(*W2, DATA, 0, HI, 2 * quarter, 2**63 - 1))
    assert problems_of(scene.group(lambda view, row: row)) == []


def test_each_part_moves_by_itself() -> None:
    """What the meter has seen of one part says nothing of the others."""
    half, world, meter = 2**62, World(0, 1), RateMeter(60_000)
    records = [
        Upgrade("m", "m", "m", SUPPORTED_LEVEL),
        ClaimingShare(*W1, DATA, 0, HI, 0, half - 1, 0),
        ClaimingShare(*W2, DATA, 0, HI, half, 2**63 - 1),
        Heartbeat(*W1, DATA, 0, 1, 19),
    ]
    for offset, record in enumerate(records):
        world.apply(offset, BEGIN + 1_000 * offset, encode(record))
        meter.sample(world)
    moved = {
        lo: (meter.track((GROUP, DATA, 0, lo)).has_moved, meter.track((GROUP, DATA, 0, lo)).granted_at)
        for lo in (0, half)
    }
    assert moved == {0: (True, BEGIN + 1_000), half: (False, BEGIN + 2_000)}


# -- Members of one group that do not fit together ----------------------------------------------------------------


def row(topic: str, partition: int, client: str, *, hi: int = 3_000, silence_ms: int = 0) -> LeaseRow:
    more = {"instance": f"{client}/1", "heartbeat_interval_ms": hi, "silence_ms": silence_ms}
    return LeaseRow("g", topic, partition, cp=0, client=client, log_start=0, log_end=0, **more)  # type: ignore[arg-type]


def test_another_heartbeat_interval_is_named() -> None:
    alike = GroupRow("g", [row("t", 0, "a"), row("t", 1, "b")])
    assert mixed_texts(alike) == []
    other = GroupRow("g", [*alike.leases, row("t", 2, "c", hi=15_000)])
    assert mixed_texts(other) == [
        "g: members have different heartbeat intervals (3.0 s: a, b; 15 s: c): a longer one delays take-overs"
    ]
    gone = GroupRow("g", [*alike.leases, row("t", 2, "c", hi=15_000, silence_ms=60_000)])
    assert mixed_texts(gone) == []


def test_two_groups_of_one_name_are_named() -> None:
    two = [row("t", 0, "a"), row("t", 1, "b"), row("u", 0, "c"), row("u", 1, "d")]
    assert mixed_texts(GroupRow("g", two)) == [
        "g: no member holds partitions of all topics (t: a, b; u: c, d): two groups of one name?"
    ]
    assert mixed_texts(GroupRow("g", [*two, row("u", 2, "a")])) == [], "one group, as a holds both"
    assert mixed_texts(GroupRow("g", two[:3])) == [], "chance deals so few so"


def test_a_member_of_another_mode_is_named() -> None:
    shares = (Sharer("a", "a/1", 5, "fresh", 3_000, 0, None),)
    shared = LeaseRow(
        "g", "t", 0, cp=0, client="a", instance="a/1", heartbeat_interval_ms=3_000, silence_ms=0, sharers=shares
    )
    assert mixed_texts(GroupRow("g", [shared])) == []
    assert mixed_texts(GroupRow("g", [shared, row("t", 1, "b")])) == [
        "g: t: some partitions are shared, and b holds others whole: another mode?"
    ]
