"""Which messages ``record`` and ``records`` write, by which tokens; and what handlers of ``run`` may not do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.client import attempt as attempts
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.client.batch import Batch
from kafka_marshal.engine.key_share import hash_of
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.sinks.claims import kind_of, no_last_offset, refuse_others, tokens_of
from kafka_marshal.sinks.done_records import interval_merged
from kafka_marshal.sinks.fences import Fence, covers_all, epoch_at, has_key, overlapping
from kafka_marshal.types import BatchToken, Key

_NOTHING = "Nothing was written"


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

    @property
    def offsets(self) -> list[int]:
        """Ascending, each once."""
        return sorted({message.offset() for message, _ in self.messages})

    def first_of_each(self, offsets: Collection[int]) -> list[Message]:
        """The messages with these offsets, each once, in the caller's order."""
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
    elif not all(given):
        raise ConfigurationError(
            "sink.records(…) takes a batch of a consumer, or messages of one partition with group_id, epoch and kind "
            f"together. {_NOTHING}. In a handler of consumer.run(…), sink.record() is the form for its message"
        )
    several = arguments.several("messages", messages, "messages of Kafka")
    if len({_place(message)[:2] for message in several}) != 1:
        raise ConfigurationError(
            "sink.records(…) takes messages of one partition, at least one: an epoch is good for one partition. "
            f"{_NOTHING}. Call it once for each partition"
        )
    found = [(message, message.key()) for message in several]
    made = _records(found, group_id, epoch, kind, stable, is_single=False)
    return made if batch is None else replace(made, batch=batch, besides=batch._done_besides)


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


def refuse_out_of_order() -> None:
    """ConfigurationError in a handler of ``run`` whose partition's records end in any order."""
    attempt = attempts.current.get()
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
    if attempt is not None and attempt.group_id == group_id and _place(attempt.message)[:2] in partitions:
        attempt.require()


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
