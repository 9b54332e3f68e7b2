"""Short forms of the campaigns, on the session's broker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_marshal.testing import RunningKafka
from tests.campaigns.checkpoints import campaign as checkpoints
from tests.campaigns.frame import run_campaign
from tests.campaigns.freezes import Crowd, freeze
from tests.campaigns.modes import story as modes
from tests.campaigns.parks import story as parks
from tests.campaigns.reads import story as reads
from tests.campaigns.redos import story as redos
from tests.campaigns.sharing import story as sharing
from tests.campaigns.transactions import campaign as transactions

# A violation counts even if a second try has none.
pytestmark = [pytest.mark.flaky(reruns=0), pytest.mark.slow, pytest.mark.timeout(600)]


def test_nothing_is_lost_twice_at_work_or_out_of_order_when_the_mode_of_a_group_changes(
    kafka_broker: RunningKafka,
) -> None:
    to = ("batches", "keys", "coordinated")
    options = modes.Options(seed=11, modes=to, workers=2, stay_s=0.5, gentle=False, poisons=0, tools=False)
    result = run_campaign(modes.Modes, options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["conversions"] == 1
    assert result.counts["kills"] + result.counts["stops"] >= 1
    assert result.counts["handled"] >= result.counts["messages"] - result.counts["discarded"] > 500


def test_each_message_is_handled_in_order_or_set_aside_and_redriven(kafka_broker: RunningKafka) -> None:
    options = parks.Options(
        seconds=6.0,
        rate=150.0,
        workers=2,
        seed=3,
        killers=1,
        kill_every_s=1.5,
        stop_every_s=3.0,
        leave_every_s=4.0,
        operator_every_s=1.0,
        least={"kills": 2},
    )
    result = run_campaign(parks.Parks, options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["killed by a message"] >= 5
    for kind in options.kinds:
        assert result.counts[f"{kind}: set aside"] >= 1
        assert result.counts[f"{kind}: handled"] >= 500


def test_each_row_is_written_once_more_for_each_redo_of_its_message(kafka_broker: RunningKafka) -> None:
    options = redos.Options(
        kills=2,
        redos=5,
        most_s=420.0,
        rate=20.0,
        workers=1,
        seed=3,
        hi_ms=1_000,
        kill_every_s=4.0,
        stop_every_s=10.0,
        leave_every_s=20.0,
        redo_every_s=0.3,
        least=dict.fromkeys(("redone", "undone", "operators killed", "carried on"), 1),
    )
    with redos.in_memory() as where:
        result = run_campaign(redos.Redos, replace(options, where=where), kafka_broker)
    counts = result.counts
    assert result.violations == [], result.folder
    assert counts["kills"] >= options.kills
    assert counts["redos"] >= options.redos
    assert all(counts[name] >= times for name, times in options.least.items())
    assert min(counts[f"{kind}: handled"] for kind in options.kinds) > counts["messages"]


@pytest.mark.parametrize("gentle", [True, False], ids=["opened-and-closed", "killed-and-stopped"])
def test_no_message_is_lost_and_each_comes_in_order_to_the_member_with_its_key(
    kafka_broker: RunningKafka, gentle: bool
) -> None:
    options = reads.Options(seconds=6.0, backlog=5_000, seed=3, kill_every_s=3.0, stop_every_s=3.0, gentle=gentle)
    result = run_campaign(reads.Reads, options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["handled"] >= result.counts["messages"] > options.backlog
    assert result.counts["read by another"] > 0


def test_no_message_is_lost_and_each_is_in_one_hand_at_a_time(kafka_broker: RunningKafka) -> None:
    options = sharing.Options(
        messages=4_000,
        kills=3,
        workers=4,
        partitions=2,
        seed=3,
        work_ms=1.0,
        kill_every_s=1.5,
        stop_every_s=3.0,
        operator_every_s=2.0,
        poisons=1,
        most_s=120.0,
    )
    result = run_campaign(sharing.Sharing, options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["kills"] >= 3
    assert result.counts["handled"] >= options.messages


@pytest.mark.parametrize(
    "coordinated", [pytest.param(False, marks=pytest.mark.campaign), True], ids=["claimed", "coordinated"]
)
def test_each_output_is_read_once_and_in_order(kafka_broker: RunningKafka, coordinated: bool) -> None:
    options = transactions.Options(
        kills=8, seed=5, coordinated=coordinated, stop_every_s=1.5, operator_every_s=1.0, most_s=240.0
    )
    result = run_campaign(transactions.Transactions, options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["kills"] >= 8
    assert result.counts["outputs"] >= 100


@pytest.mark.parametrize(
    "kind",
    [x if x == "pieces" else pytest.param(x, marks=pytest.mark.campaign) for x in sorted(checkpoints.KINDS)],
)
def test_states_are_those_of_a_plain_count(kafka_broker: RunningKafka, kind: str) -> None:
    options = checkpoints.Options(
        kills=4,
        seed=5,
        workers=("loop", "run", "batches"),
        partitions=4,
        life_s=3.0,
        most_s=60.0,
        stop_every_s=3.0,
        operator_every_s=1.5,
        deploy_every_s=5.0,
    )
    options = replace(options, **checkpoints.KINDS[kind])
    result = run_campaign(checkpoints.Checkpoints, options, kafka_broker)
    assert isinstance(result, checkpoints.CheckpointsResult)
    assert result.violations == [], result.folder
    assert result.counts["kills"] + result.counts["leaves"] >= 4
    assert result.account.cuts >= 10


def test_members_of_all_kinds_continue_after_a_freeze_of_the_broker(kafka_broker: RunningKafka) -> None:
    with Crowd(kafka_broker.bootstrap_servers, 8, 500) as crowd:
        crowd.begin()
        assert freeze(kafka_broker, crowd, 4.0, limit_s=60.0).late == ()
        assert crowd.failures == []
