"""The text that Prometheus scrapes: names, types, and the values of Marshal.metrics()."""

from __future__ import annotations

import re
from itertools import islice

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from kafka_marshal import Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.metrics import MarshalCollector
from kafka_marshal.metrics.rows import CATALOGUE
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, TOPIC, member
from tests.metrics.conftest import PARTITIONS, get

#: By OpenTelemetry's conventions where they exist; users' dashboards and alerts depend on them.
NAMES = {
    "kafka_consumer_group_lag",
    "kafka_consumer_group_members",
    "kafka_consumer_group_offset",
    "kafka_marshal_buffered_messages",
    "kafka_marshal_checkpoint_age_seconds",
    "kafka_marshal_checkpoints_total",
    "kafka_marshal_drain_seconds",
    "kafka_marshal_drain_seconds_max",
    "kafka_marshal_oldest_cut_seconds",
    "kafka_marshal_restore_seconds",
    "kafka_marshal_restores_total",
    "kafka_marshal_save_seconds",
    "kafka_marshal_claim_duration_seconds",
    "kafka_marshal_dead_letters_total",
    "kafka_marshal_done_too_late_total",
    "kafka_marshal_handler_failures_total",
    "kafka_marshal_handlers_running",
    "kafka_marshal_runs_failing",
    "kafka_marshal_stuck_partitions",
    "kafka_marshal_handover_gap_seconds",
    "kafka_marshal_held_back_partitions",
    "kafka_marshal_in_hand_messages",
    "kafka_marshal_lease_remaining_seconds",
    "kafka_marshal_leases",
    "kafka_marshal_log_behind_records",
    "kafka_marshal_needs_restart",
    "kafka_marshal_held_back_messages",
    "kafka_marshal_hot_key_share",
    "kafka_marshal_shared_read_bytes",
    "kafka_marshal_shared_reads_total",
    "kafka_marshal_open_messages",
    "kafka_marshal_parked_messages",
    "kafka_marshal_shares",
    "kafka_marshal_acquires_total",
    "kafka_marshal_settled_messages_total",
    "kafka_marshal_redelivered_messages_total",
    "kafka_marshal_paused",
    "kafka_marshal_processed_messages_total",
    "kafka_marshal_ready",
    "kafka_marshal_records_total",
    "kafka_marshal_replica_alarms_total",
    "kafka_marshal_log_records",
    "kafka_marshal_log_oldest_age_seconds",
    "kafka_marshal_log_not_pruned",
    "kafka_marshal_retries_total",
    "kafka_marshal_time_lag_seconds",
    "kafka_marshal_transaction_duration_seconds",
    "kafka_marshal_transactions_total",
    "kafka_marshal_transactions_waiting",
    "kafka_marshal_turned_ago_seconds",
    "messaging_client_consumed_messages_total",
    "messaging_process_duration_seconds",
}


def test_the_names() -> None:
    assert {metric.prometheus for metric in CATALOGUE} == NAMES
    assert len({metric.name for metric in CATALOGUE}) == len(CATALOGUE)
    for metric in CATALOGUE:
        assert re.fullmatch(r"[a-z][a-z0-9_.]*", metric.name)
        assert metric.help.endswith(".")
        assert metric.name.startswith(("messaging.", "kafka.consumer_group.", "kafka_marshal."))


def scraped(marshal: Marshal, accept: str = "") -> dict[str, Family]:
    page = get(marshal.serve(0), "/metrics", Accept=accept)
    assert page.status == 200
    read = parse_openmetrics if "openmetrics" in page.headers["Content-Type"] else parse
    return {family.name: family for family in read(page.text)}


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_it_is_parsed_and_holds_what_metrics_says(marshal: Marshal, accept: str) -> None:
    with marshal.consumer([TOPIC]) as consumer:
        wait_until(lambda: sum(one.lag is not None for one in marshal.metrics().partitions) == PARTITIONS)
        for _ in islice(consumer, 20):
            pass
        found, now = scraped(marshal, accept), marshal.metrics()
        labels = {"group": GROUP, "client_id": "a"}

        def of(name: str) -> dict[str, float]:
            return {sample.labels["partition"]: sample.value for sample in found[name].samples}

        assert of("kafka_consumer_group_lag") == {str(one.partition): one.lag for one in now.partitions}
        assert found["kafka_marshal_leases"].samples[0].value == PARTITIONS
        assert found["kafka_marshal_leases"].samples[0].labels == labels
        consumed = found["messaging_client_consumed_messages"]
        assert consumed.type == "counter"
        assert sum(s.value for s in consumed.samples) == sum(one.consumed for one in now.messages)
        assert consumed.samples[0].labels.keys() == {
            "messaging_system",
            "messaging_operation_name",
            "messaging_consumer_group_name",
            "messaging_client_id",
            "messaging_destination_name",
            "messaging_destination_partition_id",
        }
        claims = {s.name.rpartition("_")[2]: s.value for s in found["kafka_marshal_claim_duration_seconds"].samples}
        assert claims["count"] == claims["bucket"] == PARTITIONS
        records = {(s.labels["type"], s.labels["outcome"]) for s in found["kafka_marshal_records"].samples}
        assert ("ClaimingPartition", "OK") in records
        series = {sample.name for family in found.values() for sample in family.samples}
        assert series <= {name for metric in CATALOGUE for name in metric.series}


def test_several_marshals_in_a_registry_of_one_s_own(cluster: MemoryCluster) -> None:
    first, second = member(cluster, "a"), member(cluster, "b")
    with first, second:
        registry = CollectorRegistry()
        registry.register(MarshalCollector(first, second))
        families = {family.name: family for family in parse(generate_latest(registry).decode())}
        assert {sample.labels["client_id"] for sample in families["kafka_marshal_ready"].samples} == {"a", "b"}


def test_registering_twice_is_refused(marshal: Marshal) -> None:
    registry = CollectorRegistry()
    registry.register(MarshalCollector(marshal))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(MarshalCollector(marshal))
