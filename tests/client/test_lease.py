"""Leases by hand, on a real broker."""

from __future__ import annotations

import os
import threading

import pytest

from kafka_marshal import ConfigurationError, HeldError, LeaseLostError, Marshal, OpenMessages, Progress
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import ClientReplacedError, ClosedError, ForkedError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.pacing import Pacing
from rationalizer import ClaimingPartition, ClaimingShare, Heartbeat, Record, SettlingMessages, encode
from rationalizer.limits import MAX_KEY_HASH
from tests.client.conftest import HI, Scene, wait_until


def test_c3_earliest_claim_wins_and_the_loser_learns_by_whom(scene: Scene) -> None:
    a, b = scene.member("a"), scene.member("b")
    lease = a.claim("t", 0)
    assert lease.valid
    with pytest.raises(HeldError) as refused:
        b.claim("t", 0, timeout=0)
    assert refused.value.holder == "a"
    assert refused.value.freshness == "fresh"
    assert refused.value.since > 0


def test_claim_waits_until_the_holder_releases(scene: Scene) -> None:
    a, b = scene.member("a"), scene.member("b")
    lease = a.claim("t", 0)
    threading.Timer(0.3, lambda: lease.release(41)).start()
    taken = b.claim("t", 0, timeout=20)
    assert taken.last_offset == 41
    assert taken.epoch > lease.epoch
    assert not lease.valid


def test_c5_c8_progress_is_reported_and_inherited(scene: Scene) -> None:
    a = scene.member("a")
    lease = a.claim("t", 0)
    seen = [lease.last_offset]
    lease.heartbeat(10)
    seen.append(lease.last_offset)
    assert seen == [None, 10]
    lease.release(12)
    again = a.claim("t", 0)
    assert again.last_offset == 12
    assert again.epoch > lease.epoch


def test_c12_grant_is_given_once(scene: Scene) -> None:
    a = scene.member("a")
    lease = a.claim("t", 0)
    lease.grant(9)
    assert a.world.lease("t", 0).granted == 9  # type: ignore[union-attr]
    with pytest.raises(ConfigurationError, match="granted or done before"):
        lease.grant(9)
    lease.grant(10)


def test_c8_a_released_lease_takes_no_more(scene: Scene) -> None:
    lease = scene.member("a").claim("t", 0)
    lease.release()
    lease.release()
    for action in (lease.require, lambda: lease.heartbeat(1), lambda: lease.grant(1)):
        with pytest.raises(LeaseLostError):
            action()


def test_c7_a_newer_instance_takes_over_and_the_older_ends(scene: Scene) -> None:
    old = scene.member("a")
    lease = old.claim("t", 0)
    lease.heartbeat(7)
    new = scene.member("a")
    taken = new.claim("t", 0, timeout=0)
    assert taken.epoch > lease.epoch
    assert taken.last_offset == 7
    wait_until(lambda: not lease.valid)
    with pytest.raises(ClientReplacedError, match="newer instance"):
        old.claim("t", 1)


def test_close_releases_by_hand_claims(scene: Scene) -> None:
    a, b = scene.member("a"), scene.member("b")
    a.claim("t", 0)
    a.close()
    a.close()
    assert b.claim("t", 0, timeout=0).valid
    with pytest.raises(ClosedError):
        a.claim("t", 1)


def test_the_same_lease_twice_is_refused(scene: Scene) -> None:
    a = scene.member("a")
    a.claim("t", 0)
    with pytest.raises(ConfigurationError, match="already"):
        a.claim("t", 0)


@pytest.mark.parametrize("topic, partition", [("", 0), ("t\x1b[31m", 0), ("t" * 250, 0), ("t", -1), ("t", 2**31)])
def test_e2_bad_names_are_refused_before_anything_is_sent(scene: Scene, topic: str, partition: int) -> None:
    a = scene.member("a")
    with pytest.raises(ConfigurationError):
        a.claim(topic, partition)


def test_a_forked_child_is_refused(scene: Scene) -> None:
    a = scene.member("a")
    lease = a.claim("t", 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            a.claim("t", 1)
        except ForkedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    lease.heartbeat(1)


def test_who_wants_something_ends_the_wait_for_the_echo_of_beats(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    let_gather, waiting = Pacing.let_beats_gather, threading.Event()

    def let_gather_and_tell(pacing: Pacing) -> None:
        waiting.set()
        let_gather(pacing)

    a = scene.member("a")
    for partition in range(4):  # of several partitions of the log
        a.claim("t", partition)
    monkeypatch.setattr("kafka_marshal.node.pacing.BEATS_WAIT_S", 3600.0)
    monkeypatch.setattr(Pacing, "let_beats_gather", let_gather_and_tell)
    assert waiting.wait(20)
    assert a.claim("u", 1, timeout=5).valid


def test_beats_do_not_gather_while_something_else_waits_for_its_answer(scene: Scene) -> None:
    a = scene.member("a")
    for partition in range(4):
        a.claim("t", partition)
    driver = a._driver
    for others, gathers in ((0, True), (1, False)):
        with driver.condition:
            driver.wait_for(lambda: driver.pacing.unanswered == 0, 20)
            driver.pacing.unanswered += others
            driver.engine.book.beat_all(driver.now_ms())
            driver.effects.carry_out(driver.engine.take_effects())
            assert driver.pacing.beats_sent is gathers
            driver.pacing.unanswered -= others


# -- in memory: what others have left -----------------------------------------------------------------------


class Left:
    """A log in which another worker was at work, and a lease of it to claim."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        create_topic(self.cluster, "__marshal", 1, 10)
        self.cluster.broker.create_topic("t", 1)

    def append(self, record: Record) -> int:
        return self.cluster.broker.produce("__marshal", 0, encode(record))

    def marshal(self) -> Marshal:
        return Marshal.on_cluster(self.cluster, group_id="g", client_id="a", heartbeat_interval=HI / 1000)


B, PLACE, SEEN = ("b1", "b", "g"), ("t", 0), 2**62


def test_b4_a_lease_that_others_share_is_held_until_all_have_gone() -> None:
    left = Left()
    left.append(ClaimingShare(*B, *PLACE, 600_000, start=0))
    mine = left.append(ClaimingShare("c1", "c", "g", *PLACE, 100))
    with left.marshal() as marshal:
        with pytest.raises(HeldError, match="shared by 'b', and maybe others") as refused:
            marshal.claim("t", 0, timeout=0)
        assert refused.value.holder == "b"
        left.append(SettlingMessages("c1", "c", "g", *PLACE, mine, SEEN, take=(5, 9, False)))
        assert marshal.world.wait_for(lambda world: (x := world.lease("t", 0)) and x.open, 5)
        (batch,) = marshal.world.leases()[0].open
        assert (batch.first, batch.last, batch.holder, batch.delivery_count) == (0, 4, "c", 1)


@pytest.mark.parametrize("passed", [True, False])
def test_h1_what_is_set_aside_is_in_nobodys_way_and_what_is_open_is(passed: bool) -> None:
    """Above the position what is set aside would be handled, too."""
    left = Left()
    epoch = left.append(ClaimingPartition(*B, *PLACE, 100))
    left.append(SettlingMessages(*B, *PLACE, epoch, SEEN, open=((3, 4, None, 1),), parked=((5, 8, 5, "Bad"),)))
    left.append(Heartbeat(*B, *PLACE, epoch, 9 if passed else 2))
    with left.marshal() as marshal:
        with pytest.raises(ConfigurationError, match=r"open in it \(offsets 3 to 4") as refused:
            marshal.claim("t", 0, timeout=5)
        assert "kafka-marshal discard g t:0:3" in str(refused.value)
        left.append(SettlingMessages("o1", "o", "g", *PLACE, None, SEEN, ((3, 4),)))
        assert marshal.world.wait_for(lambda world: (x := world.lease("t", 0)) and len(x.open) == 1, 5)
        if passed:
            assert marshal.claim("t", 0, timeout=5).last_offset == 9
        else:
            with pytest.raises(ConfigurationError, match=r"open in it \(offset 5\)"):
                marshal.claim("t", 0, timeout=5)


def test_h1_a_claiming_consumer_sees_what_is_open_and_who_has_it() -> None:
    left = Left()
    mine = left.append(ClaimingShare(*B, *PLACE, 600_000, start=0))
    left.append(SettlingMessages(*B, *PLACE, mine, SEEN, take=(5, 9, False)))
    left.append(SettlingMessages(*B, *PLACE, mine, SEEN, ((0, 1),), parked=((2, 8, 1, "Bad"),)))
    with left.marshal() as marshal, marshal.consumer(["t"]) as consumer:
        (found,) = consumer.committed([PLACE], ranges=True)
        assert (found.offset, found.stable, found.keys, found.ranges) == (3, 4, ((0, MAX_KEY_HASH, 4),), ())
        assert found.open == (OpenMessages(2, 2, 1, None, "Bad", 8), OpenMessages(3, 4, 1, "b", None, None))
        assert consumer.committed([PLACE]) == [(*PLACE, 3, -1)]
        assert consumer.committed([("t", 7)], ranges=True) == [Progress(-1, None, (), ())]
