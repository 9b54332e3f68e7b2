"""Records that are done one by one, in any order: which one is meant, and how the sink stores it.

``kafka_marshal_done (group_id, topic, partition, first_offset, last_offset)`` holds inclusive intervals of offsets that
do not overlap. A record's own transaction inserts the interval of its one offset; the primary key makes a second writer
of that offset wait for the first, and then find it. Neighbours are merged later, in a short transaction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.client import attempt as attempts
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.sinks.claims import KINDS, Claim, stored_as
from kafka_marshal.types import Key, SharedEpoch

__all__ = ["MERGE_EVERY", "DoneRecords"]

#: After this many records of a partition the next one merges their rows first. So a table that nothing holds up has no
#: more rows than that for each partition and writing process.
MERGE_EVERY: Final = 100

Interval = tuple[int, int]
_NOTHING = "Nothing was written"

_OURS = "group_id = ? AND topic = ? AND partition = ?"
_INSERT = "INSERT INTO kafka_marshal_done VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
#: (last offset of the partition, last offset of the interval that begins before this one)
_BEFORE = (
    "SELECT last_offset, (SELECT d.last_offset FROM kafka_marshal_done d WHERE d.group_id = p.group_id "
    "AND d.topic = p.topic AND d.partition = p.partition AND d.first_offset < ? ORDER BY d.first_offset DESC LIMIT 1) "
    "FROM kafka_marshal_progress p WHERE OURS"
)
#: From the interval on that begins before this offset.
_FROM = (
    "SELECT first_offset, last_offset FROM kafka_marshal_done WHERE OURS AND first_offset >= coalesce("
    "(SELECT max(first_offset) FROM kafka_marshal_done WHERE OURS AND first_offset < ?), -1) ORDER BY first_offset"
)
_SET_LAST_OFFSET = "UPDATE kafka_marshal_progress SET last_offset = ? WHERE OURS"
_DROP_BELOW = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset <= ? AND last_offset <= ?"
_DROP_WITHIN = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset > ? AND first_offset <= ?"
_STRETCH = "UPDATE kafka_marshal_done SET last_offset = ? WHERE OURS AND first_offset = ?"
_DROP_ONE = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset = ?"
_DROP = "DELETE FROM kafka_marshal_done WHERE OURS"


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


class DoneRecords:
    """The records of one partition that are done, as one connection sees them inside its transaction."""

    def __init__(self, run: Callable[[str, Sequence[Any]], Any], group_id: str, key: Key) -> None:
        self._run_sql = run
        self._of = (group_id, *key)

    def _run(self, sql: str, parameters: Sequence[Any]) -> Any:
        return self._run_sql(sql.replace("OURS", _OURS), parameters)

    def add(self, offset: int) -> bool:
        """Store it as done; False: it was. Waits for another transaction that stores the same offset."""
        if self._run(_INSERT, (*self._of, offset, offset)).rowcount != 1:
            return False
        # Only now: its row may have been merged into another while the statement above waited.
        [(last_offset, before)] = self._run(_BEFORE, (offset, *self._of)).fetchall()
        if max(last_offset, -1 if before is None else before) < offset:
            return True
        self._run(_DROP_ONE, (*self._of, offset))  # intervals never overlap
        return False

    def merge(self, last_offset: int, up_to: int, since: int = -1) -> tuple[int, list[Interval]]:
        """Merge intervals from offset ``since`` on, and with the last offset; what is left. Its row must be locked.

        last_offset: as stored. up_to: everything up to here is done, too. Only what is committed is visible, and no
        writer can add an offset inside of an interval, so deleting by range deletes only what was read.
        """
        found = self._run(_FROM, (*self._of, *self._of, since)).fetchall()
        last, kept = interval_merged(max(last_offset, up_to), found)
        if last > last_offset:
            self._run(_SET_LAST_OFFSET, (last, *self._of))
        self._run(_DROP_BELOW, (*self._of, last, last))
        for first, end in set(kept).difference(found):
            self._run(_DROP_WITHIN, (*self._of, first, end))
            self._run(_STRETCH, (end, *self._of, first))
        return last, kept

    def drop(self) -> None:
        """All of them."""
        self._run(_DROP, self._of)


@dataclass(slots=True)
class Written:
    """What this process has written of a partition since it last merged."""

    #: Held while an epoch is entered or rows are merged: once is enough for all threads.
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: The newest epoch that was entered here, as it is stored.
    epoch: int | None = None
    offsets: list[int] = field(default_factory=list)
    #: Everything up to here is done in the group: the highest offset that writers by this epoch have named.
    stable: int = -1


def the_record(
    message: Message | None, group_id: str | None, epoch: int | None, kind: GroupKind | None
) -> tuple[str, Claim]:
    """The group, and which record is meant, by which epoch. Raises ConfigurationError."""
    given = [each is not None for each in (group_id, epoch, kind)]
    if any(given) and not (all(given) and message is not None):
        raise ConfigurationError(
            "sink.record(…) takes message, group_id, epoch and kind together, or, in a handler of consumer.run(…), "
            f"none of the last three. {_NOTHING}"
        )
    if not any(given):
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
        message, group_id, epoch, kind = attempt.message, attempt.group_id, attempt.epoch, attempt.kind
    assert message is not None
    topic, partition, offset = _place(message)
    if isinstance(epoch, SharedEpoch):
        raise ConfigurationError(
            f"{topic} [{partition}] is shared by key, and sinks keep one fencing token for each whole partition: they "
            f"can't distinguish an old owner of these keys from the owner of others. {_NOTHING}. Give the consumer "
            "allow_key_share=False, or fence by (topic, partition, lo, hi) in your own table"
        )
    stored = stored_as(
        arguments.a_whole("epoch", epoch),
        arguments.one_of("kind", kind, KINDS),  # type: ignore[arg-type]
    )
    return arguments.text("group_id", group_id), Claim(
        arguments.text("the message's topic", topic),
        arguments.a_whole("the message's partition", partition, 0, arguments.MOST_PARTITION),
        stored,
        arguments.a_whole("the message's offset", offset),
    )


def refuse_out_of_order() -> None:
    """ConfigurationError in a handler of ``run`` whose partition's records end in any order."""
    attempt = attempts.current.get()
    if attempt is not None and attempt.order != "partition":
        raise ConfigurationError(
            f"sink.transaction(…) was called in a handler of consumer.run(…, order={attempt.order!r}), where records "
            "of one partition end in any order. It stores a last offset, which would hide earlier records that are not "
            f"done yet: they would be left out for good. {_NOTHING}. Use sink.record() here, or order='partition'"
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


def _shown(message: Message) -> str:
    topic, partition, offset = _place(message)
    return f"{topic} [{partition}] offset {offset}"
