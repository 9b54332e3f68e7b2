"""Whether workers of a group are alive, and whether a client_id was a worker's: asked before the group is paused."""

from __future__ import annotations

from kafka_marshal.admin.members import Members
from kafka_marshal.admin.session import Session
from kafka_marshal.errors import AdminError
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.fold import is_of_worker, shows_life
from kafka_marshal.observe.words import what
from kafka_marshal.ports import Cluster
from rationalizer import Outcome, ReleaseGroup

__all__ = ["find_consuming", "refuse_living"]

#: Members named in a message.
_LISTED = 4


def refuse_living(session: Session, timeout_s: float, effect: str, remedy: str) -> None:
    """Raise AdminError where a member beats, or may be alive still after timeout_s (*blocking*).

    One that died a moment ago is silent for long enough soon: that is waited for. Nothing but Ticks is written.
    effect: what was not done. remedy: what to do first.
    """
    members = Members(session)
    beating: set[str] = set()

    def applied(_cp: int, _offset: int, outcome: Outcome) -> None:
        record = outcome.record
        if record is None or record.group_id != session.group_id or record.client_id == session.client_id:
            return
        if shows_life(outcome):
            beating.add(record.client_id)

    session.on_applied = applied
    until = session.now_ms() + timeout_s * 1000
    try:
        session.tick(session.cps)
        while True:
            with session.locked():
                busy = members.at_work(None)
                due = members.tick_times(busy)
            if beating:
                names = ", ".join(map(repr, sorted(beating)[:_LISTED]))
                raise AdminError(
                    f"group {session.group_id!r} is alive: {names} beat meanwhile. {effect}, nobody was paused, and it "
                    f"goes on. {remedy}"
                )
            if not busy:
                return
            if session.now_ms() >= until:
                names = ", ".join(sorted({repr(info.client_id) for info in busy})[:_LISTED])
                raise AdminError(
                    f"group {session.group_id!r} may be at work: after {timeout_s:g} s {names} are not silent for long "
                    f"enough to be gone. {effect}, nobody was paused, and it goes on. {remedy}",
                    in_hand=sorted({(info.topic, info.partition) for info in busy if info.topic}),
                )
            session.wait_for(lambda: beating or not members.at_work(None), min(until, *due.values()) if due else until)
            now = session.now_ms()
            session.tick([cp for cp, at in due.items() if at <= now])
    finally:
        session.on_applied = None


def find_consuming(cluster: Cluster, topic: str, group_id: str, client_id: str, timeout_s: float) -> str | None:
    """The first thing in the log that a consumer of this client_id did, in words; None: there is no such thing.

    An admin must not pause under that name: the consumer's beats would then reposition the group (C11). Reads the whole
    log (*blocking*). A run of an admin differs from a consumer's: it pauses a CP before it claims anything there.
    """
    replica = Replica(cluster, topic, timeout_s)
    admins: set[str] = set()
    found: list[str] = []

    def applied(cp: int, offset: int, outcome: Outcome) -> None:
        record = outcome.record
        if record is None or record.client_id != client_id or record.group_id != group_id or found:
            return
        if isinstance(record, ReleaseGroup):
            admins.add(record.instance_id)
        elif record.instance_id not in admins and is_of_worker(outcome):
            found.append(f"{what(record, None, outcome.log_time)} (offset {offset} of partition {cp})")

    try:
        replica.catch_up(timeout_s, applied=applied)
    finally:
        replica.close()
    return found[0] if found else None
