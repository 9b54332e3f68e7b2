"""By which epoch a writer writes which keys: epochs as the tables have them, and the errors of writers refused.

A *fence* is (lo, hi, epoch): of the key hashes lo … hi, this is the newest epoch that has written, or tried to. Fences
of a partition are ascending, disjoint and cover all keys. A writer's *tokens* have the same form, for its own keys.

Epochs of leases and fencing tokens of coordinated groups are offsets of different partitions of the log, so they can't
be compared. The kind is stored within the epoch: tokens have 2^62 added. A release that does not know of kinds takes
them for newer epochs, and is refused.

`Records` are the messages that ``record`` and ``records`` write, and by which tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from shlex import quote
from typing import Any, Final, Self

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.checkpoints import Restore, RestorePiece
from kafka_marshal.client import attempt as attempts
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.client.batch import Batch
from kafka_marshal.engine.key_share import hash_of
from kafka_marshal.errors import ConfigurationError, StaleEpochError, WrongEpochKindError
from kafka_marshal.types import BatchToken, Key, OpenEpoch, SharedEpoch
from rationalizer.limits import MAX_KEY_HASH

#: (lo, hi, epoch), both hashes inclusive; the epoch as it is stored.
Fence = tuple[int, int, int]

#: In place of the partition's one epoch: its keys have different ones. Releases that know no fences refuse it as newer.
SPLIT: Final = 2**63 - 1

_LO: Final = itemgetter(0)


def all_keys(epoch: int) -> tuple[Fence, ...]:
    """One fence, or token, for all keys."""
    return ((0, MAX_KEY_HASH, epoch),)


def covers_all(fences: Sequence[Fence]) -> bool:
    """Whether these are ascending, disjoint, and cover all keys."""
    return (
        bool(fences)
        and (fences[0][0], fences[-1][1]) == (0, MAX_KEY_HASH)
        and all(lo <= hi for lo, hi, _ in fences)
        and all(left[1] + 1 == right[0] for left, right in pairwise(fences))
    )


def overlapping(fences: Iterable[Fence], lo: int, hi: int) -> list[Fence]:
    """Those with some of these keys."""
    return [each for each in fences if each[0] <= hi and lo <= each[1]]


def has_key(fences: Sequence[Fence], key_hash: int) -> bool:
    """Whether one of these is for this key."""
    place = bisect_right(fences, key_hash, key=_LO) - 1
    return place >= 0 and key_hash <= fences[place][1]


def epoch_at(fences: Sequence[Fence], key_hash: int) -> int:
    """The epoch of a key, which one of these is for."""
    return fences[bisect_right(fences, key_hash, key=_LO) - 1][2]


def entered(fences: Iterable[Fence], tokens: Iterable[Fence]) -> tuple[Fence, ...]:
    """The fences after a writer with these tokens has entered: older ones give way, newer ones stay."""
    now = list(fences)
    for lo, hi, epoch in tokens:
        cut: list[Fence] = []
        for first, last, before in now:
            if before >= epoch or last < lo or hi < first:
                cut.append((first, last, before))
                continue
            cut += [(first, lo - 1, before), (max(first, lo), min(last, hi), epoch), (hi + 1, last, before)]
        now = [each for each in cut if each[0] <= each[1]]
    merged: list[Fence] = []
    for lo, hi, epoch in now:
        if merged and merged[-1][2] == epoch:
            lo = merged.pop()[0]
        merged.append((lo, hi, epoch))
    return tuple(merged)


KINDS: Final = ("claimed", "coordinated")

NOTHING_WRITTEN: Final = "Nothing of this transaction was written, and its offsets are not done"

#: Added to what is stored of a coordinated group.
_COORDINATED: Final = 2**62

#: Stored before the first write: of a new row, and of one that was converted to claims.
_NOBODY: Final = -1
_NOBODY_CLAIMED: Final = -2


#: Between a group's id and the name of a sink, in the rows of that sink.
NAMED: Final = "\x1f"


#: First and last offset.
Interval = tuple[int, int]


def interval_merged(last_offset: int, intervals: Sequence[Interval]) -> tuple[int, list[Interval]]:
    """Ascending intervals without what touches the last offset, which moves on, and with neighbours as one."""
    kept: list[Interval] = []
    for first, end in intervals:
        if first <= last_offset + 1:
            last_offset = max(last_offset, end)
        elif kept and first <= kept[-1][1] + 1:
            kept[-1] = (kept[-1][0], max(kept[-1][1], end))
        else:
            kept.append((first, end))
    return last_offset, kept


def left_out(intervals: Iterable[Interval], offsets: Sequence[int]) -> list[Interval]:
    """Ascending intervals without these ascending offsets."""
    kept: list[Interval] = []
    for first, end in intervals:
        for offset in offsets[bisect_left(offsets, first) : bisect_right(offsets, end)]:
            kept.append((first, offset - 1))
            first = offset + 1
        kept.append((first, end))
    return [each for each in kept if each[0] <= each[1]]


@dataclass(frozen=True, slots=True)
class Written:
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


def last_offset_of(stored: Mapping[Key, Written], topic: str, partition: int) -> int:
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


def redone_of(rows: str) -> str:
    """What stands for the group in the rows of offsets that are to be written again (F10); no sink has that name."""
    return f"{rows}{NAMED}{NAMED}"


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


_NOTHING: Final = "Nothing was written"


@dataclass(frozen=True)
class Records:
    """Messages of one partition that are written in one transaction, and by which tokens."""

    group_id: str
    key: Key
    tokens: tuple[Fence, ...]
    #: Everything up to here is done in the group, as the caller says; −1: it did not.
    stable: int
    #: (message, key as in Kafka), in the caller's order.
    messages: Sequence[tuple[Message, Any]]
    #: One message, by ``record``: what is written of it is rolled back if it is done.
    is_single: bool
    #: What of the partition is done in the group, as this process knows it by itself (F4).
    besides: Callable[[], Sequence[tuple[int, int]]] | None = None
    #: Whether the tokens are stored: that of a batch of a share is only compared (U15).
    enters: bool = True
    #: The batch that they are, whose lease is compared with the process's own clock before the commit.
    batch: Batch | None = None

    def aside(self) -> set[int]:
        """The offsets that were set aside meanwhile: their rows come when they are redriven."""
        return set() if self.batch is None else set(self.batch._aside())

    def require_held(self) -> None:
        """The last thing before a commit: LeaseLostError where the partition may be another's."""
        require_held(self.group_id, {self.key})
        if self.batch is not None:
            self.batch.require()

    @cached_property
    def offsets(self) -> list[int]:
        """Ascending, each once."""
        return sorted({message.offset() for message, _ in self.messages})

    def first_of_each(self, offsets: Collection[int]) -> list[Message]:
        """The messages with these offsets, each once, in the caller's order."""
        if len(offsets) == len(self.messages):
            return [message for message, _ in self.messages]
        found = {message.offset(): message for message, _ in reversed(self.messages) if message.offset() in offsets}
        return list(reversed(found.values()))

    def is_newest(self, fences: Iterable[Fence]) -> bool:
        """Whether all of our keys have our epochs; none newer, if ours are only compared."""
        pairs = [(ours, stored) for lo, hi, ours in self.tokens for _, _, stored in overlapping(fences, lo, hi)]
        return all(stored == ours or (not self.enters and stored < ours) for ours, stored in pairs)

    def done_besides(self, stable: int) -> list[tuple[int, int]]:
        """What is done without the sink, ascending. stable: up to here it is, as callers have said."""
        known = () if self.besides is None else self.besides()
        return interval_merged(-2, sorted([*known, (0, stable)] if stable >= 0 else known))[1]

    def refuse_kind(self, fences: Iterable[Fence]) -> None:
        """Raise WrongEpochKindError if one of our keys has an epoch of the other kind of group."""
        for lo, hi, ours in self.tokens:
            for _, _, stored in overlapping(fences, lo, hi):
                if kind_of(stored) != kind_of(ours):
                    refuse_others(self.group_id, self.key, ours, stored)

    @cached_property
    def _hashes(self) -> list[int]:
        """The key hash of each message."""
        return [hash_of(key, message.offset()) for message, key in self.messages]

    def require_own_keys(self) -> None:
        """Raise ConfigurationError if no token is for the key of a message."""
        if covers_all(self.tokens):
            return
        for (message, _), key_hash in zip(self.messages, self._hashes, strict=True):
            if not has_key(self.tokens, key_hash):
                raise ConfigurationError(
                    f"{_shown(message)} has a key of another member's share: this epoch is not good for it. "
                    f"{_NOTHING}. Write each batch with its own epoch, and leave messages' keys as Kafka has them"
                )

    def may_write(self, fences: Sequence[Fence]) -> bool:
        """Whether the fences of all messages' keys have our epochs; False: we have to enter first.

        Raises StaleEpochError or WrongEpochKindError if one has a newer epoch or another kind.
        """
        if len(self.tokens) == len(fences) == 1:
            pairs = {(self.tokens[0][2], fences[0][2])}
        else:
            pairs = {(epoch_at(self.tokens, each), epoch_at(fences, each)) for each in self._hashes}
        for ours, stored in pairs:
            refuse_others(self.group_id, self.key, ours, stored)
        return not self.enters or all(ours == stored for ours, stored in pairs)


def the_record(
    message: Message | None, group_id: str | None, epoch: int | None, kind: GroupKind | None, stable: int | None
) -> Records:
    """What ``record`` is to write. Raises ConfigurationError."""
    given = [each is not None for each in (group_id, epoch, kind)]
    if any(given) and not (all(given) and message is not None):
        raise ConfigurationError(
            "sink.record(…) takes message, group_id, epoch and kind together, or, in a handler of consumer.run(…), "
            f"none of the last three. {_NOTHING}"
        )
    if any(given):
        assert message is not None
        return _records([(message, _key_of(message))], group_id, epoch, kind, stable, is_single=True)
    attempt = attempts.current.get()
    if attempt is None and attempts.in_batch.get():
        if message is None:
            raise ConfigurationError(
                "sink.record() was called in a handler of consumer.run(…, batch=…), which has several messages. "
                f"{_NOTHING}. Call sink.records(messages) with those of one partition, or sink.record(message) for each"
            )
        attempt = attempts.Attempt.of(message)
    if attempt is None:
        raise ConfigurationError(
            "sink.record(…) was called outside of a handler of consumer.run(…), so whose epoch it writes by is not "
            f"known. {_NOTHING}. In a handler, call it in the handler's own thread or task, or by "
            "asyncio.to_thread; elsewhere, give message, group_id, epoch and kind"
        )
    if message is not None and _place(message) != _place(attempt.message):
        raise ConfigurationError(
            f"sink.record(…) was called with {_shown(message)} in the handler of {_shown(attempt.message)}, whose "
            f"epoch is not known to be good for the other. {_NOTHING}. Leave the message out, or give group_id, "
            "epoch and kind, too"
        )
    # A handler may have changed the message's key.
    messages = [(attempt.message, attempt._key)]
    found = _records(messages, attempt.group_id, attempt.epoch, attempt.kind, stable, is_single=True)
    return replace(found, besides=attempt._done_besides)


def the_records(
    messages: Batch | Iterable[Message],
    group_id: str | None,
    epoch: int | None,
    kind: GroupKind | None,
    stable: int | None,
) -> Records:
    """What ``records`` is to write. Raises ConfigurationError."""
    given = [each is not None for each in (group_id, epoch, kind)]
    batch = messages if isinstance(messages, Batch) and not any(given) else None
    if batch is not None:
        group_id, epoch, kind = batch.group_id, batch.epoch, batch.kind
    elif not any(given) and attempts.in_batch.get():
        return _of_list(arguments.several("messages", messages, "messages of Kafka"), stable)
    elif not all(given):
        raise ConfigurationError(
            "sink.records(…) takes a batch of a consumer, or messages of one partition with group_id, epoch and kind "
            f"together. {_NOTHING}. In a handler of consumer.run(…), sink.record() is the form for its message"
        )
    several = arguments.several("messages", messages, "messages of Kafka")
    _check_one_partition(several)
    found = [(message, message.key()) for message in several]
    made = _records(found, group_id, epoch, kind, stable, is_single=False)
    return made if batch is None else replace(made, batch=batch, besides=batch._done_besides)


def _of_list(messages: Sequence[Message], stable: int | None) -> Records:
    """Some messages of a list that a handler of ``run(…, batch=…)`` has. Raises ConfigurationError."""
    _check_one_partition(messages)
    found = [attempts.Attempt.of(message) for message in messages]
    first, *others = found
    if any(each.epoch != first.epoch for each in others):
        raise ConfigurationError(
            f"sink.records(…): {_shown(first.message)} and others after it came under different tokens, as members "
            f"share the partition by batches. {_NOTHING}. Call sink.record(message) for each message"
        )
    pairs = [(each.message, each._key) for each in found]  # a handler may have changed the key
    made = _records(pairs, first.group_id, first.epoch, first.kind, stable, is_single=False)
    return replace(made, besides=first._done_besides)


def _check_one_partition(messages: Collection[Message]) -> None:
    if len({_place(message)[:2] for message in messages}) != 1:
        raise ConfigurationError(
            "sink.records(…) takes messages of one partition, at least one: an epoch is good for one partition. "
            f"{_NOTHING}. Call it once for each partition"
        )


def _records(
    messages: Sequence[tuple[Message, Any]],
    group_id: object,
    epoch: object,
    kind: object,
    stable: int | None,
    *,
    is_single: bool,
) -> Records:
    tokens = tokens_of(epoch, kind)
    topic, partition, _ = _place(messages[0][0])
    arguments.text("the message's topic", topic)
    arguments.a_whole("the message's partition", partition, 0, arguments.MOST_PARTITION)
    for message, _ in messages:
        arguments.a_whole("the message's offset", message.offset())
    group = arguments.text("group_id", group_id)
    stable = arguments.a_whole("stable", -1 if stable is None else stable, -1)
    enters = not isinstance(epoch, BatchToken)
    found = Records(group, (topic, partition), tokens, stable, messages, is_single, enters=enters)
    found.require_own_keys()
    return found


@contextmanager
def whole_blocks() -> Iterator[None]:
    """Around the block of records. ConfigurationError if a handler of lists names there what has failed."""
    try:
        yield
    except Exception as error:
        from kafka_marshal.client.in_batches import MessagesFailedError  # loaded, if it is one

        if not isinstance(error, MessagesFailedError):
            raise
        raise ConfigurationError(
            "MessagesFailedError was raised inside of the block of a sink, which goes back to its begin: the messages "
            "that are not named would be done without their rows. Nothing of this block was written; no message of the "
            "list is done, and they come again. Raise it after the block, and after the COMMIT; give each message that "
            "may fail a block for itself"
        ) from error


def refuse_out_of_order() -> None:
    """ConfigurationError in a handler of ``run`` whose partition's records end in any order."""
    attempt = attempts.current.get()
    if attempts.in_batch.get():
        raise ConfigurationError(
            "sink.transaction(…) was called in a handler of consumer.run(…, batch=…), whose messages are done, or come "
            "again, each by itself. It stores a last offset, which would hide those that fail: they would be left out "
            f"for good. {_NOTHING}. Use sink.records(messages) of a SQL sink, with those of one partition, or loop "
            "over consumer.batches(…)"
        )
    if attempt is not None and attempt.order != "partition":
        raise ConfigurationError(
            f"sink.transaction(…) was called in a handler of consumer.run(…, order={attempt.order!r}), where records "
            "of one partition end in any order. It stores a last offset, which would hide earlier records that are not "
            f"done yet: they would be left out for good. {_NOTHING}. Use sink.record() here, or order='partition'"
        )
    if attempt is not None and attempt._leaves_open:
        raise no_last_offset(
            f"{_shown(attempt.message)} was open, or its run sets messages aside (park=True, Retry(durable=True))"
        )


def require_held(group_id: str, partitions: Collection[Key]) -> None:
    """The last thing before a commit in a handler of ``run``: LeaseLostError where its partition may be another's.

    The stored epoch refuses those that another member has written behind. This one refuses the rest: another member
    has the partition, and has written nothing yet.
    """
    attempt = attempts.current.get()
    for each in (attempt,) if attempt is not None else (attempts.in_batch.get() or {}).values():
        if each.group_id == group_id and _place(each.message)[:2] in partitions:
            each.require()


def _place(message: Message) -> tuple[str, int, int]:
    try:
        return message.topic(), message.partition(), message.offset()
    except AttributeError:
        raise arguments.wrong("message", "a message of Kafka", message, _NOTHING) from None


def _key_of(message: Message) -> Any:
    _place(message)
    return message.key()


def _shown(message: Message) -> str:
    topic, partition, offset = _place(message)
    return f"{topic} [{partition}] offset {offset}"
