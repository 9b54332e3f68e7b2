"""Commands of scripts about members whose group takes checkpoints:

cluster level=3                 the log is at that level
a starts flights every=30000    a coordinated group; checkpoints are begun that often (ms), or every=none
    [hold] [adopt] [stateless] [shares] [drain=10000] [timeout=60000] [session=3000] [save=all]
a starts flights grouped        a coordinated group, and no policy for checkpoints
a asks for a checkpoint
a goes back [to 9]              the program's rollback
a saves hang, a saves return    on_checkpoint returns no more; it returns, and what it saved is safe
a saves return, not yet safe    it returns a Future that is not done; a saves are safe: now it is
a saves raise, a saves work
a restores hang, a restores return, a restores raise, a restores miss, a restores work
a closes within 500             it leaves at a barrier until then (ms); within 0: its state is not known
operator pauses 5000            0: no longer
a shows                         what `consumer.checkpoints` shows
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kafka_marshal.engine.groups.client import GroupClient
from kafka_marshal.engine.settings import CheckpointOptions, GroupOptions
from rationalizer import World, route_group
from tests.scripts.group_records import Groups

if TYPE_CHECKING:
    from tests.scripts.members import TracedMember

#: Words of ``starts`` that make it a member of a coordinated group.
GROUP_FLAGS = {"hold", "adopt", "stateless", "shares", "grouped"}


def group_of(flags: set[str], options: dict[str, str]) -> GroupOptions | None:
    """How a member joins its group; None: it claims partitions."""
    if "every" not in options and "grouped" not in flags:
        return None
    session, every = int(options.pop("session", "3000")), options.pop("every", "none")
    if "grouped" in flags:
        return GroupOptions("sticky", session)
    policy = CheckpointOptions(
        every_ms=None if every == "none" else float(every),
        drain_ms=float(options.pop("drain", "10000")),
        timeout_ms=int(options.pop("timeout", "60000")),
        hold="hold" in flags,
        adopt="adopt" in flags,
        save_all=options.pop("save", "changed") == "all",
        has_callback="stateless" not in flags,
    )
    return GroupOptions("sticky", session, "shares" in flags, policy)


def groups_of(judges: Mapping[int, World], cps: int) -> Groups:
    """What the log has of its groups, so that no record need say it."""

    def found(group_id: str) -> World:
        return judges[route_group(group_id, cps)]

    def member_id(group_id: str, sender: tuple[str, str]) -> str:
        group = found(group_id).group(group_id)
        member = None if group is None else group.clients.get(sender[1])
        return "" if member is None else member.member_id

    def generation(group_id: str) -> int:
        group = found(group_id).group(group_id)
        return 0 if group is None else group.generation

    def newest(group_id: str) -> int:
        group = found(group_id).group(group_id)
        return 0 if group is None or group.checkpoints is None else group.checkpoints.newest

    def barrier(group_id: str) -> int:
        group = found(group_id).group(group_id)
        opened = None if group is None or group.checkpoints is None else group.checkpoints.barrier
        return 0 if opened is None else opened.id

    return Groups(member_id=member_id, generation=generation, newest=newest, barrier=barrier)


def plays(member: TracedMember, words: tuple[str, ...]) -> bool:
    """Play a command of this page. False: it is not one."""
    number = member.consumers[0].number if member.consumers else 0
    checkpoints: Any = member.checkpoints_of(number)
    match words:
        case ("asks", "for", "a", "checkpoint"):
            member.engine.take(number, checkpoints.take, member.clock())
        case ("goes", "back", *to):
            member.engine.take(number, checkpoints.go_back, int(to[1]) if to else None, member.clock())
        case ("saves", *how):
            _saves(member, " ".join(how))
        case ("restores", how):
            _restores(member, how)
        case ("closes", "within", ms):
            leave_by = member.clock() + float(ms) if ms != "0" else float("-inf")
            member.engine.take(number, member.consumers[0].close, member.clock(), leave_by)
        case ("shows",):
            _shows(member)
        case _:
            return False
    member.settle()
    return True


def _saves(member: TracedMember, how: str) -> None:
    member.hold_saves = how == "hang"
    member.save_error = OSError("disk full") if how == "raise" else None
    if how == "return":
        member.answer_saves()
    elif how == "return, not yet safe":
        member.answer_saves(are_safe=False)
    elif how == "are safe":
        for asked in member.unsafe:
            checkpoints: Any = member.checkpoints_of(asked.consumer)
            of = asked.barrier, asked.pieces, None, member.clock()
            member.engine.take(asked.consumer, checkpoints.safe, *of)
        member.unsafe.clear()


def _restores(member: TracedMember, how: str) -> None:
    member.hold_restores = how == "hang"
    member.restore_error = OSError("no such state") if how in ("raise", "miss") else None
    member.is_state_missing = how == "miss"
    if how == "return":
        member.answer_restores()


def _shows(member: TracedMember) -> None:
    source = member.consumers[0].source
    assert isinstance(source, GroupClient)
    found = source.checkpoints
    assert found is not None
    kept = ", ".join(str(each[0]) for each in found.kept)
    member.net.say(f"{member.client_id} {found.state}, newest {found.newest}, kept {kept}")
