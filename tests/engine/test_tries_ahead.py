"""Tries that are logged before they begin (U1): what never began is taken back, and no innocent message is CRASHED."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any

import pytest

from kafka_marshal.client.tries import RunCall
from kafka_marshal.engine.inputs import Ts
from kafka_marshal.engine.settings import GroupOptions
from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.lanes import Lanes, Order
from kafka_marshal.engine.work.open_messages import Goal, Request, Try
from kafka_marshal.engine.work.pull import Take, Wanted
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.types import T
from rationalizer import SettlingMessages, World, codes, key_hash, route_lease
from rationalizer.holes import NO_KEY, Hole
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.records import Done, Opened, Parked
from tests.engine.groups.test_members import SESSION, group_of, net_of
from tests.engine.harness import HI, Net
from tests.engine.scenes import T0, evict

MOST = 5
HALF = MAX_KEY_HASH // 2
#: Claimed; coordinated; shared by keys, of which one pod has all.
KINDS = ("claims", "groups", "keys")


class Worker:
    """A member with parallel handlers that set messages aside; the test ends each try."""

    def __init__(self, net: Net, name: str, kind: str = "claims", concurrency: int = 4, order: Order = "none") -> None:
        self.net, self.member = net, net.member(name)
        options: dict[str, object] = {}
        if kind == "groups":
            options["group"] = GroupOptions("sticky", SESSION)
        elif kind == "keys":
            options["keys"] = (("t", 0, ((0, HALF), (HALF + 1, MAX_KEY_HASH))),)
        consumer = self.member.consumer("t", **options)  # type: ignore[arg-type]
        self.number, self.call, self.concurrency = consumer.number, RunCall(), concurrency
        self.lanes = Lanes(order, Lock(), [], 0.0)
        self.lanes.open(self.call, is_durable=True, concurrency=concurrency, most_tries=MOST)
        self.engine = consumer
        self.member.engine.take(self.number, consumer.delivery.in_lanes.open, self.lanes)
        self.ready: list[Lane] = []
        #: Offset → the lane whose message a handler has; the number of its try.
        self.begun: dict[int, Lane] = {}
        self.numbers: dict[int, list[int]] = {}

    def take(self, function: Callable[[*Ts, float], T], *of: *Ts) -> Any:
        found = self.member.engine.take(self.number, function, *of, self.member.clock())
        self.member.carry_out_all()
        return found

    def feed(self) -> None:
        """As the feeder of ``run`` does, and its handlers."""
        now = self.member.clock()
        self.member.fetch()
        step = self.take(self.engine.pull.next, Wanted(100, False, now / 1000))
        if isinstance(step, Take):
            self.ready += self.take(self.engine.spread, step.run)
        self.ready += self.lanes.reopened(now) + self.lanes.due(now, self.call)
        while self.ready and len(self.begun) < self.concurrency:
            lane = self.ready.pop(0)
            if (message := self.lanes.begin(lane, now, self.call)) is not None:
                self.begun[offset_of(message)] = lane
                self.numbers.setdefault(offset_of(message), []).append(lane.before + lane.number)
        self.member.settle()

    def run(self, ms: float) -> None:
        until = self.net.now + ms
        while self.net.now < until:
            self.net.tick()
            self.feed()

    def run_until(self, condition: Callable[[], object]) -> None:
        def is_met() -> object:
            self.feed()
            return condition()

        self.net.run_until(is_met)

    def has_begun(self, number: int) -> bool:
        """Whether this number of messages is with handlers."""
        return len(self.begun) == number

    def holds(self) -> None:
        """Wait until it has the partition."""
        self.net.run_until(lambda: any(x.lease.held and x.shown for x in self.assignments))

    @property
    def assignments(self) -> list[Assignment]:
        return list(self.member.consumers[0].assignments.values())

    def done(self, offset: int) -> None:
        lane = self.begun.pop(offset)
        self.take(self.engine.delivery.done, [lane.message])  # type: ignore[arg-type]
        if self.lanes.done(lane, self.call):
            self.ready.append(lane)

    def failed(self, offset: int, after: float) -> None:
        self.lanes.failed(self.begun.pop(offset), self.member.clock() + after, self.call)
        self.take(self.engine.delivery.in_lanes.returned)

    def close(self) -> None:
        """It leaves in an orderly way."""
        self.member.close()
        self.net.run_until(lambda: all(each.closed for each in self.member.consumers))
        self.net.run(50)
        self.net.members.remove(self.member)


def net_with(end: int = 4) -> Net:
    return net_of(1, end=end, level=4)


def holes(net: Net, kind: str = "claims") -> dict[int, Hole]:
    progress = group_of(net).kept(*T0).progress if kind == "groups" else net.world(T0).progress  # type: ignore[union-attr]
    return {hole.first: hole for hole in progress.open}


def tries(net: Net, kind: str = "claims") -> dict[int, int]:
    return {offset: hole.attempts for offset, hole in holes(net, kind).items()}


def left_by_another(net: Net, kind: str, tried: Mapping[int, int] | None = None, *, dies: bool = False) -> None:
    """Another worker had the partition before. tried: by offset, how many tries it has left in the log."""
    first = Worker(net, "first", kind)
    first.holds()
    (assignment,) = first.member.consumers[0].assignments.values()
    assignment.opened.log_tries([Try(*each, key_hash(None, each[0])) for each in (tried or {}).items()])
    net.run(HI)
    (first.member.kill if dies else first.close)()
    assert tries(net, kind) == (tried or {})


@pytest.mark.parametrize("kind", KINDS)
def test_u1_what_was_logged_and_never_began_is_taken_back_at_each_orderly_handover(kind: str) -> None:
    """Twelve owners come and go, each before it begins anything: nothing is set aside, and no try is counted."""
    net = net_with()
    left_by_another(net, kind)
    for number in range(12):
        worker = Worker(net, f"w{number}", kind)
        worker.holds()
        worker.feed()  # the first tries are logged
        assert not worker.begun
        worker.close()
    assert set(tries(net, kind).values()) <= {0}
    worker = Worker(net, "last", kind)
    worker.holds()
    worker.run(5 * HI)
    assert sorted(worker.begun) == [0, 1, 2, 3]
    assert set(worker.numbers) == {0, 1, 2, 3}
    assert list(worker.numbers.values()) == [[1]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_u1_a_try_that_is_logged_alone_and_never_began_is_taken_back(kind: str) -> None:
    net = net_with()
    left_by_another(net, kind, {0: MOST - 1, 1: MOST - 1})
    for number in range(4):
        worker = Worker(net, f"w{number}", kind)
        worker.holds()
        worker.run_until(lambda: MOST in tries(net, kind).values())
        assert sorted(tries(net, kind).values()) == [MOST - 1, MOST]
        assert not worker.begun
        worker.close()
        assert tries(net, kind) == {0: MOST - 1, 1: MOST - 1}


@pytest.mark.parametrize("kind", KINDS)
def test_u1_six_deploys_during_a_long_handler_count_nothing(kind: str) -> None:
    """Each worker ends in order while its handlers are at work: no handler has died, and no message is CRASHED."""
    net = net_with()
    left_by_another(net, kind)
    for number in range(6):
        worker = Worker(net, f"w{number}", kind)
        worker.holds()
        worker.run_until(partial(worker.has_begun, 4))
        assert set(tries(net, kind).values()) == {1}
        worker.run(3 * HI)
        worker.close()
        assert set(tries(net, kind).values()) == {0}


def test_u1_what_a_handler_raised_for_before_a_deploy_stays_counted() -> None:
    net = net_with(end=1)
    worker = Worker(net, "w")
    worker.holds()
    worker.run_until(lambda: worker.begun)
    worker.failed(0, 10)
    worker.run_until(lambda: worker.begun)
    worker.run(2 * HI)
    worker.close()
    assert tries(net) == {0: 1}


@pytest.mark.parametrize("kind", KINDS[:2])
def test_u1_a_try_that_the_log_has_ahead_counts_once_when_other_messages_come_before_it_begins(kind: str) -> None:
    """One try has failed under the owner before; the second is logged, and waits behind another of its key."""
    net = net_with(end=2)
    left_by_another(net, kind, {0: 1, 1: 1})
    worker = Worker(net, "w", kind, order="partition")
    worker.holds()
    worker.run_until(lambda: 0 in worker.begun and tries(net, kind) == {0: 2, 1: 2})
    net.data[T0].end = 3
    worker.run_until(lambda: worker.lanes.waiting(T0) == 2)
    worker.done(0)
    worker.run_until(lambda: 1 in worker.begun)
    assert worker.numbers[1] == [2]
    worker.failed(1, 10)
    worker.run_until(lambda: 1 in worker.begun)
    assert worker.numbers[1] == [2, 3]


def test_u1_a_try_that_never_began_is_taken_back_when_the_lease_is_lost_by_the_own_clock() -> None:
    """Its record counts while no other member has the partition: a bad network makes no message CRASHED."""
    net = net_with()
    left_by_another(net, "claims", {0: MOST - 1})
    worker = Worker(net, "w")
    worker.holds()
    worker.run_until(lambda: MOST in tries(net).values())
    net.run(50)
    assert not worker.begun
    worker.member.stalled = True
    net.run(3 * HI)
    assert tries(net)[0] == MOST - 1


def test_u1_what_is_kept_after_all_is_logged_again_before_it_begins() -> None:
    net = net_with(end=1)
    left_by_another(net, "claims", {0: 1})
    worker = Worker(net, "w", concurrency=1)
    worker.holds()
    worker.run_until(lambda: tries(net)[0] == 2)
    worker.take(worker.engine.pause, None, True)
    net.run(HI)
    assert tries(net)[0] == 1
    worker.take(worker.engine.pause, None, False)
    worker.run_until(lambda: worker.begun)
    assert tries(net)[0] == 2
    worker.run_until(lambda: 0 in worker.begun)
    assert worker.numbers[0] == [2]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_u1_what_was_logged_and_never_began_begins_if_its_partition_is_kept_after_all(kind: str) -> None:
    """A release for a pause waits for one handler; the pause ends, and the others begin here, in order."""
    net = net_with()
    left_by_another(net, kind)
    worker = Worker(net, "w", kind, order="partition")
    worker.holds()
    worker.run_until(lambda: worker.begun)
    assert tries(net, kind) == dict.fromkeys(range(4), 1)
    net.pause(HI)
    worker.run(HI / 2)
    assert [each.stage for each in worker.assignments] == [Stage.REVOKING]
    worker.run(2 * HI)
    assert [each.stage for each in worker.assignments] == [Stage.ACTIVE]
    for offset in range(4):
        worker.run_until(lambda: worker.begun)
        assert list(worker.begun) == [offset]
        worker.done(offset)
    worker.run(2 * HI)
    assert tries(net, kind) == {}


@pytest.mark.parametrize("attempts", [0, 2])
def test_u1_owners_that_die_before_they_begin_anything_make_no_message_crashed(attempts: int) -> None:
    """None of them can take that back: in company two tries count, and alone none that could not begin at once."""
    net = net_with()
    left_by_another(net, "claims", {0: attempts} if attempts else {})
    for number in range(2 * MOST):
        worker = Worker(net, f"w{number}")
        worker.lanes.pace(2 * net.now, net.now)  # the breaker is open: nothing begins
        worker.holds()
        worker.run(100)
        assert not worker.begun
        worker.member.kill()
    assert set(tries(net).values()) == {2}
    worker = Worker(net, "last")
    worker.holds()
    for offset in range(4):
        worker.run_until(lambda: bool(worker.begun))
        assert list(worker.begun) == [offset]
        worker.done(offset)


def test_u1_a_message_that_kills_is_counted_at_each_death_and_its_neighbours_stay_at_two() -> None:
    net = net_with()
    left_by_another(net, "claims")
    for number in range(MOST):
        worker = Worker(net, f"w{number}")
        worker.holds()
        while 1 not in worker.begun:
            net.tick()
            worker.feed()
            for offset in [x for x in worker.begun if x != 1 and number > 1]:
                worker.done(offset)
        worker.member.kill()
    worker = Worker(net, "last")
    worker.holds()
    worker.run(HI)
    assert {x: (hole.attempts, hole.reason) for x, hole in holes(net).items() if hole.is_parked} == {
        1: (MOST, "CRASHED")
    }


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_u1_what_was_handled_before_a_message_behind_it_kills_is_never_crashed(kind: str, concurrency: int) -> None:
    """Each death comes before the next beat: of what was tried alone the log shows by then that it is done."""
    net, killer = net_with(end=12), 9
    left_by_another(net, kind)
    deaths, most = 0, 0
    while not any(hole.is_parked for hole in holes(net, kind).values()):
        worker = Worker(net, f"w{deaths}", kind, concurrency)
        worker.holds()
        until = net.now + HI / 2
        while net.now < until and killer not in worker.begun:
            net.tick()
            worker.feed()
            for offset in [x for x in worker.begun if x != killer]:
                worker.done(offset)
        most = max([most, *(x for offset, numbers in worker.numbers.items() if offset != killer for x in numbers)])
        worker.member.kill()
        deaths += 1
        assert deaths < 40
    assert {x: hole.reason for x, hole in holes(net, kind).items() if hole.is_parked} == {killer: "CRASHED"}
    assert most <= 3


def test_u1_what_an_operator_sets_aside_while_it_waits_behind_another_of_its_key_stops_nothing() -> None:
    """It was to be tried alone, which nothing else begins before."""
    net = net_with(end=3)
    left_by_another(net, "claims", {0: 2, 1: 2})
    worker = Worker(net, "w", order="partition")
    worker.holds()
    worker.run_until(lambda: 0 in worker.begun)
    operate(net, parked=((1, key_hash(None, 1), 2, "OPERATOR"),))
    net.run(HI / 2)
    worker.done(0)
    worker.run_until(lambda: worker.begun)
    assert set(worker.begun) == {2}
    assert holes(net)[1].is_parked


AT = ("behind another", "alone", "to be logged", "for another try", "done with a handler", "failed with a handler")


@pytest.mark.parametrize("dies", [False, True], ids=["after a goodbye", "after a death"])
@pytest.mark.parametrize("at", AT)
def test_u3_what_an_operator_sets_aside_while_its_owner_has_it_is_tried_when_it_is_redriven(
    at: str, dies: bool
) -> None:
    """Wherever it waited: nothing that the owner noted of its tries before holds it back, or ends it early."""
    net = net_with(end=3)
    tried = {"behind another": {0: 2, 1: 2}, "alone": {0: 2, 1: 2}, "to be logged": {0: 1, 1: 1}}.get(at)
    left_by_another(net, "claims", tried or {1: 1}, dies=dies)
    worker = Worker(net, "w", concurrency=1, order="partition" if at == "behind another" else "none")
    worker.holds()
    worker.run_until(lambda: (tried and 0 in worker.begun) or finished(worker, 1))
    if "try" in at:
        worker.failed(1, 50 * HI)
    worker.run_until(lambda: 1 in holes(net))
    operate(net, parked=((1, key_hash(None, 1), holes(net)[1].attempts, "OPERATOR"),))
    net.run(HI / 2)
    if "handler" in at:
        worker.failed(1, 0) if "failed" in at else worker.done(1)
    worker.run_until(lambda: finished(worker))
    worker.run(2 * HI)
    assert holes(net)[1].is_parked
    operate(net, opened=((1, 1, None, 0),))
    worker.run_until(lambda: finished(worker, 1))
    assert worker.numbers[1][-1] == 1
    worker.failed(1, 0)
    worker.run_until(lambda: finished(worker, 1))
    worker.done(1)
    worker.run(2 * HI)
    assert not holes(net)
    assert not worker.begun


def test_u3_what_an_operator_discards_while_it_waits_for_another_try_is_not_tried_again() -> None:
    net = net_with(end=2)
    worker = Worker(net, "w", concurrency=1)
    worker.holds()
    worker.run_until(lambda: 0 in worker.begun)
    worker.failed(0, 5 * HI)
    worker.run_until(lambda: 1 in worker.begun)
    worker.done(1)
    worker.run_until(lambda: 0 in holes(net))
    operate(net, done=((0, 0),))
    worker.run(10 * HI)
    assert worker.numbers == {0: [1], 1: [1]}
    assert net.world(T0).progress.stable == 1


def finished(worker: Worker, until: int = -1) -> bool:
    """Each message that has begun is done. Returns whether the one at `until` has begun; −1: whether all are done."""
    for offset in [x for x in worker.begun if x != until]:
        worker.done(offset)
    return until in worker.begun if until >= 0 else len(worker.numbers) > 1


def operate(net: Net, done: Done = (), opened: Opened = (), parked: Parked = ()) -> None:
    """An operator's record."""
    cp = route_lease(*T0, net.cps)
    net.write(SettlingMessages("x", "operator", "g", *T0, None, len(net.logs[cp]), done, opened, parked), cp)


def test_u2_while_most_tries_fail_few_of_them_are_logged_and_none_is_refused() -> None:
    """A message that failed fifty times is tried by the next owner, too: only one that kills is CRASHED."""
    net = net_with(end=1)
    left_by_another(net, "claims")
    worker = Worker(net, "w", concurrency=1)
    worker.holds()
    for _ in range(50):
        worker.run_until(lambda: 0 in worker.begun)
        worker.failed(0, HI / 2)
    worker.run(2 * HI)
    assert tries(net) == {0: MOST - 1}
    worker.close()
    assert len(net.records(SettlingMessages, "w")) <= MOST
    assert outcomes(net) == {codes.OK}
    again = Worker(net, "again", concurrency=1)
    again.holds()
    again.run_until(lambda: 0 in again.begun)
    assert again.numbers == {0: [MOST]}
    again.failed(0, 9 * HI)
    again.close()
    assert tries(net) == {0: MOST - 1}


def test_h5_what_the_log_has_no_room_for_is_not_sent_until_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten messages wait for their next try, and three may be open: the other seven cost nothing."""
    for module in ("kafka_marshal.engine.work.open_messages", "rationalizer.settling"):
        monkeypatch.setattr(f"{module}.MAX_HOLES", 3)
    net = net_with(end=10)
    worker = Worker(net, "w", concurrency=10)
    worker.holds()
    worker.run_until(lambda: len(worker.begun) == 10)
    for offset in range(10):
        worker.failed(offset, 1e9)
    worker.run(2 * HI)
    assert len(holes(net)) == 3
    before = len(net.records(SettlingMessages))
    worker.run(20 * HI)
    assert len(net.records(SettlingMessages)) == before
    assert len([text for text in worker.member.warnings if "which is the limit" in text]) == 1
    net.write(SettlingMessages("z/1", "z", "g", *T0, None, 10**9, ((0, 0),)), 0)
    worker.run(3 * HI)
    assert sorted(holes(net)) == [1, 2, 3]


def test_u4_what_is_wanted_while_our_own_record_is_under_way_goes_out_after_it() -> None:
    """A replica that is late: the second try is not sent with a ``seen`` below the record of the first."""
    net = net_with(end=1)
    left_by_another(net, "claims")
    worker = Worker(net, "w", concurrency=1)
    worker.holds()
    worker.run_until(lambda: 0 in worker.begun)
    worker.member.stalled = True
    for _ in range(3):
        worker.run_until(lambda: 0 in worker.begun)
        worker.failed(0, 0.4 * HI)
        worker.run(0.4 * HI)
    assert worker.numbers[0][:3] == [1, 2, 3]
    worker.member.stalled = False
    worker.run(HI)
    assert tries(net) == {0: 3}
    assert outcomes(net) == {codes.OK}


@pytest.mark.parametrize("by_hand", [False, True])
def test_u2_a_message_set_aside_after_its_partition_was_taken_away_holds_nothing_up(by_hand: bool) -> None:
    """Its handler began before, and its last try fails after: the member claims again."""
    net = net_with()
    worker = Worker(net, "w")
    worker.holds()
    worker.run_until(lambda: 0 in worker.begun)
    assignment, consumer = worker.assignments[0], worker.member.consumers[0]
    evict(net, worker.member)
    net.run(100)
    for offset in (1, 2, 3):
        worker.done(offset)
    net.run(100)
    assert consumer.owes
    token = -1 if by_hand else assignment.epoch
    assert not worker.take(worker.engine.park, T0, token, 0, key_hash(None, 0), MOST, "Bad")
    net.run(HI)
    assert not consumer.owes


def outcomes(net: Net) -> set[str]:
    """How the log answered records about open messages."""
    cp = route_lease(*T0, net.cps)
    world = World(cp, net.cps)
    found = [world.apply(offset, *each) for offset, each in enumerate(net.logs[cp])]
    return {each.code for each in found if isinstance(each.record, SettlingMessages)}


@pytest.mark.parametrize("is_next_alone", [False, True])
def test_u1_what_was_tried_alone_is_done_in_the_log_before_anything_else_begins(is_next_alone: bool) -> None:
    """Of another partition, too: else the next one's death counts against it, until it is CRASHED."""
    net = net_of(2, end=1, level=4)
    first = Worker(net, "first")
    net.run_until(lambda: len([x for x in first.assignments if x.lease.held and x.shown]) == 2)
    for assignment in first.assignments:
        if assignment.key == T0 or is_next_alone:
            assignment.opened.log_tries([Try(0, MOST - 1, key_hash(None, 0))])
    net.run(HI)
    first.close()
    worker = Worker(net, "w", concurrency=1)
    worker.run_until(lambda: worker.begun)
    ((offset, lane),) = worker.begun.items()
    key = lane.assignment.key
    assert attempts_of(net, key, offset) == MOST
    worker.done(offset)
    worker.run_until(lambda: worker.begun)
    assert next(iter(worker.begun.values())).assignment.key != key
    assert attempts_of(net, key, offset) is None


def attempts_of(net: Net, key: tuple[str, int], offset: int) -> int | None:
    """How many tries the log has of an open message; None: it is done."""
    progress = net.world(key).progress
    hole = None if progress.holes is None else progress.holes.at(offset)
    return None if hole is None else hole.attempts


def left_by_batches(net: Net, attempts: int) -> None:
    """Members have shared the partition by batches before, and left one open: the log has no keys of its messages."""
    first = Worker(net, "first")
    first.holds()
    (assignment,) = first.assignments
    end = net.data[T0].end
    assignment.opened.settling.want(Request(0, end - 1, Goal.OPEN, None, attempts))
    net.run(HI)
    first.close()
    (hole,) = holes(net).values()
    assert (hole.first, hole.last, hole.key_hash, hole.attempts) == (0, end - 1, NO_KEY, attempts)


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_u1_what_batches_have_left_is_tried_though_the_log_has_no_key_of_it(attempts: int) -> None:
    net = net_with()
    left_by_batches(net, attempts)
    worker = Worker(net, "w")
    worker.holds()
    for _ in range(4):
        worker.run_until(lambda: worker.begun)
        worker.done(min(worker.begun))
    worker.run(3 * HI)
    assert not holes(net)
    assert [tried[0] for tried in worker.numbers.values()] == [attempts + 1] * 4


@pytest.mark.parametrize("killer", [0, 10, 500])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_u1_wherever_a_message_lies_that_kills_it_costs_two_deaths_more_than_it_has_tries(
    kind: str, killer: int
) -> None:
    """Two members of eight handlers; each dies before it has reported anything, and another one takes its place."""
    net = net_with(end=killer + 20)
    workers = [Worker(net, f"w{number}", kind, concurrency=8) for number in range(2)]
    deaths, handled = 0, set[int]()
    while not any("CRASHED" in text for worker in workers for text in worker.member.warnings):
        net.tick()
        for worker in workers:
            worker.feed()
            while killer not in worker.begun and worker.begun:
                for offset in list(worker.begun):
                    worker.done(offset)
                    handled.add(offset)
                worker.feed()
        for worker in [x for x in workers if killer in x.begun]:
            worker.member.kill()
            deaths += 1
            workers.remove(worker)
            workers.append(Worker(net, f"r{deaths}", kind, concurrency=8))
        assert deaths <= MOST + 2
    net.run(HI)
    assert {x: hole.reason for x, hole in holes(net, kind).items() if hole.is_parked} == {killer: "CRASHED"}
    assert handled >= set(range(killer))
