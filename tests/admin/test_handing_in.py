"""What a pause reports as not handed in, from the log alone: raw members on a log in memory, whose clock is set."""

from __future__ import annotations

from threading import Timer

import pytest

from kafka_marshal import Admin, AdminError, InHand, Pause
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.admin.members import Members
from kafka_marshal.engine.settings import proof_margin_ms
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.runtime import time_of_day_ms
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Upgrade,
    encode,
)
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.marker import marker
from tests.fleet import Fleet, let_go, started

TOPIC, DATA, GROUP = "__marshal", "flights", "delays"
#: So long that the time a test takes is nothing beside it.
HI = 60_000
W1, W2 = ("w1/1", "w1", GROUP), ("w2/1", "w2", GROUP)


class Place:
    """A log of one partition, whose broker's clock is moved by hand, and an admin."""

    def __init__(self) -> None:
        self.ahead_ms = 0.0
        self.cluster = MemoryCluster()
        self.cluster.create_topic(TOPIC, 1, 1, required_settings(1), 10)
        self.cluster.broker.clock = lambda: time_of_day_ms() + self.ahead_ms
        self.append(marker("m", 1))
        self.append(Upgrade("m", "m", "m", SUPPORTED_LEVEL))
        self.cluster.broker.create_topic(DATA, 2)
        self.fleet = Fleet(GROUP, 1, self.append)
        self.admin = Admin.on_cluster(lambda: self.cluster.connect("admin"), client_id="ann")

    def append(self, record: Record, cp: int = 0) -> int:
        return self.cluster.broker.produce(TOPIC, cp, encode(record))

    def claim(self, share: ClaimingShare | None = None) -> int:
        """w1's claim; its epoch."""
        return self.append(ClaimingPartition(*W1, DATA, 0, HI) if share is None else share)

    def release(self, epoch: int, last_offset: int | None, ids: tuple[str, str, str] = W1) -> int:
        return self.append(ReleasingPartition(*ids, DATA, 0, epoch, last_offset))

    def pause(self) -> Pause:
        return self.admin.pause(GROUP, 100 * HI / 1000)

    def operator(self) -> Admin:
        return Admin.on_cluster(lambda: self.cluster.connect("operator"), client_id="bob")


@pytest.fixture
def place() -> Place:
    return Place()


def states(found: list[InHand]) -> list[tuple[int, str, str, int | None]]:
    return [(each.partition, each.client_id, each.state, each.stable) for each in found]


def test_what_was_given_up_is_named_however_late_the_last_heartbeat_came(place: Place) -> None:
    epoch = place.claim()
    late_by = 0.8 * HI
    place.ahead_ms += late_by
    place.append(Heartbeat(*W1, DATA, 0, epoch, 5))  # sent when the claim was
    with place.pause() as pause:
        place.ahead_ms += 2 * HI - proof_margin_ms(HI) - late_by
        place.release(epoch, 6)  # by the member's clock its lease is over (T4); offset 7 is in flight
        assert states(pause.wait_released(10)) == [(0, "w1", "slow", 6)]
        assert [each.epoch for each in pause.in_hand()] == [epoch]


@pytest.mark.parametrize(
    ("silence", "state"), [(0.0, ""), (0.5, ""), (0.85, ""), (0.95, "slow"), (1.7, "slow"), (1.9, "late"), (9, "late")]
)
def test_what_a_release_says_depends_on_the_silence_before_it(place: Place, silence: float, state: str) -> None:
    epoch = place.claim()
    with place.pause() as pause:
        place.ahead_ms += silence * HI
        place.release(epoch, 6)
        assert states(pause.wait_released(10)) == ([(0, "w1", state, 6)] if state else [])


@pytest.mark.parametrize("keys", [(None, None), (0, MAX_KEY_HASH // 2)])
@pytest.mark.parametrize("silence", [0.0, 1.9])
def test_shares_are_judged_by_their_own_heartbeats(place: Place, keys: tuple[int | None, int], silence: float) -> None:
    lo, hi = keys
    first = place.claim(ClaimingShare(*W1, DATA, 0, HI, lo, hi))
    second = place.claim(ClaimingShare(*W2, DATA, 0, HI, lo if lo is None else hi + 1, lo if lo is None else hi + 9))
    with place.pause() as pause:
        place.release(first, None)
        place.ahead_ms += silence * HI
        place.release(second, None, W2)
        left = pause.wait_released(10)
        assert [(each.client_id, each.epoch, each.state) for each in left] == [("w2", second, "late")] * (silence > 1)


def test_a_share_that_lives_is_waited_for_though_a_later_one_is_silent(place: Place) -> None:
    first = place.claim(ClaimingShare(*W1, DATA, 0, HI))
    second = place.claim(ClaimingShare(*W2, DATA, 0, 100))
    with place.pause() as pause:
        place.ahead_ms += 1_000
        with pytest.raises(AdminError, match=r"have not let go: .*by 'w1' \(fresh.*by 'w2' \(stale"):
            pause.wait_released(0.2)
        place.release(first, None)
        assert [(each.client_id, each.epoch, each.state) for each in pause.wait_released(10)] == [
            ("w2", second, "stale")
        ]


@pytest.mark.parametrize("last_offset", [None, 4])
def test_what_an_operator_evicts_is_named_at_any_time(place: Place, last_offset: int | None) -> None:
    epoch = place.claim()
    place.append(Heartbeat(*W1, DATA, 0, epoch, 2))
    with place.pause() as pause:
        if last_offset is None:
            place.operator().evict(GROUP, DATA, 0, force=True)
            assert states(pause.wait_released(10)) == [(0, "w1", "late", 2)]
        else:  # it was said, and the member was faster
            place.release(epoch, None, ("bob/1", "bob", GROUP))
            place.release(epoch, last_offset)
            assert pause.wait_released(10) == []
        assert list(pause.signs_of_life) == ["w1"] * (last_offset is not None)


def coordinated(place: Place) -> int:
    """w1 has partition 0, w2 partition 1; the generation."""
    place.fleet.configure()
    place.fleet.join("w1", {DATA: 2}, session=HI)
    generation = place.fleet.join("w2", {DATA: 2}, session=10 * HI)
    place.fleet.commit("w1", generation, *started(DATA, 0, 1, through=4))
    place.fleet.commit("w1", generation, let_go(DATA, 1))
    return generation


def test_a_dead_member_is_named_though_another_ones_record_removed_it(place: Place) -> None:
    generation = coordinated(place)
    with place.pause() as pause:
        place.ahead_ms += 2 * HI
        place.fleet.leave("w2", generation)
        assert states(pause.wait_released(10)) == [(0, "w1", "stale", 4)]


def test_members_that_leave_in_time_are_not_named(place: Place) -> None:
    generation = coordinated(place)
    with place.pause() as pause:
        place.fleet.leave("w1", generation)
        place.ahead_ms += 2 * HI
        place.fleet.leave("w2", generation)
        assert pause.wait_released(10) == []


def test_an_evicted_member_is_named(place: Place) -> None:
    generation = coordinated(place)
    with place.pause() as pause:
        place.fleet.leave("w1", generation)
        place.operator().evict(GROUP, "w2", force=True)
        assert (1, "w2", "late", 4) in states(left := pause.wait_released(10))
        assert {each.client_id for each in left} == {"w2"}  # partition 0 was its, too, from w1's end on
        assert list(pause.signs_of_life) == ["w1"]


def test_a_wait_ends_with_an_error_if_the_pause_was_ended_meanwhile(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch = place.claim()
    at_work = Members.at_work
    ended: list[int] = []

    def once(members: Members, chosen: object) -> object:
        if not ended:
            ended.append(place.append(ReleaseGroup("other/1", "ann", GROUP, 0)))
            place.release(epoch, 6)
        return at_work(members, chosen)  # type: ignore[arg-type]

    with place.pause() as pause:
        monkeypatch.setattr(Members, "at_work", once)
        with pytest.raises(AdminError, match="has run out, or was ended"):
            pause.wait_released(10)


def test_a_member_that_owns_nothing_yet_is_drained_when_it_has_left(place: Place) -> None:
    place.fleet.configure()
    place.fleet.join("w1", {DATA: 2}, session=HI)
    generation = place.fleet.join("w2", {DATA: 2}, session=HI)  # partition 1 is to be its, once w1 releases it
    with pytest.raises(AdminError, match=r"'w2' was asked .*owns 0 partitions still after 0\.2 s, and has not left"):
        place.operator().drain(GROUP, "w2", timeout=0.2)
    waits = Timer(0.2, lambda: place.fleet.leave("w2", generation))
    waits.start()
    assert place.operator().drain(GROUP, "w2", timeout=10) == []
    waits.join()
