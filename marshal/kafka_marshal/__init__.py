"""kafka-marshal: worker processes share out Kafka partitions among themselves, with nothing but Kafka.

Start with :class:`Marshal`. The protocol is in docs/protocol, the way through the code in ARCHITECTURE.md.
"""

from typing import TYPE_CHECKING

from kafka_marshal.instance import release
from rationalizer.later import later

if TYPE_CHECKING:
    from kafka_marshal import errors
    from kafka_marshal.adapters.message import Message
    from kafka_marshal.admin import Admin, InHand, Move, Pause, PausedPartition
    from kafka_marshal.checkpoints import Checkpoint, CheckpointPolicy, Restore
    from kafka_marshal.client.attempt import Attempt
    from kafka_marshal.client.batch import Batch
    from kafka_marshal.client.committing import Transaction
    from kafka_marshal.client.consumer import Consumer
    from kafka_marshal.client.dead_letters import DeadLetter, mark_repeats
    from kafka_marshal.client.group_consumer import GroupConsumer, MemberPiece
    from kafka_marshal.client.handling import Hooks, Retry, RetryAfter
    from kafka_marshal.client.health import Health
    from kafka_marshal.client.in_batches import MessagesFailedError
    from kafka_marshal.client.lease import ClaimedLease
    from kafka_marshal.client.locks import Leader
    from kafka_marshal.client.marshal import Marshal
    from kafka_marshal.client.modes import Batches, Claims, Group, Keys, Transactions
    from kafka_marshal.client.ranges import GroupRangeConsumer, RangeConsumer
    from kafka_marshal.client.rates import Rate
    from kafka_marshal.client.shared import ShareConsumer, SharedBatch
    from kafka_marshal.client.view import WorldView
    from kafka_marshal.engine.policies import (
        Balanced,
        Greedy,
        MaxClaims,
        Policy,
        ReleaseIfBehind,
        WholeTopic,
    )
    from kafka_marshal.engine.work.lane import HeldBack
    from kafka_marshal.engine.work.ranges import OffsetRange
    from kafka_marshal.engine.work.stuck import Stuck
    from kafka_marshal.errors import (
        AdminError,
        ArchiveError,
        CheckpointEndedError,
        ClaimTimeoutError,
        ClientReplacedError,
        ClosedError,
        ConfigurationError,
        CoordinationTopicError,
        GroupError,
        GroupPausedError,
        HeldError,
        KafkaUnavailableError,
        KeyRangeError,
        LeaseLostError,
        MarshalError,
        PartitionStuckError,
        PositionLostError,
        ProduceError,
        StateError,
        StateMissingError,
        StateSplitError,
        TransactionError,
        TransactionFencedError,
        TransactionLostError,
    )
    from kafka_marshal.metrics.rows import Metrics
    from kafka_marshal.runner import Worker
    from kafka_marshal.types import Committed, Delivery, LeaseInfo, Offsets, OpenMessages, Start, TopicPartition

__all__ = [
    "Admin",
    "AdminError",
    "ArchiveError",
    "Attempt",
    "Balanced",
    "Batch",
    "Batches",
    "Checkpoint",
    "CheckpointEndedError",
    "CheckpointPolicy",
    "ClaimTimeoutError",
    "ClaimedLease",
    "Claims",
    "ClientReplacedError",
    "ClosedError",
    "Committed",
    "ConfigurationError",
    "Consumer",
    "CoordinationTopicError",
    "DeadLetter",
    "Delivery",
    "Greedy",
    "Group",
    "GroupConsumer",
    "GroupError",
    "GroupPausedError",
    "GroupRangeConsumer",
    "Health",
    "HeldBack",
    "HeldError",
    "Hooks",
    "InHand",
    "KafkaUnavailableError",
    "KeyRangeError",
    "Keys",
    "Leader",
    "LeaseInfo",
    "LeaseLostError",
    "Marshal",
    "MarshalError",
    "MaxClaims",
    "MemberPiece",
    "Message",
    "MessagesFailedError",
    "Metrics",
    "Move",
    "OffsetRange",
    "Offsets",
    "OpenMessages",
    "PartitionStuckError",
    "Pause",
    "PausedPartition",
    "Policy",
    "PositionLostError",
    "ProduceError",
    "RangeConsumer",
    "Rate",
    "ReleaseIfBehind",
    "Restore",
    "Retry",
    "RetryAfter",
    "ShareConsumer",
    "SharedBatch",
    "Start",
    "StateError",
    "StateMissingError",
    "StateSplitError",
    "Stuck",
    "TopicPartition",
    "Transaction",
    "TransactionError",
    "TransactionFencedError",
    "TransactionLostError",
    "Transactions",
    "WholeTopic",
    "Worker",
    "WorldView",
    "__version__",
    "errors",
    "mark_repeats",
]

__version__ = release()

#: Module → what of it is here; imported at its first use.
_LATER = {
    "adapters.message": "Message",
    "admin": "Admin InHand Move Pause PausedPartition",
    "checkpoints": "Checkpoint CheckpointPolicy Restore",
    "client.attempt": "Attempt",
    "client.batch": "Batch",
    "client.consumer": "Consumer",
    "client.dead_letters": "DeadLetter mark_repeats",
    "client.group_consumer": "GroupConsumer MemberPiece",
    "client.handling": "Hooks Retry RetryAfter",
    "client.in_batches": "MessagesFailedError",
    "client.health": "Health",
    "client.lease": "ClaimedLease",
    "client.locks": "Leader",
    "client.marshal": "Marshal",
    "client.modes": "Batches Claims Group Keys Transactions",
    "client.ranges": "GroupRangeConsumer RangeConsumer",
    "client.rates": "Rate",
    "client.shared": "ShareConsumer SharedBatch",
    "client.committing": "Transaction",
    "client.view": "WorldView",
    "engine.policies": "Balanced Greedy MaxClaims Policy ReleaseIfBehind WholeTopic",
    "engine.work.lane": "HeldBack",
    "engine.work.ranges": "OffsetRange",
    "engine.work.stuck": "Stuck",
    "errors": (
        "AdminError ArchiveError CheckpointEndedError ClaimTimeoutError ClientReplacedError ClosedError "
        "ConfigurationError CoordinationTopicError GroupError GroupPausedError HeldError KafkaUnavailableError "
        "KeyRangeError LeaseLostError MarshalError PartitionStuckError PositionLostError ProduceError StateError "
        "StateMissingError StateSplitError TransactionError TransactionFencedError TransactionLostError"
    ),
    "metrics.rows": "Metrics",
    "runner": "Worker",
    "types": "Committed Delivery LeaseInfo Offsets OpenMessages Start TopicPartition",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, _LATER)
