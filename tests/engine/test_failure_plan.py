"""The failure plan of the proposal of cooperative consumers (a KIP), by its own names: a test for each point."""

from __future__ import annotations

from collections import Counter

import pytest

from kafka_marshal import Group, Keys
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.engine.claims.keys import KeyLease
from kafka_marshal.engine.key_share import KeyShare
from kafka_marshal.engine.plane import Settles
from kafka_marshal.engine.settings import Why
from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.engine.work.open_messages import Entries, Goal, Request
from kafka_marshal.errors import KeyRangeError, TopicMissingError
from kafka_marshal.node.coordination_topic import create_topic
from rationalizer import (
    ClaimingShare,
    CommitRanges,
    ConfigureGroup,
    SettlingMessages,
    codes,
    encode,
    key_hash,
    route_group,
)
from rationalizer.limits import MAX_KEY_HASH
from tests.client.conftest import wait_until
from tests.engine.groups.test_members import SESSION, net_of
from tests.engine.groups.test_members import join as join_group
from tests.engine.groups.test_members import source as source_of
from tests.engine.harness import HI, Member
from tests.engine.sharers import TOPIC, shared_net
from tests.engine.test_keys import HIGH, KEY, LOW, Story, are_in, cut_off, offsets_of, pod, work
from tests.faults.stories import GROUP, member, memory_cluster
from tests.faults.stories import TOPIC as STORIES

# 1. Individual commit failure.


def test_individual_commit_failure_broker_restriction_the_client_immediately_fails_with_restriction_exception() -> None:
    """Here it is a setting of the group (88)."""
    cluster = memory_cluster(messages=1)
    setting = ("accept_individual_commit", False)
    cluster.broker.produce("__marshal", 0, encode(ConfigureGroup("i", "o", GROUP, (setting,))))
    with member(cluster) as made, made.consumer([STORIES], mode=Group()) as consumer:
        wait_until(lambda: consumer.member_id)
        with pytest.raises(KeyRangeError, match="accept_individual_commit=true") as raised:
            consumer.run(print, park=True)
        assert raised.value.kip_number == 88


def test_individual_commit_failure_ic_log_not_found_or_corrupted() -> None:
    """There is no second log. The one there is must be there, and what is no record is nothing to every member."""
    with pytest.raises(TopicMissingError, match="kafka-marshal init"):
        Marshal.on_cluster(MemoryCluster().connect("a"), group_id="g")
    net = shared_net(end=30)
    low = pod(net, "low", LOW)
    work(net, low, ms=100)
    net.append(0, b"\x93corrupt")
    high = pod(net, "high", HIGH)
    work(net, low, high)
    assert Counter(offsets_of(low) + offsets_of(high)) == Counter(range(30))
    assert low.worlds[0].next_offset == high.worlds[0].next_offset == len(net.logs[0])


def settled(low: Member, entries: Settles, code: str) -> list[str]:
    """What a member says when the log answers its own record so."""
    consumer = low.consumers[0]
    low.warnings.clear()
    answers = [code] * (len(entries.done) + len(entries.open) + len(entries.parked))
    consumer.settlements.applied(low.assignment(KEY), entries, answers, low.clock())
    low.carry_out_all()
    return low.warnings


def test_individual_commit_failure_commit_too_old_the_client_adjusts_its_position_to_catch_up_with_latest() -> None:
    """91: what this client wants of messages below stable is dropped; the warning names stable."""
    net = shared_net(end=30)
    low = pod(net, "low", LOW)
    work(net, low, ms=2 * HI)
    share = next(iter(net.world(KEY).shares or ()))
    stable = low.consumers[0].known_stable(KEY)
    net.write(CommitRanges(share.instance_id, share.client_id, "g", *KEY, share.epoch, ((0, 1),)), 0)
    work(net, low, ms=HI)
    assert low.stage(KEY) is Stage.ACTIVE
    assert low.consumers[0].known_stable(KEY) == stable
    wanted = low.assignment(KEY).opened.settling
    mine = [offset for offset in range(stable + 1) if LOW[0] <= key_hash(None, offset) <= LOW[1]]
    first, second = mine[:2]
    wanted.want(Request(first, first, Goal.OPEN, key_hash(None, first), 1))
    wanted.want(Request(second, second, Goal.PARKED, key_hash(None, second), 5, "Bad"))
    low.warnings.clear()
    opened, parked = (first, first, key_hash(None, first), 1), (second, key_hash(None, second), 5, "Bad")
    late = Entries(open=(opened,), parked=(parked,))
    low.consumers[0].source.reports.settle(low.assignment(KEY).lease, late, low.clock())
    work(net, low, ms=3 * HI)
    (sent,) = net.records(SettlingMessages)
    assert isinstance(sent, SettlingMessages)
    assert (sent.open, sent.parked) == ((opened,), (parked,))
    assert f"everything up to offset {stable} is" in low.warnings[0]
    assert not len(wanted)


def test_individual_commit_failure_commit_in_duplicate_is_not_a_serious_flag_but_does_the_warning_log() -> None:
    net = shared_net(end=30)
    low = pod(net, "low", LOW)
    work(net, low)
    again = Entries(done=((0, 0),))
    assert "nothing is lost" in settled(low, again, codes.DUPLICATE_COMMIT)[0]
    assert not settled(low, again, codes.DUPLICATE_COMMIT), "once a minute"
    assert not low.consumers[0].errors
    assert codes.DUPLICATE_COMMIT in codes.ACCEPTED


def test_max_individual_commit_reached_the_partition_is_held_back_and_the_next_call_raises_if_it_is_to() -> None:
    """92, of the table of errors."""
    net = shared_net(end=30)
    low = pod(net, "low", LOW)
    work(net, low)
    assert Why.UNREADABLE in low.consumers[0].settings.raises
    parked = Entries(parked=((1, key_hash(None, 1), 1, "Bad"),))
    assert "10,000 messages" in settled(low, parked, codes.MAX_INDIVIDUAL_COMMIT_REACHED)[0]
    assert [error.kip_number for error in low.consumers[0].errors if isinstance(error, KeyRangeError)] == [92]
    net.data[KEY].end = 60
    low.fetch(60)
    assert low.take(10) is None


# 2. Range fetch failure.


def test_range_fetch_failure_topic_restriction_the_client_immediately_crashes_with_restriction_exception() -> None:
    """Here it is what the program says of its topics (89), as claimed groups have no settings."""
    cluster = memory_cluster()
    made = Marshal.on_cluster(cluster.connect("a"), group_id="g", ordered_topics=[STORIES])
    with made, pytest.raises(KeyRangeError) as raised:
        made.consumer(mode=Keys({(STORIES, 0): [LOW]}))
    assert raised.value.kip_number == 89


def test_range_fetch_failure_other_common_fetch_request_errors_like_topic_not_found() -> None:
    """As in consumers that hold partitions whole: it waits for the topic."""
    cluster = MemoryCluster()
    create_topic(cluster, "__marshal", 1, 10)
    with member(cluster) as made, made.consumer(mode=Keys({("later", 0): [(0, MAX_KEY_HASH)]})) as consumer:
        assert consumer.poll(0.2) is None
        cluster.broker.create_topic("later", 1)
        cluster.broker.produce("later", 0, b"x")
        wait_until(lambda: consumer.poll(0.2))


# 3. Rebalance support failure.


def test_rebalance_support_failure_consumer_restriction_it_rejects_an_assignment_it_is_not_allowed_to() -> None:
    """90. No log makes that happen: the state of the replica is changed by hand."""
    net = net_of(partitions=1)
    whole = join_group(net, "a")
    net.run_until(lambda: whole.stage(("t", 0)) is Stage.ACTIVE)
    net.write(ConfigureGroup("x", "admin", "g", (("accept_range_fetch", ("t",)),)), route_group("g", net.cps))
    net.run(SESSION)
    assert not whole.consumers[0].errors
    group = whole.worlds[route_group("g", net.cps)].group("g")
    assert group is not None
    (part,) = group.pieces["t"][0]
    half = MAX_KEY_HASH // 2
    first = part._replace(hi=half)
    rest = part._replace(lo=half + 1, target=part.target + 1)
    source_of(whole).holdings._follow(("t", 0), (first, rest), part.target, whole.clock())
    found = source_of(whole).failure
    assert isinstance(found, KeyRangeError)
    assert found.kip_number == 90


def test_rebalance_support_failure_the_no_assignment_overlap_is_detected_in_system_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted bug: a client that works on more keys than it has claimed is found."""
    monkeypatch.setattr(KeyShare, "has", lambda self, key: True)
    with pytest.raises(AssertionError):
        Story(0).run(250)


def test_rebalance_support_failure_a_share_that_is_trusted_for_ever_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted bug: no T4."""

    def planted(self: KeyLease) -> None:
        self.proven_until = 1e18 if self.held else 0.0
        self.hand_out_until = 0.0 if self.stopped else self.proven_until
        self.hand_out_until_s = self.hand_out_until / 1000
        self.parts.refresh()

    monkeypatch.setattr(KeyLease, "refresh", planted)
    with pytest.raises(AssertionError):
        cut_off()


def test_rebalance_support_failure_other_common_rebalance_failure_a_claim_is_written_twice_or_lost() -> None:
    net = shared_net(end=30)
    low, high = net.member("low"), pod(net, "high", HIGH)
    lost = iter((True, True))
    low.drop_if = lambda record: isinstance(record, ClaimingShare) and next(lost, False)
    low.duplicate = True
    low.consumer(TOPIC, keys=((TOPIC, 0, (LOW,)),))
    work(net, low, high, ms=6 * HI)
    assert are_in(offsets_of(low), LOW)
    assert Counter(offsets_of(low) + offsets_of(high)) == Counter(range(30))
