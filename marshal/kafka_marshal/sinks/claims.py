"""By which epoch a writer writes: epochs as the table has them, and the errors of writers that are refused.

Epochs of leases and fencing tokens of coordinated groups are offsets of different partitions of the log, so they can't
be compared. The kind is stored within the epoch: tokens have 2^62 added. A release that does not know of kinds takes
them for newer epochs, and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Final, Self

from kafka_marshal import arguments
from kafka_marshal.checkpoints import Restore, RestorePiece
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.errors import ConfigurationError, StaleEpochError, WrongEpochKindError
from kafka_marshal.sinks.fences import SPLIT, Fence, all_keys, covers_all, entered, overlapping
from kafka_marshal.types import BatchToken, Key, OpenEpoch, SharedEpoch
from rationalizer.limits import MAX_KEY_HASH

KINDS: Final = ("claimed", "coordinated")

NOTHING_WRITTEN: Final = "Nothing of this transaction was written, and its offsets are not done"

#: Added to what is stored of a coordinated group.
_COORDINATED: Final = 2**62

#: Stored before the first write: of a new row, and of one that was converted to claims.
_NOBODY: Final = -1
_NOBODY_CLAIMED: Final = -2


#: Between a group's id and the name of a sink, in the rows of that sink.
NAMED: Final = "\x1f"


@dataclass(frozen=True, slots=True)
class Progress:
    """What a sink knows of one partition."""

    #: The offset up to which its rows are in the sink; -1: none.
    last_offset: int
    #: The newest epoch that has written, or tried to; -1: none.
    epoch: int
    #: The epochs are fencing tokens of a coordinated group.
    coordinated: bool = False
    #: Records beyond last_offset that are in the sink, as inclusive intervals (``sink.record``, ``sink.records``).
    ranges: tuple[tuple[int, int], ...] = ()
    #: (lo, hi, epoch) of key hashes, if they have different epochs; ``epoch`` is then the newest of them.
    fences: tuple[Fence, ...] = ()

    @classmethod
    def of(
        cls,
        last_offset: int,
        stored: int,
        ranges: tuple[tuple[int, int], ...] = (),
        fences: Iterable[Fence] = (),
    ) -> Self:
        """As the tables have it."""
        shown = tuple((lo, hi, shown_as(epoch)) for lo, hi, epoch in fences)
        newest = max((epoch for _, _, epoch in shown), default=shown_as(stored))
        return cls(last_offset, newest, kind_of(stored) == "coordinated", ranges, shown)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one writer says of one partition."""

    topic: str
    partition: int
    #: Its fencing tokens as they are stored, by keys.
    tokens: tuple[Fence, ...]
    last_offset: int

    @property
    def key(self) -> Key:
        """Of the partition."""
        return self.topic, self.partition

    @property
    def epoch(self) -> int:
        """The newest of its tokens."""
        return max(epoch for _, _, epoch in self.tokens)

    def enter_all(self, group_id: str, fences: Iterable[Fence]) -> tuple[Fence, ...]:
        """The fences after it has entered all of its keys. Raises as ``refuse_others`` if any key has a newer epoch."""
        for lo, hi, epoch in self.tokens:
            for _, _, newest in overlapping(fences, lo, hi):
                refuse_others(group_id, self.key, epoch, newest)
        return entered(fences, self.tokens)


def kind_of(stored: int) -> GroupKind | None:
    """The kind of epoch that is stored; None: none yet, so that either kind may begin."""
    if stored == _NOBODY:
        return None
    return "coordinated" if stored >= _COORDINATED - 1 else "claimed"


def last_offset_of(stored: Mapping[Key, Progress], topic: str, partition: int) -> int:
    """Of one of a transaction's partitions. Raises ConfigurationError if it is not one of them."""
    try:
        return stored[topic, partition].last_offset
    except KeyError:
        raise ConfigurationError(
            f"{topic} [{partition}] is not one of this transaction's partitions, so it is not fenced for it. "
            f"Nothing of this transaction is written; name it where the transaction begins"
        ) from None


def stored_as(epoch: int, kind: GroupKind) -> int:
    """An epoch as the table has it."""
    return epoch + _COORDINATED if kind == "coordinated" else epoch


def shown_as(stored: int) -> int:
    """An epoch as people know it; −1: none."""
    return max(-1, stored - _COORDINATED if kind_of(stored) == "coordinated" else stored)


def tokens_of(epoch: object, kind: object) -> tuple[Fence, ...]:
    """A writer's tokens, as they are stored. Raises ConfigurationError."""
    group_kind: GroupKind = arguments.one_of("kind", kind, KINDS)  # type: ignore[assignment]
    given = epoch.parts if isinstance(epoch, SharedEpoch) else all_keys(epoch)  # type: ignore[arg-type]
    if isinstance(epoch, BatchToken) and group_kind != "claimed":
        raise arguments.wrong("kind", "'claimed' with the token of a batch, which only such groups have", kind)
    # Above it, epochs of coordinated groups begin, and the mark of a partition whose keys have different ones.
    most = SPLIT - _COORDINATED - 1
    return tuple((lo, hi, stored_as(arguments.a_whole("epoch", each, 0, most), group_kind)) for lo, hi, each in given)


def nobody_yet(kind: GroupKind) -> int:
    """What is stored where only writers of this kind may begin."""
    return _COORDINATED - 1 if kind == "coordinated" else _NOBODY_CLAIMED


def rows_of(group_id: str, name: str | None) -> str:
    """What stands for the group in the rows of a sink with this name."""
    return group_id if name is None else f"{group_id}{NAMED}{name}"


def group_of(rows: str) -> str:
    """The group whose rows these are, for people."""
    return rows.partition(NAMED)[0]


def refuse_others(group_id: str, key: Key, epoch: int, newest: int) -> None:
    """Raise WrongEpochKindError or StaleEpochError if what is stored does not let a writer with this epoch write."""
    topic, partition = key
    theirs = kind_of(newest)
    if theirs is not None and theirs != kind_of(epoch):
        raise _wrong_kind(group_id, key, theirs)
    if newest > epoch:
        newest, epoch = shown_as(newest), shown_as(epoch)
        raise StaleEpochError(
            f"{topic} [{partition}]: this sink has seen epoch {newest}, newer than ours "
            f"({epoch}): the lease went to another writer. {NOTHING_WRITTEN} by us: the new holder continues "
            "from what is stored. Stop working on this partition. (If the coordination topic was recreated, "
            "epochs began again with it: sink.forget(group_id), once nothing writes.)",
            topic=topic,
            partition=partition,
            epoch=epoch,
            stored_epoch=newest,
        )


def rewound(claim: Claim, group_id: str, fences: Iterable[Fence]) -> tuple[Fence, ...]:
    """The fences after ``rewind`` has entered the epoch of a reposition. ConfigurationError if a newer one wrote."""
    try:
        return claim.enter_all(group_id, fences)
    except StaleEpochError as error:
        raise ConfigurationError(
            f"sink.rewind: {error.topic} [{error.partition}] was repositioned at epoch {error.epoch}, and a worker "
            f"with epoch {error.stored_epoch}, granted after it, has been here since: what it wrote, or left out, does "
            "not fit the new last offset. Nothing was changed. Reposition the group again, and rewind the sink with "
            "the new epochs before workers write: stop them, or do it while the group is paused"
        ) from error


def whole_pieces(restore: Restore) -> list[RestorePiece]:
    """Its pieces by partition: all take locks in one order. Raises ConfigurationError if one has only some keys."""
    arguments.an_instance("restore", restore, Restore, "what on_restore is given")
    for each in restore.pieces:
        if len({through for _, _, through in each.done_through}) > 1:
            raise ConfigurationError(
                f"sink.restore: keys of {each.topic} [{each.partition}] are done up to different offsets, as members "
                "shared it by key, and a sink knows which offsets are stored, not of which keys: rows that are done "
                "would go, too. Nothing was changed. Give the partition one position (kafka-marshal release-group "
                f"{quote(each.group_id)} --to …), delete your rows beyond it, and rewind the sink to it"
            )
        if (each.lo, each.hi) != (0, MAX_KEY_HASH):
            raise ConfigurationError(
                f"sink.restore: the member has only some keys of {each.topic} [{each.partition}], and a sink knows "
                "which offsets are stored, not of which keys. Nothing was changed. Give the consumer "
                "allow_key_share=False; or keep the results in the state, and write them when a checkpoint is complete"
            )
    return sorted(restore.pieces, key=lambda each: each.key)


def _wrong_kind(group_id: str, key: Key, theirs: GroupKind) -> WrongEpochKindError:
    ours: GroupKind = "claimed" if theirs == "coordinated" else "coordinated"
    named = "" if ours == "coordinated" else " A member of a coordinated group gives kind='coordinated' (batch.kind)."
    return WrongEpochKindError(
        f"{key[0]} [{key[1]}]: this sink holds epochs of group {group_of(group_id)!r} as a {theirs} group; "
        f"ours is of a {ours} one: they can't be compared. {NOTHING_WRITTEN}.{named} If the group was converted "
        f"(kafka-marshal convert-group), and no worker of the {theirs} group writes any more: "
        f"sink.convert({group_of(group_id)!r}, {ours!r}). "
        "Else stop this worker",
        topic=key[0],
        partition=key[1],
        kind=ours,
        stored_kind=theirs,
    )


def no_last_offset(what: str) -> ConfigurationError:
    """Messages below a last offset are open, which would hide them."""
    return ConfigurationError(
        f"{what}, so messages below it may be open. sink.transaction(…) stores a last offset, which would hide these: "
        "they would be left out for good. Nothing was written. Use sink.records(batch) or, in a handler, sink.record() "
        "of a SQL sink: these store each message by itself"
    )


def checked(group_id: object, claims: object, kind: GroupKind) -> list[Claim]:
    """With epochs as they are stored. Sorted, each partition once: all lock rows in the same order."""
    merged: dict[Key, Claim] = {}
    wanted = "a list of (topic, partition, epoch, last_offset)"
    for claim in arguments.several("claims", claims, wanted):
        if not isinstance(claim, tuple | list) or len(claim) != 4 or not isinstance(claim[0], str):
            raise arguments.wrong("claims", wanted, claims, "Nothing was written")
        topic = claim[0]
        if isinstance(claim[2], SharedEpoch) and not covers_all(claim[2].parts):
            raise ConfigurationError(
                f"{topic} [{claim[1]}] is shared by key: a last offset of the whole partition would hide other "
                "members' messages. Nothing was written. Use sink.records(batch) of a SQL sink, which stores each "
                "message by itself, or give the consumer allow_key_share=False"
            )
        if isinstance(claim[2], BatchToken | OpenEpoch):
            what = "a batch of a share" if isinstance(claim[2], BatchToken) else "a message that was open"
            raise no_last_offset(f"{topic} [{claim[1]}]: offset {claim[3]} is of {what}")
        partition, epoch, last_offset = (arguments.a_whole(f"claims: {claim!r}", x, -1) for x in claim[1:])
        if epoch < 0 or last_offset < -1 or partition < 0:
            raise ConfigurationError(
                f"{topic} [{partition}]: epoch {epoch}, last offset {last_offset} are not of a lease. Nothing was "
                "written"
            )
        before = merged.get((topic, partition))
        if before is not None and before.epoch != stored_as(epoch, kind):
            raise ConfigurationError(
                f"{topic} [{partition}] stands in the transaction with epochs {shown_as(before.epoch)} and {epoch}: "
                "one of them is over. Nothing was written; drop the ranges of the older epoch"
            )
        last = last_offset if before is None else max(last_offset, before.last_offset)
        merged[topic, partition] = Claim(topic, partition, tokens_of(claim[2], kind), last)
    if not merged or not isinstance(group_id, str) or not group_id:
        raise ConfigurationError(
            "a fenced transaction needs the group's id and at least one (topic, partition, epoch, last_offset): else "
            "nothing would refuse an older writer. Nothing was written"
        )
    return [merged[key] for key in sorted(merged)]
