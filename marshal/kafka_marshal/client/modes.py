"""How members share the partitions out (``mode=``), and other options that belong together: one value for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final, get_args

from kafka_marshal import arguments
from kafka_marshal.engine.key_share import Span
from kafka_marshal.engine.policies import Balanced, Policy
from kafka_marshal.engine.settings import BEATS_PER_INTERVAL, BEATS_WITHIN, MAX_SHARES
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.types import Key, Strategy
from rationalizer.limits import MAX_KEY_HASH, MAX_SESSION_TIMEOUT_MS, MIN_SESSION_TIMEOUT_MS

#: A little longer than two heartbeat intervals of a lease: after a death, its member's partitions move.
DEFAULT_SESSION_TIMEOUT_S: Final = 10.0

#: The default of a transaction's timeout (s), and the least; the brokers' ``transaction.max.timeout.ms`` is the most.
TRANSACTION_TIMEOUT_S: Final = 60.0
LEAST_TRANSACTION_TIMEOUT_S: Final = 1.0

#: The default of ``max_producers``: 256 threads, 512 descriptors and 32 MB.
MOST_TRANSACTIONAL_PRODUCERS: Final = 64

_ONLY_GROUPS = "only the members of a coordinated group take checkpoints, all together. Use mode=Group(…)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Each member claims whole partitions in the log, and releases some, as its policy decides. The default.

    ``policy``: which partitions to claim, and which to leave to others. None: :class:`Balanced`, the same share for
    each member.

    ``claim_ahead=True`` (only for ``delivery="at-most-once"``): the next batch is claimed while one is handled. A crash
    loses up to two, ``close()`` both in part.
    """

    policy: Policy | None = None
    claim_ahead: bool = False
    #: Option of a consumer → why it is not possible, and what to do instead.
    cannot: ClassVar[Mapping[str, str]] = {"checkpoints": _ONLY_GROUPS}

    def __post_init__(self) -> None:
        policy = Balanced() if self.policy is None else self.policy
        if not isinstance(policy, Policy):
            raise arguments.wrong("policy", "a Policy such as Balanced()", policy)
        if type(policy).wishes is Policy.wishes and type(policy).refine is Policy.refine:
            raise arguments.wrong("policy", "of a class that overrides wishes()", policy)
        arguments.a_flag("claim_ahead", self.claim_ahead)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A member of a coordinated group: the group assigns partitions, and moves as few as possible.

    In a rebalance, partitions that stay with a member never pause; those that move are finished, committed and
    released. With the same ``client_id``, a restart moves nothing. A Marshal with such a consumer has no other
    consumer. The coordination topic must be at level 2. If the group refuses this member (another strategy, a claimed
    group, a session that is too long …), its next call raises a GroupError.

    ``strategy``: ``"sticky"``, ``"range"`` or ``"roundrobin"``, the same for all members (KIP-54 and Kafka's
    assignors).

    ``session_timeout`` (seconds, from 0.1 to what the group's settings allow, 1,800 by default): a member that is
    silent for longer is replaced.

    ``beats``: heartbeats in a session, from 2 to 20. More survive more of them that get lost, or come late; fewer cost
    less. What is done is committed with them, so that more of them also mean fewer repeats after a crash.

    ``allow_key_share=True``: members may share a partition, each with some of its keys; docs/groups.md.

    ``mirror_offsets=True``: progress is also committed to the Kafka group of the same name, without joining it, every
    few seconds, so that Kafka's own tools show the group's lag. This overwrites what that group has committed.
    """

    strategy: Strategy = "sticky"
    session_timeout: float = DEFAULT_SESSION_TIMEOUT_S
    beats: int = BEATS_PER_INTERVAL
    allow_key_share: bool = False
    mirror_offsets: bool = False
    cannot: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        arguments.one_of("strategy", self.strategy, get_args(Strategy))
        arguments.seconds_within(
            "session_timeout", self.session_timeout, MIN_SESSION_TIMEOUT_MS / 1000, MAX_SESSION_TIMEOUT_MS / 1000
        )
        arguments.a_whole("beats", self.beats, *BEATS_WITHIN)
        arguments.a_flag("allow_key_share", self.allow_key_share)
        arguments.a_flag("mirror_offsets", self.mirror_offsets)

    @property
    def session_timeout_ms(self) -> int:
        """The session timeout as records have it."""
        return round(self.session_timeout * 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Many members work on one partition, each on a batch of it that the log gives to it: docs/sharing.md.

    ``max_shares``: of how many partitions this member has a share at most, if there are more for each.
    """

    max_shares: int = MAX_SHARES
    cannot: ClassVar[Mapping[str, str]] = {
        "exactly_once": "Kafka keeps one offset for a partition, and sharers are at many places. Leave it out",
        "checkpoints": _ONLY_GROUPS,
    }

    def __post_init__(self) -> None:
        arguments.a_whole("max_shares", self.max_shares, 1)


@dataclass(frozen=True, slots=True)
class Keys:
    """Exactly these partitions, or some of their keys.

    ``partitions``: (topic, partition) → ranges (lo, hi) of key hashes (``rationalizer.key_hash``: 0 … 2**63 − 1, both
    included), or ``[]`` for the whole partition. ``Keys({("orders", 0): [(0, 2**62 - 1)]})`` works on half of the keys;
    another process takes the other half.

    Each range is claimed in the log, so two processes never work on one key at a time: while another member has some
    of the keys, this one waits, and takes over when they are released, or their owner is silent for two heartbeat
    intervals. Of a partition with several ranges, work begins when all of them are there. To change ranges, close the
    consumer and make another one. Each key is in order. Progress, tries and parked messages are kept by key. The
    coordination topic must be at level 4.

    Raises ConfigurationError for ranges that overlap, and for what can't be claimed.
    """

    partitions: Mapping[Key, Sequence[Span]]
    cannot: ClassVar[Mapping[str, str]] = {
        "delivery": "a batch is claimed of a whole partition. Use mode=Claims()",
        "exactly_once": "Kafka keeps one offset for a partition, not one for some of its keys. Use mode=Claims(), "
        "which holds partitions whole; run(…, order='key') handles many keys of one",
        "checkpoints": _ONLY_GROUPS,
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "partitions", checked_keys(self.partitions))

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of these partitions."""
        return tuple(dict.fromkeys(topic for topic, _ in self.partitions))

    @property
    def topics_in_part(self) -> list[str]:
        """Topics of which only some keys are named."""
        return [topic for (topic, _), spans in self.partitions.items() if spans]


Mode = Claims | Group | Batches | Keys

MODES: Final = "Claims(…), Group(…), Batches(…) or Keys({…})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transactions:
    """What is produced and progress are committed to Kafka together: docs/transactions.md.

    ``timeout`` (seconds, at least 1): the brokers end a transaction that is open for longer.

    ``max_producers``: how many transactional producers are kept at most, one for a partition (4 threads, 8
    descriptors, 0.5 MB each).
    """

    timeout: float = TRANSACTION_TIMEOUT_S
    max_producers: int = MOST_TRANSACTIONAL_PRODUCERS

    def __post_init__(self) -> None:
        if arguments.seconds("timeout", self.timeout) < LEAST_TRANSACTION_TIMEOUT_S:
            raise arguments.wrong("timeout", "at least 1 second", self.timeout)
        arguments.a_whole("max_producers", self.max_producers, 1)


def checked_keys(partitions: object) -> dict[Key, tuple[Span, ...]]:
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
    return dict(sorted(found.items()))


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
