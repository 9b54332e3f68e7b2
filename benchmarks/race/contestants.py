"""The contestants and their settings: for each, the best that its protocol offers for the measurement."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kafka_marshal import Marshal

__all__ = ["BEST", "BROKERS", "CLASSIC", "CLASSIC_FAST", "GROUP", "KIP848", "MARSHAL", "Contestant", "Side"]


class Side(StrEnum):
    """How a worker joins."""

    MARSHAL = "marshal"
    GROUP = "group"
    SHARE = "share"
    BYSTANDER = "bystander"


#: Broker name → static settings: a contestant that needs others has a separate broker.
BROKERS: Mapping[str, Mapping[str, str]] = {
    "delay 0": {"group.initial.rebalance.delay.ms": "0"},
    "delay 3 s": {"group.initial.rebalance.delay.ms": "3000"},
    "tuned": {
        "group.initial.rebalance.delay.ms": "0",
        # KIP-848: the broker sets the members' heartbeat interval (5 s) and session timeout (45 s).
        "group.consumer.heartbeat.interval.ms": "100",
        "group.consumer.min.heartbeat.interval.ms": "100",
        "group.consumer.session.timeout.ms": "6000",
        "group.consumer.min.session.timeout.ms": "6000",
        "group.share.heartbeat.interval.ms": "500",
        "group.share.min.heartbeat.interval.ms": "500",
        "group.share.session.timeout.ms": "6000",
        "group.share.min.session.timeout.ms": "6000",
        "group.share.record.lock.duration.ms": "6000",
        "group.share.min.record.lock.duration.ms": "6000",
    },
}

#: A stopped broker must not be fenced from its cluster.
ALL_BROKERS: Mapping[str, str] = {"broker.session.timeout.ms": "86400000", "log.message.timestamp.type": "CreateTime"}

#: librdkafka settings that decide latency, as measured; our clients use the same.
BEST: Mapping[str, object] = {
    "auto.offset.reset": "earliest",
    "fetch.min.bytes": 1,
    "fetch.wait.max.ms": 50,
    "fetch.queue.backoff.ms": 1,
    "socket.nagle.disable": True,
    "reconnect.backoff.ms": 10,
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to share partitions."""

    name: str
    side: Side
    #: Its broker of BROKERS.
    broker: str
    #: librdkafka properties of a peer's consumer.
    config: Mapping[str, object] = field(default_factory=dict)
    #: Arguments of Marshal.
    options: Mapping[str, object] = field(default_factory=dict)
    #: Arguments of Group; empty: a claimed group.
    member: Mapping[str, object] = field(default_factory=dict)

    @property
    def settings(self) -> str:
        """Description of all settings that differ from the default."""
        static = {name: value for name, value in BROKERS[self.broker].items() if self._concerns(name)}
        given = {**static, **self.config, **self.options, **self.member}
        return ", ".join(f"{name}={value}" for name, value in given.items()) or "defaults"

    def _concerns(self, broker_setting: str) -> bool:
        if self.side is Side.SHARE:
            return broker_setting.startswith("group.share")
        if self.config.get("group.protocol") == "consumer":
            return broker_setting.startswith("group.consumer")
        return self.side is Side.GROUP and broker_setting.startswith("group.initial")


def _marshal(name: str, **options: object) -> Contestant:
    return Contestant(name, Side.MARSHAL, "delay 0", options=options)


def _classic(name: str, broker: str, heartbeat_ms: int, **config: object) -> Contestant:
    timeouts = {"session.timeout.ms": 6000, "heartbeat.interval.ms": heartbeat_ms}
    more = {key.replace("_", "."): value for key, value in config.items()}
    return Contestant(name, Side.GROUP, broker, {**BEST, **timeouts, **more})


MARSHAL = _marshal("kafka-marshal")
#: Its session is as long as two heartbeat intervals of a claim and as the classic groups' sessions.
GROUP = Contestant("kafka-marshal, group", Side.MARSHAL, "delay 0", member={"session_timeout": 6.0})
MARSHAL_FAST = _marshal("kafka-marshal, HI 1 s", heartbeat_interval=1.0)
MARSHAL_WATCHED = _marshal("kafka-marshal, watchdog", watchdog=True)
CLASSIC = _classic("classic, delay 0, heartbeat 2 s", "delay 0", 2000)
CLASSIC_SLOW = _classic("classic, delay 3 s, heartbeat 2 s", "delay 3 s", 2000)
CLASSIC_FAST = _classic("classic, delay 0, heartbeat 0.1 s", "delay 0", 100)
COOPERATIVE = _classic(
    "classic cooperative, heartbeat 0.1 s", "delay 0", 100, partition_assignment_strategy="cooperative-sticky"
)
KIP848 = Contestant("KIP-848", Side.GROUP, "delay 0", {**BEST, "group.protocol": "consumer"})
KIP848_FAST = Contestant("KIP-848, tuned broker", Side.GROUP, "tuned", {**BEST, "group.protocol": "consumer"})
BYSTANDER = Contestant("of no group", Side.BYSTANDER, "delay 0")
_SHARE = {"share.acknowledgement.mode": "explicit", "socket.nagle.disable": True}
SHARE = Contestant("share group", Side.SHARE, "delay 0", _SHARE)
SHARE_FAST = Contestant("share group, tuned broker", Side.SHARE, "tuned", _SHARE)


def has_watchdog() -> bool:
    """Whether this release of kafka-marshal has one."""
    return "watchdog" in inspect.signature(Marshal.__init__).parameters
