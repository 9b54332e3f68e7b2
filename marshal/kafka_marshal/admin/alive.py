"""Does anybody of a group live? Asked before it is paused: who refuses to go on must not have stopped it for that."""

from __future__ import annotations

from kafka_marshal.admin.members import Members, is_at_work
from kafka_marshal.admin.session import Session
from kafka_marshal.errors import AdminError
from rationalizer import Outcome

__all__ = ["refuse_living"]

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
        if is_at_work(record, outcome):
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
