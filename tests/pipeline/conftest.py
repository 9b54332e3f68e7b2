"""The scenes of the client's tests, for Spark."""

from __future__ import annotations

from kafka_marshal import RangeConsumer
from tests.client.conftest import scene, wait_until
from tests.spark_cluster import cluster

__all__ = ["cluster", "scene", "wait_until_takeable"]


def wait_until_takeable(consumer: RangeConsumer, partitions: int) -> None:
    """Until there are ranges of that many partitions: assignment() names one before its on_assign has returned."""

    def takeable() -> bool:
        with consumer._driver.lock.locked(step=False):
            return len(consumer._delivery.open(consumer._driver.now_ms())) == partitions

    wait_until(takeable, what=f"{partitions} partitions can be taken")
