"""Which cluster each bootstrap address belongs to.

librdkafka takes whichever address answers first. If a list names brokers of two clusters, some clients of one
process, and some members of one group, would work on the one and the rest on the other: each log consistent in itself,
and every partition with two owners.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kafka_marshal.adapters.kafka.errors import Troubles
from kafka_marshal.secret import values_of

#: An address that has not answered for this long counts as down, and can't mislead anyone.
ANSWER_S = 10.0

#: A wait looks up this often for what librdkafka says of its connection.
LOOK_S = 0.05


class AddressCheck:
    """Asks every address on a separate thread; those that are down are not awaited."""

    def __init__(self, addresses: Sequence[str], properties: Mapping[str, object]) -> None:
        self._properties = dict(properties)
        self._ids: dict[str, str] = {}
        self._threads = [
            threading.Thread(target=self._ask, args=(address,), name="kafka-marshal-address", daemon=True)
            for address in addresses
        ]
        for thread in self._threads:
            thread.start()

    def ids(self, wait_s: float) -> dict[str, str]:
        """Cluster ids by address, of those that answered within wait_s from now."""
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return dict(self._ids)

    def _ask(self, address: str) -> None:
        troubles = Troubles(secrets=values_of(self._properties))
        settings = {**self._properties, "bootstrap.servers": address, "logger": troubles, "error_cb": troubles}
        try:
            admin = AdminClient(cast("dict[str, Any]", settings))
            deadline = time.monotonic() + ANSWER_S
            while time.monotonic() < deadline and troubles.recent() is None:
                if cluster_id := _cluster_id(admin):
                    self._ids[address] = cluster_id
                    return
        except (KafkaException, ValueError, TypeError):
            return  # the cluster's own client reports the same, to a caller that can act on it


def _cluster_id(admin: AdminClient) -> str | None:
    try:
        return admin.cluster_id(LOOK_S) or None
    except KafkaException:
        return None  # not connected yet
    finally:
        admin.poll(0)
