"""Every error a user of kafka-marshal can meet.

::

    MarshalError
    ├── ConfigurationError          what you asked for cannot work; nothing was sent
    ├── KafkaUnavailableError       no broker answered in time; leases end by themselves
    │   ├── AuthenticationError     TLS or SASL refused us
    │   └── AuthorizationError      an ACL forbids it
    ├── CoordinationTopicError      the coordination topic cannot be trusted
    │   ├── TopicMissingError       it is not there: ``kafka-marshal init``
    │   ├── TopicUnsafeError        its configuration would break leases (CreateTime, compaction …)
    │   ├── TopicChangedError       its partition count or id changed, or its log was cut, under us
    │   ├── LogCutError             its log does not reach back to where a replica must start
    │   ├── SnapshotDifferenceError a snapshot and a replay of the log say different things
    │   └── UpgradeRequiredError    the log was raised to a level this release does not know
    ├── LeaseError
    │   ├── HeldError               another member holds the lease
    │   ├── GroupPausedError        an admin has paused the group
    │   ├── LeaseLostError          we do not hold it any more, or can't be sure
    │   └── ClaimTimeoutError       the log did not answer in time; a late grant is released at once
    ├── ClientReplacedError         a newer instance of this client_id took over
    ├── GroupError                  a coordinated group can't be used like that
    │   ├── WrongKindError          it is a claimed group, or a coordinated one where a claimed one is wanted
    │   ├── GroupForgottenError     it was forgotten while this member worked
    │   ├── InconsistentPartitioningStrategyError  the members have another strategy
    │   ├── UnknownPartitioningStrategyError       there is no such strategy
    │   ├── SessionTimeoutTooHighError  the session is above the group's setting
    │   ├── GroupFullError          it has 1,000 members
    │   └── TooManyPartitionsError  too many partitions for one coordination partition
    ├── KeyRangeError               a partition can't be shared by keys, or messages can't be settled one by one
    ├── PartitionStuckError         what comes next in a partition can't be read; nothing is skipped
    │   └── PositionLostError       the stored position lies outside the partition's log, or in another
    ├── AuditError                  an audit could not be done; it says nothing about the log
    ├── ArchiveError                an archive of the log can't be written or read, or is of another log
    ├── AdminError                  an admin operation could not be done, or not completely
    │   └── CheckpointEndedError    a checkpoint was begun and not completed
    ├── StateError                  a store could not save or load the state of a checkpoint
    │   ├── StateMissingError       the state that belongs to the group's position is not in the store
    │   └── StateSplitError         the keys of a piece have states that were saved separately, or with other keys
    ├── SinkError                   a sink could not be used; nothing of the transaction was written
    │   ├── StaleEpochError         the sink has seen a newer epoch: another member has the lease
    │   └── WrongEpochKindError     the sink holds epochs of the group as one of the other kind
    ├── ProduceError                a record could not be produced; the message it stands for is not done
    ├── TransactionError            a transaction was not committed, or it is not known; its messages come again
    │   ├── TransactionFencedError  another producer has its transactional id, or the broker gave it up
    │   └── TransactionLostError    it was not committed, since the lease is over or in doubt: a LeaseLostError, too
    ├── BatchError                  a claimed batch could not be handled; nothing of it is committed
    │   ├── TopicAbsentError        a topic that was asked for does not exist
    │   ├── RangeGoneError          retention took a part of the batch while it was read
    │   └── AlreadyReadError        at most once: a batch was to be read a second time
    ├── SparkSetupError             Spark can't be used as it stands; nothing was read or written
    │   ├── SparkMissingError       PySpark is not installed
    │   ├── SparkJavaError          no Java that Spark can run on
    │   ├── SparkVersionError       PySpark, Spark and the Kafka connector are not of one version
    │   └── ConnectorMissingError   Spark's Kafka connector, or a companion of it, is not on its class path
    ├── ExtraMissingError           a package of an extra is not installed
    ├── ClosedError                 the object was closed
    └── ForkedError                 a Marshal made in the parent was used in a forked child

Each message says what happened, what it means for the data, and what to do.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from rationalizer.travel import Travels

__all__ = [
    "AdminError",
    "AlreadyReadError",
    "ArchiveError",
    "AuditError",
    "AuthenticationError",
    "AuthorizationError",
    "BatchError",
    "CheckpointEndedError",
    "ClaimTimeoutError",
    "ClientReplacedError",
    "ClosedError",
    "ConfigurationError",
    "ConnectorMissingError",
    "CoordinationTopicError",
    "ExtraMissingError",
    "ForkedError",
    "GroupError",
    "GroupForgottenError",
    "GroupFullError",
    "GroupPausedError",
    "HeldError",
    "InconsistentPartitioningStrategyError",
    "KafkaUnavailableError",
    "KeyRangeError",
    "LeaseError",
    "LeaseLostError",
    "LogCutError",
    "MarshalError",
    "PartitionStuckError",
    "PositionLostError",
    "ProduceError",
    "RangeGoneError",
    "SessionTimeoutTooHighError",
    "SinkError",
    "SnapshotDifferenceError",
    "SparkJavaError",
    "SparkMissingError",
    "SparkSetupError",
    "SparkVersionError",
    "StaleEpochError",
    "StateError",
    "StateMissingError",
    "StateSplitError",
    "TooManyPartitionsError",
    "TopicAbsentError",
    "TopicChangedError",
    "TopicMissingError",
    "TopicUnsafeError",
    "TransactionError",
    "TransactionFencedError",
    "TransactionLostError",
    "UnknownPartitioningStrategyError",
    "UpgradeRequiredError",
    "WrongEpochKindError",
    "WrongKindError",
]


class MarshalError(Travels, Exception):
    """Base of every error raised by kafka-marshal."""


class ExtraMissingError(MarshalError, ModuleNotFoundError):
    """A package that an extra of kafka-marshal brings is not installed; the message names the extra."""


class ConfigurationError(MarshalError, ValueError):
    """A setting is wrong or contradicts another one. Nothing was sent."""


class KafkaUnavailableError(MarshalError):
    """No broker answered in time. Work stops by itself when leases can't be proven any more."""


class AuthenticationError(KafkaUnavailableError):
    """The broker refused our TLS or SASL credentials, or speaks another security protocol."""


class AuthorizationError(KafkaUnavailableError):
    """An ACL forbids the operation named in the message."""


class CoordinationTopicError(MarshalError):
    """The coordination topic cannot be trusted; nothing is claimed on it."""


class TopicMissingError(CoordinationTopicError):
    """The coordination topic does not exist."""


class TopicUnsafeError(CoordinationTopicError):
    """The coordination topic is configured so that leases could be lost or forged."""


class TopicChangedError(CoordinationTopicError):
    """Partition count, topic id or log start changed while, or before, we were reading."""


class LogCutError(CoordinationTopicError):
    """The log does not reach back to where a replica must start, and no snapshot bridges the gap."""


class SnapshotDifferenceError(CoordinationTopicError):
    """A snapshot and a replay of the log say different things; the message names the offset."""


class UpgradeRequiredError(CoordinationTopicError):
    """The log was raised to a level that this release does not know."""

    def __init__(self, message: str, *, level: int) -> None:
        super().__init__(message)
        #: The level the log asks for.
        self.level = level


class LeaseError(MarshalError):
    """Something about one lease."""


class HeldError(LeaseError):
    """Another member holds the lease."""

    def __init__(self, message: str, *, holder: str, since: int, freshness: str) -> None:
        super().__init__(message)
        #: client_id of the holder.
        self.holder = holder
        #: Log time (ms) of the holder's last beat.
        self.since = since
        #: "fresh", "unknown" or "stale" (C1), at the log time of the rejection.
        self.freshness = freshness


class GroupPausedError(LeaseError):
    """An admin has paused the group."""

    def __init__(self, message: str, *, client_id: str, expires: int) -> None:
        super().__init__(message)
        #: client_id of the pausing admin.
        self.client_id = client_id
        #: Log time (ms) at which the pause ends.
        self.expires = expires


class LeaseLostError(LeaseError):
    """The lease ended, or can't be proven by our own clock."""


class ClaimTimeoutError(LeaseError, TimeoutError):
    """The log did not answer in time. Should the claim be granted later, it is released at once."""


class ClientReplacedError(MarshalError):
    """A newer instance with the same client_id took our leases over. This one ends."""


class GroupError(MarshalError):
    """A coordinated group can't be used like that; what others do is not touched."""


class WrongKindError(GroupError):
    """The group is of the other kind: claimed, or coordinated."""


class GroupForgottenError(GroupError):
    """The group was forgotten while this member worked; its progress is gone."""


class InconsistentPartitioningStrategyError(GroupError):
    """The members of the group have another strategy."""


class UnknownPartitioningStrategyError(GroupError, ConfigurationError):
    """There is no such strategy."""


class SessionTimeoutTooHighError(GroupError):
    """The session is above the group's setting."""


class GroupFullError(GroupError):
    """The group has 1,000 members."""


class TooManyPartitionsError(GroupError):
    """The groups of one coordination partition would subscribe to too many partitions."""


class KeyRangeError(MarshalError):
    """A partition can't be shared by keys, or messages of it can't be settled one by one.

    ``kip_number``: 88: the group's setting accept_individual_commit is off. 89: the topic is one of
    ``Marshal(ordered_topics=…)``. 90: the log assigns this member some keys of a partition, and it has not allowed that
    (``allow_key_share=True``). 91 is never raised: the member drops what was done before, and warns. 92: 10,000
    messages of the partition are open, or 100,000 of all groups in its part of the coordination topic, and it is held
    back (``partition_stuck="raise"``).
    """

    def __init__(self, message: str, *, kip_number: int, stable: int | None = None) -> None:
        super().__init__(message)
        #: The number that the proposal of cooperative consumers (a KIP) gives this error.
        self.kip_number = kip_number
        #: Everything of the partition up to this offset is done (91); None: the error is about something else.
        self.stable = stable


class PartitionStuckError(MarshalError):
    """What comes next in a partition can't be read (a corrupt batch, a record too large). Other partitions continue.

    Raised once, and only from a consumer with ``partition_stuck="raise"``.
    """

    def __init__(self, message: str, *, topic: str, partition: int, offset: int) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        #: The offset that comes next.
        self.offset = offset


class PositionLostError(PartitionStuckError):
    """The stored position lies outside the data partition's log, or in another topic of that name.

    Raised once, and only from a consumer with ``position_lost="raise"``.
    """


class AuditError(MarshalError):
    """An audit could not be done, or not to its end; nothing was concluded about the log."""


class ArchiveError(MarshalError):
    """An archive of the log can't be written or read, or does not fit the log; the message names offsets and times."""

    def __init__(self, message: str, *, partition: int | None = None) -> None:
        super().__init__(message)
        #: The partition of the log that it is about; None: the archive as a whole.
        self.partition = partition


class AdminError(MarshalError):
    """An admin operation failed; the message names what changed and what did not."""

    def __init__(
        self,
        message: str,
        *,
        in_hand: Sequence[tuple[str, int]] = (),
        moved: Sequence[tuple[str, int]] = (),
        unknown: Sequence[tuple[str, int]] = (),
    ) -> None:
        super().__init__(message)
        #: (topic, partition)s that are still held by members.
        self.in_hand: tuple[tuple[str, int], ...] = tuple(in_hand)
        #: (topic, partition)s whose position was moved and not put back.
        self.moved: tuple[tuple[str, int], ...] = tuple(moved)
        #: (topic, partition)s of which the log had not shown by then whether they moved.
        self.unknown: tuple[tuple[str, int], ...] = tuple(unknown)


class CheckpointEndedError(AdminError):
    """A checkpoint was begun and not completed. The group's progress and states are those of the one before."""

    def __init__(
        self, message: str, *, checkpoint: int, refused: Sequence[str] = (), waits_for: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        #: The id that it would have had.
        self.checkpoint = checkpoint
        #: client_ids of members that refused, and of those that had not answered.
        self.refused: tuple[str, ...] = tuple(refused)
        self.waits_for: tuple[str, ...] = tuple(waits_for)


class StateError(MarshalError):
    """A store could not save or load a state. A piece that was not saved keeps the state of the checkpoint before."""


class StateMissingError(StateError):
    """The store has no state that belongs to the position of a piece: to continue without it would lose work."""

    def __init__(self, message: str, *, topic: str, partition: int, checkpoint: int | None) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        #: The checkpoint under which it was saved; None: the log names none.
        self.checkpoint = checkpoint


class StateSplitError(StateError):
    """The keys of a piece have states that were saved separately, or with other keys: use ``load_parts``."""

    def __init__(self, message: str, *, topic: str, partition: int) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition


class SinkError(MarshalError):
    """A sink could not be used; the message says what was written (nothing, unless it says so)."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        #: Whether the same transaction may succeed when it is tried again.
        self.retry = retry


class StaleEpochError(SinkError):
    """The sink holds a newer epoch of this lease than the writer's: another member writes now."""

    def __init__(self, message: str, *, topic: str, partition: int, epoch: int, stored_epoch: int) -> None:
        super().__init__(message)
        #: The partition whose lease went to another.
        self.topic = topic
        self.partition = partition
        #: The writer's epoch, and the newer one that the sink has seen.
        self.epoch = epoch
        self.stored_epoch = stored_epoch


class WrongEpochKindError(SinkError):
    """The sink holds epochs of the group as one of the other kind: claimed or coordinated."""

    def __init__(self, message: str, *, topic: str, partition: int, kind: str, stored_kind: str) -> None:
        super().__init__(message)
        self.topic = topic
        self.partition = partition
        #: "claimed" or "coordinated": the writer's, and what is stored.
        self.kind = kind
        self.stored_kind = stored_kind


class ProduceError(MarshalError):
    """A record, such as a dead letter, could not be produced. The message it stands for is not done and comes again."""

    def __init__(self, message: str, *, topic: str, retry: bool) -> None:
        super().__init__(message)
        #: Where it was to go.
        self.topic = topic
        #: Whether the same record may succeed when it is sent again.
        self.retry = retry


class TransactionError(MarshalError):
    """A transaction into Kafka was not committed, or it is not known whether it was.

    Its messages are not done. They come again, unless Kafka shows that it was committed: then they are done.
    """

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        #: Whether a new transaction with the same messages may succeed.
        self.retry = retry


class TransactionFencedError(TransactionError):
    """Another producer has the transactional id, or the transaction took too long and the broker ended it."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message, retry=retry)


class TransactionLostError(TransactionError, LeaseLostError):
    """The lease ended, or can't be proven by our own clock, before the commit: nothing was committed."""

    def __init__(self, message: str, *, retry: bool = True) -> None:
        super().__init__(message, retry=retry)


class BatchError(MarshalError):
    """A claimed batch could not be handled. Nothing of it is committed."""


class TopicAbsentError(BatchError):
    """A topic that was asked for does not exist. Nothing was claimed."""


class RangeGoneError(BatchError):
    """Retention, or DeleteRecords, took a part of a batch while it was read."""

    def __init__(self, message: str, *, gone: Sequence[tuple[str, int, int, int]]) -> None:
        super().__init__(message)
        #: (topic, partition, first, last offset) of what was lost.
        self.gone: tuple[tuple[str, int, int, int], ...] = tuple(gone)


class AlreadyReadError(BatchError):
    """At most once: a batch was to be read a second time; no member got it twice."""


class SparkSetupError(MarshalError):
    """Spark can't be used as it stands. Nothing was read or written."""


class SparkMissingError(SparkSetupError, ExtraMissingError):
    """PySpark is not installed."""


class SparkJavaError(SparkSetupError):
    """No Java that Spark can run on was found."""


class SparkVersionError(SparkSetupError):
    """PySpark, Spark and the Kafka connector are not of one version."""


class ConnectorMissingError(SparkSetupError):
    """Spark's Kafka connector, or a library it needs, is not on Spark's class path."""


class ClosedError(MarshalError):
    """The Marshal, Consumer or Lease was closed."""


class ForkedError(MarshalError):
    """A Marshal was used in a forked child. Make one in the child instead."""


#: Names in one message.
_SOME = 3


def claimed_group(group_id: str) -> WrongKindError:
    """The error if the group is claimed: the log has leases of it, so it cannot have members."""
    return WrongKindError(
        f"group {group_id!r} is a claimed group: there are leases of it in the log. Nothing was changed. Use "
        "marshal.consumer, another group_id, or make it a coordinated group: kafka-marshal convert-group "
        f"{shlex.quote(group_id)} --to coordinated"
    )


def coordinated_group(group_id: str) -> WrongKindError:
    """The error if the group is coordinated: it has members and generations, so no lease of it can be claimed."""
    return WrongKindError(
        f"group {group_id!r} is a coordinated group: its members share out partitions, and no lease of it can be "
        "claimed. Nothing was changed. Use mode=Group() of marshal.consumer, marshal.ranges and "
        "ClaimedBatches, another group_id, or make it a claimed group: "
        f"kafka-marshal convert-group {shlex.quote(group_id)} --to claimed"
    )


def grant(operation: str, resource: str, names: Iterable[str], *, prefix: bool = False) -> str:
    """Completes "… is forbidden. " with the right that is missing and the remedy.

    operation: as Kafka's documentation spells it (``DESCRIBE_CONFIGS``). resource: ``"topic"``, ``"group"`` or
    ``"transactional-id"``. prefix: on all names that begin so.
    """
    known = sorted(names)
    shown = ", ".join(map(repr, known[:_SOME])) + (f" and {len(known) - _SOME} more" if len(known) > _SOME else "")
    spelled = "".join(part.capitalize() for part in operation.split("_"))
    options = " ".join(f"--{resource} {shlex.quote(name)}" for name in known[:_SOME])
    if prefix:
        shown, options = f"prefix {shown}", f"{options} --resource-pattern-type prefixed"
    return (
        f"It needs the right {operation} on {resource} {shown}: ask for it for the principal you connect as "
        f"(kafka-acls --add --allow-principal User:NAME --operation {spelled} {options}). "
        "docs/security.md has the rights of each role"
    )


#: What the extra ``[cli]`` brings.
_CLI = ("click", "rich")


def lacks_cli(error: ModuleNotFoundError) -> bool:
    """Whether the extra of the command is missing, and not a module of the library."""
    return (error.name or "").partition(".")[0] in _CLI


def needs(extra: str, *modules: str, kind: type[ExtraMissingError] = ExtraMissingError) -> None:
    """Raise ExtraMissingError (kind) unless all of these modules can be imported."""
    for module in modules:
        if find_spec(module) is None:
            raise kind(
                f"this needs the package {module!r}, which is not installed. Nothing was read or written. Install it "
                f"with: pip install 'kafka-marshal[{extra}]'",
                name=module,
            )
