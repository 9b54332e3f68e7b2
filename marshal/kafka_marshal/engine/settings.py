"""What an engine is told once, and the times the protocol derives from the heartbeat interval (HI).

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

__all__ = [
    "BEATS_PER_INTERVAL",
    "EXPIRY_JITTER_SHARE",
    "FIRST_TICK_SHARE",
    "MARGIN_FLOOR_MS",
    "MAX_BATCH_ENTRIES",
    "MAX_IN_HAND_MESSAGES",
    "REVOKE_RANGES_TIMEOUT_MS",
    "REVOKE_TIMEOUT_MS",
    "TURN_MS",
    "ConsumerSettings",
    "EngineSettings",
    "GroupOptions",
    "Why",
    "proof_margin_ms",
]

#: Beats go out every HI / 3 (T4), so that two in a row may be lost before a lease turns unknown.
BEATS_PER_INTERVAL = 3

#: Below 20 ms a margin would be less than what one scheduling hiccup takes (T4).
MARGIN_FLOOR_MS = 20.0

#: A waiting client claims an expired lease up to this share of HI late, at random, so that a fleet appends few.
EXPIRY_JITTER_SHARE = 0.02

#: Who has caught up asks how late it is in every CP where the group holds something, after up to this share of HI: most
#: often somebody's record has told by then, and of a fleet that starts together few ask (T3).
FIRST_TICK_SHARE = 0.01

#: Entries of one HeartbeatBatch. 1,000 entries of the longest ids stay below the 900,000 bytes of L1.
MAX_BATCH_ENTRIES = 1_000

#: Messages handed out and not done, of one partition. Beyond it nothing more of that partition is handed out, so
#: that the intervals between them stay below P5's 60,000, however they are done.
MAX_IN_HAND_MESSAGES = 50_000


#: A partition that is let go waits this long for what is in hand, unless the user says otherwise. Ranges take longer:
#: a round of Spark's is minutes.
REVOKE_TIMEOUT_MS = 60_000.0
REVOKE_RANGES_TIMEOUT_MS = 600_000.0


#: A partition that threads take messages of one by one has its turn for this long (ms) while others are held, too.
TURN_MS = 500.0


@cache
def proof_margin_ms(heartbeat_interval_ms: int) -> float:
    """The margin of T4: max(20 ms, HI / 10)."""
    return max(MARGIN_FLOOR_MS, heartbeat_interval_ms / 10)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Who we are, and how the coordination topic is cut."""

    group_id: str
    #: Unique within the group at a time; stable over restarts if leases are to be kept over them (C7).
    client_id: str
    #: Unique for ever: one per Marshal.
    instance_id: str
    #: Number of partitions of the coordination topic (N of L3).
    coordination_partitions: int
    #: HI of the leases we claim (C2).
    heartbeat_interval_ms: int

    @property
    def ids(self) -> tuple[str, str, str]:
        """What every record of ours begins with."""
        return self.instance_id, self.client_id, self.group_id


class Why(StrEnum):
    """Why a partition stands still."""

    UNREADABLE = "unreadable"
    TOO_LARGE = "too large"
    SILENT = "silent"
    NO_LEADER = "no leader"
    POSITION = "position lost"


def _raise(error: BaseException) -> NoReturn:
    raise error


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a member of a coordinated group joins (G11)."""

    strategy: str
    session_timeout_ms: int
    allow_key_share: bool = False


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """What a consumer was asked for."""

    at_most_once: bool
    policy: Policy
    #: "earliest", "latest" or a datetime: where the group begins on partitions it never held (P9).
    start: Start
    batch_size: int
    handler_timeout_ms: float | None
    #: Which callbacks the user gave.
    callbacks: frozenset[Callback]
    #: Ranges of offsets are handed out, not messages; nothing is fetched.
    ranges: bool = False
    #: Why a partition may stand still so that the user's next call raises it, once; all else is only logged and listed.
    raises: frozenset[Why] = frozenset()
    #: Called with what the policy raised: to log it, and to pass on what a signal raised in it.
    policy_raised: Callable[[BaseException], object] = _raise
    #: At most once: claim a batch while the one before it is handled.
    claim_ahead: bool = False
    #: Bytes of messages that are fetched, and in hand, at a time.
    max_bytes_in_flight: int = sys.maxsize
    #: As a member of a coordinated group; None: partitions are claimed.
    group: GroupOptions | None = None
    #: A partition that is let go waits this long for what is in hand.
    revoke_timeout_ms: float = REVOKE_TIMEOUT_MS
