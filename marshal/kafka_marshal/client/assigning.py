"""Partitions that the program names itself: ``assign`` for consumers, and ``claim`` for leases without one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from kafka_marshal import arguments
from kafka_marshal.client.base import check_partitions
from kafka_marshal.client.consumer import DEFAULT_BATCH_SIZE, Consumer, PartitionsCallback
from kafka_marshal.client.lease import Lease, serve_claim
from kafka_marshal.client.options import DEFAULT_BYTES_IN_FLIGHT, ConsumerOptions, checked_topics
from kafka_marshal.engine.key_share import Span
from kafka_marshal.errors import ConfigurationError, KeyRangeError
from kafka_marshal.types import Key, Start, WhenStuck
from rationalizer.limits import MAX_KEY_HASH

if TYPE_CHECKING:
    from kafka_marshal.node.driver import Driver

M = TypeVar("M")

#: What has another form: argument → why, and what to do instead.
_ELSEWHERE = {
    "policy": "assign(…) names the partitions, and a policy would choose them. Leave out policy=; consumer(topics, "
    "policy=…) has one",
    "transactions": "Kafka keeps one offset for a partition, not one for some of its keys. Use consumer(topics, "
    "transactions=True), which holds partitions whole; run(…, order='key', transactions=True) handles many keys of one",
    "shared_batches": "keys and batches are two ways to share a partition, and exclude each other. Use "
    "consumer(topics, shared_batches=True)",
    "claim_ahead": "it is for delivery='at-most-once', which consumer(topics) has. Leave it out",
}


class Assigning:
    """The part of a Marshal that works on what the program names."""

    if TYPE_CHECKING:
        topic: str
        _driver: Driver

        def _made(self, make: Callable[[], Consumer]) -> Consumer: ...

        def _check_open(self) -> None: ...

    def _keep_order(self, topics: object) -> None:
        """Share no partition of these topics."""
        names = arguments.several("ordered_topics", topics, "a list of topics")
        self._ordered = frozenset(arguments.text("ordered_topics", name, "a list of topics") for name in names)

    def _share_reads(self, max_bytes: object) -> None:
        """Keep at most this much for other members of this process that read the same (U13)."""
        self.max_bytes_shared_reads: int = arguments.a_whole("max_bytes_shared_reads", max_bytes, 0)

    def assign(
        self,
        partitions: Mapping[Key, Sequence[Span]],
        *,
        start: Start = "earliest",
        batch_size: int = DEFAULT_BATCH_SIZE,
        handler_timeout: float | None = None,
        revoke_timeout: float | None = None,
        auto_done: bool = True,
        max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
        position_lost: WhenStuck = "leave",
        partition_stuck: WhenStuck = "leave",
        on_assign: PartitionsCallback | None = None,
        on_revoke: PartitionsCallback | None = None,
        on_lost: PartitionsCallback | None = None,
        config: Mapping[str, object] | None = None,
        **elsewhere: Any,
    ) -> Consumer:
        """A consumer of exactly these partitions, or of some of their keys.

        ``partitions``: (topic, partition) → ranges (lo, hi) of key hashes (``rationalizer.key_hash``: 0 … 2**63 − 1,
        both included), or ``[]`` for the whole partition. ``assign({("orders", 0): [(0, 2**62 - 1)]})`` works on
        half of the keys; another process takes the other half.

        Each range is claimed in the log, so two processes never work on one key at a time: while another member has
        some of the keys, this one waits, and takes over when they are released, or their owner is silent for two
        heartbeat intervals. Of a partition with several ranges, work begins when all of them are there. To change
        ranges, close the consumer and make another one.

        The other arguments are those of :meth:`consumer`; ``start`` is where the group begins on a partition that no
        member ever held, for all keys. Each key is in order. Progress, tries and parked messages are kept by key.

        Raises KeyRangeError for ranges of a topic of ``Marshal(ordered_topics=…)`` (89), ConfigurationError for what
        is not possible here (a policy, transactions, shared batches, at most once), for ranges that overlap, and if
        the coordination topic is below level 4.
        """
        for name in elsewhere:
            if name != "delivery" and name not in _ELSEWHERE:
                raise TypeError(f"assign() got an unexpected keyword argument {name!r}")
        delivery = arguments.one_of("delivery", elsewhere.pop("delivery", "at-least-once"), _DELIVERIES)
        if delivery == "at-most-once":
            raise _refused("delivery='at-most-once'", "a batch is claimed of a whole partition. Use consumer(topics)")
        for name, value in elsewhere.items():
            if value:
                raise _refused(f"{name}=", _ELSEWHERE[name])
        named = checked_ranges(partitions)
        topics = tuple(dict.fromkeys(topic for topic, _ in named))
        if any(named.values()):
            check_order(self._ordered, [topic for (topic, _), spans in named.items() if spans], "assign(…) with ranges")
        options = ConsumerOptions.checked(
            checked_topics(topics, self.topic),
            delivery="at-least-once",
            start=start,
            batch_size=batch_size,
            handler_timeout=handler_timeout,
            revoke_timeout=revoke_timeout,
            auto_done=auto_done,
            max_bytes_in_flight=max_bytes_in_flight,
            position_lost=position_lost,
            partition_stuck=partition_stuck,
            callbacks={"on_assign": on_assign, "on_revoke": on_revoke, "on_lost": on_lost},
        )
        keys = tuple((*key, spans) for key, spans in sorted(named.items()))
        chosen = replace(options, settings=replace(options.settings, keys=keys))
        settings = arguments.a_mapping("config", config)
        return self._made(lambda: AssignedConsumer(self, self._driver, chosen, settings))  # type: ignore[arg-type]

    def claim(self, topic: str, partition: int, timeout: float = 5.0) -> Lease:
        """Claim one lease by hand; wait up to timeout seconds until it is free.

        ``topic`` need not exist: then the lease is on its name alone. If it exists, so must the partition. Raises
        HeldError (it names the holder), GroupPausedError, ClaimTimeoutError (the log did not answer, or does not show
        our own release yet), UpgradeRequiredError (that part of the log needs a newer release), or ConfigurationError
        if this Marshal holds it already, or the topic has no such partition.
        """
        arguments.text("topic", topic)
        partition = arguments.a_whole("partition", partition, 0, arguments.MOST_PARTITION)
        timeout = arguments.seconds("timeout", timeout)
        self._check_open()

        def serve(is_gone: Callable[[], bool], topic: str, partition: int, timeout: float) -> Lease:
            lease = serve_claim(self._driver, is_gone, topic, partition, timeout)
            lease._keeps = self
            return lease

        answer = self._driver.servants.ask(serve, topic, partition, timeout, undo=Lease.release)
        try:
            lease = answer.wait()
            answer.receipt.out = True; return lease  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException:
            answer.receipt.left = True
            raise


_DELIVERIES = ("at-least-once", "at-most-once")


class AssignedConsumer(Consumer):
    """A consumer of the partitions, or the keys, that the program has named. Made by :meth:`Marshal.assign`."""

    def _enter(self, *of: Any) -> None:
        self._driver.read_all()
        self._require_sharing_level("assign(…)")
        super()._enter(*of)
        subscription = self._engine.subscription
        exist = {topic for topic, _ in subscription.partitions}
        try:
            named = self._options.settings.keys or ()
            check_partitions(subscription, [(topic, number) for topic, number, _ in named if topic in exist])
        except ConfigurationError:
            self._free()
            raise


def _refused(what: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{what} is not possible with assign(…): {why}. Nothing was claimed")


def checked_ranges(partitions: object) -> dict[Key, tuple[Span, ...]]:
    """Ranges by partition, ascending; raises ConfigurationError for what can't be claimed."""
    wanted = "a mapping from (topic, partition) to a list of ranges (lo, hi) of key hashes, [] for the whole partition"
    if not isinstance(partitions, Mapping) or not partitions:
        raise arguments.wrong("partitions", wanted, partitions, "Nothing was claimed")
    found: dict[Key, tuple[Span, ...]] = {}
    for key, ranges in partitions.items():
        ((topic, number),) = arguments.partitions("partitions", [key])
        if not isinstance(ranges, Sequence) or isinstance(ranges, str | bytes):
            raise arguments.wrong("partitions", wanted, partitions, "Nothing was claimed")
        found[topic, number] = _disjoint((topic, number), sorted(_checked(each) for each in ranges))
    return found


def _checked(span: object) -> Span:
    if not isinstance(span, Sequence) or isinstance(span, str | bytes) or len(span) != 2:
        raise arguments.wrong("a range of key hashes", "(lo, hi), both included", span, "Nothing was claimed")
    lo, hi = (arguments.a_whole("a key hash", each, 0, MAX_KEY_HASH) for each in span)
    if lo > hi:
        raise arguments.wrong("a range of key hashes", "(lo, hi) with lo ≤ hi", span, "Nothing was claimed")
    return lo, hi


def _disjoint(key: Key, spans: list[Span]) -> tuple[Span, ...]:
    for before, span in pairwise(spans):
        if span[0] <= before[1]:
            raise ConfigurationError(
                f"{key[0]} [{key[1]}]: the ranges {before} and {span} have keys in common: this process would wait for "
                "itself. Nothing was claimed. Both ends of a range are included: (0, 9), (10, 19)"
            )
    return tuple(spans)


def check_order(ordered: frozenset[str], topics: Sequence[str], what: str) -> None:
    """Raises KeyRangeError (89) if one of these topics, or of those that a pattern matches, keeps the order."""
    patterns = [topic for topic in topics if topic.startswith("^")]
    kept = sorted(name for name in ordered if name in topics or any(re.match(each, name) for each in patterns))
    if kept:
        raise KeyRangeError(
            f"{what} is not possible for {', '.join(kept)}: Marshal(ordered_topics=…) says that the order of its "
            "partitions counts, and members that share one keep it by key at most. Nothing was claimed. Hold "
            "partitions whole (consumer(topics)), or take the topic out of ordered_topics",
            kip_number=89,
        )
