"""The worker loop of each side: records one by one; only the client library differs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, ShareConsumer, TopicPartition

# Imported before any measurement: Marshal imports the adapter only in its constructor.
import kafka_marshal.adapters.kafka
from benchmarks.race.contestants import BEST
from benchmarks.race.sight import Sight
from kafka_marshal import Marshal

__all__ = ["Loop", "loop_for"]

#: A peer's poll time-out, after which it checks for its end.
POLL_S = 0.05


class Loop:
    """One worker: made (within the measured time), run on its own thread, closed from another."""

    def run(self) -> None:
        """Take records until closed."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave; returns when that is done."""
        raise NotImplementedError


class MarshalLoop(Loop):
    """Ours: plain iteration, at least once."""

    def __init__(self, sight: Sight, order: Mapping[str, Any]) -> None:
        self._sight = sight
        self._marshal = Marshal(
            order["bootstrap"],
            group_id=order["group"],
            client_id=order["client"],
            topic=order["coordination"],
            **order["options"],
        )
        make: Any = self._marshal.consumer
        # benchmarks.against runs this with older trees, too, which have no modes: to claim is the default.
        mode = {"mode": kafka_marshal.Group(**order["member"])} if order["member"] else {}
        self._consumer = make(
            order["topics"],
            **mode,
            on_assign=lambda _, found: sight.gained([x.partition for x in found]),
            on_revoke=lambda _, found: sight.lost([x.partition for x in found]),
            on_lost=lambda _, found: sight.lost([x.partition for x in found]),
        )

    def run(self) -> None:
        saw = self._sight.saw
        for message in self._consumer:
            saw(message.partition() or 0, message.offset() or 0)

    def close(self) -> None:
        self._marshal.close()


class GroupLoop(Loop):
    """Classic and KIP-848 groups: subscribe and poll."""

    def __init__(self, sight: Sight, order: Mapping[str, Any]) -> None:
        self._sight = sight
        self._ending: list[Callable[[], None]] = []
        self._ended = sight.event()
        config = {"bootstrap.servers": order["bootstrap"], "group.id": order["group"], "client.id": order["client"]}
        self._consumer = Consumer({**config, **order["config"]})
        self._consumer.subscribe(
            order["topics"],
            on_assign=lambda _, found: sight.gained([x.partition for x in found]),
            on_revoke=lambda _, found: sight.lost([x.partition for x in found]),
            on_lost=lambda _, found: sight.lost([x.partition for x in found]),
        )

    def run(self) -> None:
        saw, poll = self._sight.saw, self._consumer.poll
        while not self._ending:
            message = poll(POLL_S)
            if message is not None and message.error() is None:
                saw(message.partition() or 0, message.offset() or 0)
        self._ending[0]()
        self._consumer.close()
        self._ended.set()

    def close(self) -> None:
        # By the polling thread, as the library requires; time starts when that thread gets to it.
        self._ending.append(self._sight.closing)
        self._ended.wait(30)


class ShareLoop(Loop):
    """A share group: poll and acknowledge explicitly, or hold the first records for ever (order["hold"])."""

    def __init__(self, sight: Sight, order: Mapping[str, Any]) -> None:
        self._sight = sight
        self._hold = bool(order.get("hold"))
        self._ending: list[bool] = []
        self._ended = sight.event()
        config = {"bootstrap.servers": order["bootstrap"], "group.id": order["group"], "client.id": order["client"]}
        self._consumer = ShareConsumer({**config, **order["config"]})
        self._consumer.subscribe(order["topics"])

    def run(self) -> None:
        while not self._ending:
            good = [message for message in self._consumer.poll(POLL_S) if message.error() is None]
            for message in good:
                offset = message.offset() or 0
                self._sight.saw(offset, offset)  # a share group distributes messages, not partitions: watch offsets
            if good and self._hold:
                break
            for message in good:
                self._consumer.acknowledge(message)
            if good:
                self._consumer.commit_async()
        while not self._ending:
            self._ended.wait(POLL_S)
        with contextlib.suppress(Exception):  # held messages stay unacknowledged
            self._consumer.close()
        self._ended.set()

    def close(self) -> None:
        self._ending.append(True)
        self._ended.wait(30)


class BystanderLoop(Loop):
    """A reader without a group of these partitions from their ends. Its delays are the broker's."""

    def __init__(self, sight: Sight, order: Mapping[str, Any]) -> None:
        self._sight = sight
        self._consumer = Consumer(
            {"bootstrap.servers": order["bootstrap"], "group.id": "of nobody", **BEST, "enable.auto.commit": False}
        )
        [topic] = order["topics"]
        self._consumer.assign([TopicPartition(topic, x, OFFSET_END) for x in order["partitions"]])

    def run(self) -> None:
        saw, poll = self._sight.saw, self._consumer.poll
        while True:
            message = poll(POLL_S)
            if message is not None and message.error() is None:
                saw(message.partition() or 0, message.offset() or 0)

    def close(self) -> None:
        """Its process is killed."""


_LOOPS: Mapping[str, Callable[[Sight, Mapping[str, Any]], Loop]] = {
    "marshal": MarshalLoop,
    "group": GroupLoop,
    "share": ShareLoop,
    "bystander": BystanderLoop,
}


def loop_for(side: str, sight: Sight, order: Mapping[str, Any]) -> Loop:
    """A worker of that side, constructed now."""
    return _LOOPS[side](sight, order)


def sides() -> Sequence[str]:
    """Who can run here."""
    return tuple(_LOOPS)
