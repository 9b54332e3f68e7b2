"""Open messages as they are written again: after a move that failed, and when a group is converted (C11)."""

from __future__ import annotations

from collections.abc import Sequence

from kafka_marshal.admin.session import Session
from kafka_marshal.engine.work.copies import Aside
from kafka_marshal.errors import AdminError
from kafka_marshal.ports import TopicPartition
from rationalizer import Progress, Record, SettleOffsets, SettlingMessages, codes
from rationalizer.holes import NO_KEY

#: Entries of one record.
MOST_ENTRIES = 1_000


def aside_of(progress: Progress | None) -> tuple[Aside, ...]:
    """What is open, in a batch or not; ascending, neighbours that are equal in one."""
    found: list[Aside] = []
    for hole in [] if progress is None else progress.open:
        each = Aside(hole.first, hole.last, hole.key_hash, hole.attempts, hole.reason)
        if found and each.key_hash == NO_KEY and found[-1].last + 1 == each.first and found[-1][2:] == each[2:]:
            found[-1] = found[-1]._replace(last=each.last)
        else:
            found.append(each)
    return tuple(found)


def open_again(session: Session, key: TopicPartition, some: Sequence[Aside], epoch: int | None = None) -> None:
    """Open or park these, under our pause (*blocking*).

    epoch: of our lease; None: of a coordinated group. None of them may be done.
    Raises AdminError if the log does not show it.
    """
    for at in range(0, len(some), MOST_ENTRIES):
        part = some[at : at + MOST_ENTRIES]
        opened = tuple(
            (each.first, each.last, None if each.key_hash == NO_KEY else each.key_hash, each.attempts)
            for each in part
            if each.reason is None
        )
        parked = tuple(
            (each.first, each.key_hash, each.attempts, each.reason) for each in part if each.reason is not None
        )
        cp = session.home if epoch is None else session.cp_of(key)
        with session.locked():
            seen = session.worlds[cp].next_offset
        record: Record = SettleOffsets(*session.ids, "", 0, seen, *key, open=opened, parked=parked)
        if epoch is not None:
            record = SettlingMessages(*session.ids, *key, epoch, seen, open=opened, parked=parked)
        (asked,) = session.ask((cp, record))
        if asked.outcome is None or not asked.accepted or asked.outcome.code == codes.PARTIAL:
            why = "the log did not show it in time" if asked.outcome is None else asked.outcome.code
            raise AdminError(f"{key[0]} [{key[1]}]: open messages were not written again ({why}). Do it again")
