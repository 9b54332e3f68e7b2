"""The settings of an engine, and the times that the protocol derives from the heartbeat interval (HI).

All times are milliseconds. Log times are ints; times of our own clock are floats, taken from a monotonic clock
that counts suspend (T4).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NoReturn

from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.policies import Policy
from kafka_marshal.types import Start

#: Beats are sent every HI / 3 (T4), so that two in a row may be lost before a lease is no longer proven.
BEATS_PER_INTERVAL = 3
#: What a member may choose: one lost beat must not end a session, and more beats than that only fill the log.
BEATS_WITHIN = (2, 20)

#: The smallest margin: less would be shorter than one scheduling delay (T4).
MARGIN_FLOOR_MS = 20.0

#: Jitter: a waiting client claims an expired lease up to this share of HI late, so that of many clients few do.
EXPIRY_JITTER_SHARE = 0.02

#: Jitter: once caught up, a member asks for the log time of each CP with leases of its group, after up to this share
#: of HI. Another member's record often shows it by then, so of members that start together few ask (T3).
FIRST_TICK_SHARE = 0.01

#: Entries of one HeartbeatBatch. 1,000 entries of the longest ids stay below the 900,000 bytes of L1.
MAX_BATCH_ENTRIES = 1_000

#: The limit of messages in flight of one partition: no more are delivered beyond it. So the intervals between done
#: messages stay below P5's 60,000, in whatever order they are done.
MAX_IN_HAND_MESSAGES = 50_000


#: By default a release waits this long (ms) for the messages in flight. Ranges wait longer: a Spark batch takes
#: minutes.
REVOKE_TIMEOUT_MS = 60_000.0
REVOKE_RANGES_TIMEOUT_MS = 600_000.0


#: If several partitions are held, one partition's turn lasts this long (ms), for messages taken one by one.
TURN_MS = 500.0


@cache
def proof_margin_ms(heartbeat_interval_ms: int) -> float:
    """The margin of T4: max(20 ms, HI / 10)."""
    return max(MARGIN_FLOOR_MS, heartbeat_interval_ms / 10)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The ids of a Marshal, and the partitioning of the coordination topic."""

    group_id: str
    #: Unique within the group at any time; keep it across restarts to keep leases (C7).
    client_id: str
    #: Unique for all time: one per Marshal.
    instance_id: str
    #: Number of partitions of the coordination topic (N of L3).
    coordination_partitions: int
    #: HI of the leases we claim (C2).
    heartbeat_interval_ms: int
    #: The coordination topic, as offsets committed in Kafka name it; "": the usual one (M4).
    log_name: str = ""

    @property
    def ids(self) -> tuple[str, str, str]:
        """The first three fields of each of our records."""
        return self.instance_id, self.client_id, self.group_id


class Why(StrEnum):
    """Why a partition is stuck."""

    UNREADABLE = "unreadable"
    TOO_LARGE = "too large"
    SILENT = "silent"
    NO_LEADER = "no leader"
    POSITION = "position lost"
    TRANSACTION = "no transaction"
    NO_ROOM = "no room"


def _raise(error: BaseException) -> NoReturn:
    raise error


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """A member's policy for checkpoints (X11 to X15)."""

    #: Between two periodic checkpoints; None: there are none.
    every_ms: float | None = 30_000.0
    #: How many of them are kept.
    keep: int = 16
    #: How long a piece waits for its messages in flight; at most nine tenths of the barrier's time.
    drain_ms: float = 10_000.0
    #: How long (log time) a barrier that it begins may take.
    timeout_ms: int = 60_000
    #: A checkpoint is one moment for all members.
    hold: bool = False
    #: Each checkpoint has the state of each piece, also of those in which nothing was done.
    save_all: bool = False
    #: It joins the group as it is, with or without checkpoints.
    adopt: bool = False
    #: Whether there is state to save: the user set on_checkpoint.
    has_callback: bool = False


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a member of a coordinated group joins (G11)."""

    strategy: str
    session_timeout_ms: int
    allow_key_share: bool = False
    #: None: it takes no checkpoints.
    checkpoints: CheckpointOptions | None = None
    #: Heartbeats in a session.
    beats: int = BEATS_PER_INTERVAL


#: Of how many partitions a member has a share by default, if there are more for each.
MAX_SHARES = 64


@dataclass(frozen=True, slots=True)
class SharingOptions:
    """How a consumer shares its partitions by batches (U7, U8)."""

    #: Of how many partitions it has a share at most, if there are more for each worker than half of it.
    max_shares: int = MAX_SHARES
    #: The most messages of a batch, and how long (ms) it may take to handle them.
    max_messages: int = 500
    batch_ms: float = 250.0
    #: A message that was delivered this often, and never done, is set aside (U10).
    max_deliveries: int = 5
    #: Offsets are done before they are delivered.
    at_most_once: bool = False


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The settings of one consumer."""

    at_most_once: bool
    policy: Policy
    #: "earliest", "latest" or a datetime: where the group starts on partitions that it never held (P9).
    start: Start
    batch_size: int
    handler_timeout_ms: float | None
    #: The callbacks that the user set.
    callbacks: frozenset[Callback]
    #: Deliver ranges of offsets instead of messages; nothing is fetched.
    ranges: bool = False
    #: Reasons that the user's next call raises, once, if a partition is stuck; others are only logged and listed.
    raises: frozenset[Why] = frozenset()
    #: Called with what the policy raised: it logs an error, and passes on what a signal raised in it.
    policy_raised: Callable[[BaseException], object] = _raise
    #: At most once: claim the next batch while the previous one is handled.
    claim_ahead: bool = False
    #: At most this many bytes of messages are fetched or in flight.
    max_bytes_in_flight: int = sys.maxsize
    #: How it joins a coordinated group; None: it claims partitions.
    group: GroupOptions | None = None
    #: Each partition is processed in transactions: it is taken over before anything of it is delivered (M2).
    transactions: bool = False
    #: A release waits this long for the messages in flight.
    revoke_timeout_ms: float = REVOKE_TIMEOUT_MS
    #: It shares its partitions by batches; None: it holds them whole.
    sharing: SharingOptions | None = None
    #: The partitions that the program has named, each with ranges (lo, hi) of key hashes, or () for all of it; None:
    #: a policy chooses them.
    keys: tuple[tuple[str, int, tuple[tuple[int, int], ...]], ...] | None = None

    @property
    def shares_keys(self) -> bool:
        """Whether it may have some keys of a partition, and other members the others."""
        by_group = self.group is not None and self.group.allow_key_share
        return by_group or any(spans for _, _, spans in self.keys or ())
