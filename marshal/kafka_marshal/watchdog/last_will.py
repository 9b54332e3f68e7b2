"""What a watchdog appends at its worker's death: the encoded release of each lease, or what ends a group's member."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from kafka_marshal.types import Key
from kafka_marshal.watchdog import process
from rationalizer import (
    CommitEntry,
    CommitOffsets,
    Group,
    Lease,
    LeaveGroup,
    Outcome,
    Record,
    ReleasingPartition,
    World,
    encode,
    route_group,
)
from rationalizer.leases.shares import Share
from rationalizer.wire.wellformed import REACHED_AND_LEAVES


def _leaves(group: Group | None, slot: int) -> bool:
    """Whether the log shows that a member leaves at the open barrier: a LeaveGroup would lose what it handed in."""
    barrier = None if group is None or group.checkpoints is None else group.checkpoints.barrier
    found = None if barrier is None else barrier.answers.get(slot)
    return found is not None and found.answer == REACHED_AND_LEAVES


#: Stands for the membership: its LeaveGroup.
_MEMBER: Key = ("", -1)


def _slot(key: Key, number: int) -> Key:
    """Stands for the release of the number-th of our shares of a partition; no topic can have such a name."""
    return (f"{key[0]}\0{number}", key[1]) if number else key


class LastWill:
    """The pre-encoded releases of one worker. Not thread-safe: its watchdog has a lock."""

    def __init__(self, ids: tuple[str, str, str]) -> None:
        """ids: instance, client, group of the member."""
        self._ids = ids
        #: By CP: the member's own replica, as far as it reads; and how many CPs there are.
        self.worlds: Mapping[int, World] = {}
        self.partitions = 0
        self._numbers: dict[Key, int] = {_MEMBER: process.LEAVE}
        #: What is to be appended for each lease, or each piece with progress that is not committed: CP and packed
        #: entry.
        self.leases: dict[Key, tuple[int, bytes]] = {}
        #: Of a coordinated group: the member and its session (ms), as our replica shows them; "": it is no member.
        self._member_id, self._session_ms = "", 0
        #: What was not sent to the watchdog yet, in order.
        self.untold: dict[Key, None] = {}

    def touched(self, cp: int, outcome: Outcome) -> list[Key]:
        """The leases that may have become ours, or ceased to be, with this record."""
        message = outcome.message
        if message is None or message.group_id != self._ids[2]:
            return []
        match outcome.type:
            case "ClaimingPartition" | "ReleasingPartition" | "ClaimingShare":
                return [(message.topic, message.partition)]
            case "Heartbeat" if message.epoch is None:  # a takeover (C7)
                return [(message.topic, message.partition)]
            case "ForgetGroup":
                return [key for key, (its_cp, _) in self.leases.items() if its_cp == cp]
        return []

    def look(self, cp: int, key: Key) -> None:
        """Bring one lease, or our shares of it, up to date with the replica."""
        instance_id, client_id, group_id = self._ids
        lease = self.worlds[cp].lease(group_id, *key)
        ours: list[Lease | Share] = []
        if lease is not None and lease.shares is not None:
            ours += [share for share in lease.shares if share.is_of(instance_id, client_id)]
        elif lease is not None and lease.is_held_by(instance_id, client_id, lease.epoch):
            ours = [lease]
        for number, one in enumerate(ours):
            release = ReleasingPartition(*self._ids, *key, one.epoch, None)
            self._say(_slot(key, number), cp, one.heartbeat_interval_ms, release)
        gone = len(ours)
        while gone == 0 or _slot(key, gone) in self.leases:
            self._drop(_slot(key, gone))
            gone += 1

    # Of a member of a coordinated group.

    def look_at_member(self, cp: int) -> bool:
        """A record of some group was accepted there: bring our membership up to date; whether it has changed."""
        instance_id, client_id, group_id = self._ids
        home = route_group(group_id, self.partitions)
        if cp != home:
            return False
        group = self.worlds[home].group(group_id)
        member = None if group is None else group.clients.get(client_id)
        if member is None or member.instance_id != instance_id or _leaves(group, member.slot):
            if not self._member_id:
                return False
            self._member_id = ""
            for key in list(self.leases):
                self._drop(key)
            return True
        if (self._member_id, self._session_ms) == (member.member_id, member.session_timeout_ms):
            return False
        self._member_id, self._session_ms = member.member_id, member.session_timeout_ms
        # Any generation since it joined will do (G13).
        self._say(_MEMBER, home, member.session_timeout_ms // 2, LeaveGroup(*self._ids, member.member_id, member.slot))
        return True

    def done(self, pieces: Mapping[Key, tuple[int, int]]) -> None:
        """What the member has done and the log does not know: by partition, epoch and last offset (G14)."""
        if not self._member_id:
            return
        home = route_group(self._ids[2], self.partitions)
        for key in [key for key in self.leases if key not in pieces and key != _MEMBER]:
            self._drop(key)
        for key, (epoch, last_offset) in pieces.items():
            entries = (CommitEntry(*key, through=last_offset),)
            # Under the generation since which it has the piece: rejected if the piece went away since, and came back.
            record = CommitOffsets(*self._ids, self._member_id, epoch, False, entries)
            self._say(key, home, self._session_ms // 2, record)

    # Of both.

    def _say(self, key: Key, cp: int, heartbeat_interval_ms: int, record: Record) -> None:
        entry = process.pack_lease(self._number(key), cp, heartbeat_interval_ms, encode(record))
        if self.leases.get(key) != (cp, entry):
            self.leases[key] = (cp, entry)
            self.untold[key] = None

    def _drop(self, key: Key) -> None:
        if self.leases.pop(key, None) is not None:
            self.untold[key] = None

    def _number(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def begin(self) -> None:
        """A new watchdog knows nothing."""
        self.untold = dict.fromkeys(self.leases)

    def packet(self) -> tuple[bytes, list[Key]]:
        """The next packet of what is untold, and which leases it is about."""
        parts, size = [process.LAST_WILL], 0
        for key in self.untold:
            _, entry = self.leases.get(key) or (0, process.pack_lease(self._number(key), 0, 0, b""))
            size += len(entry)
            if len(parts) > 1 and size > process.MAX_PACKET_BYTES:
                break
            parts.append(entry)
        return b"".join(parts), list(islice(self.untold, len(parts) - 1))

    def told(self, keys: Iterable[Key]) -> None:
        """The watchdog knows of these."""
        for key in keys:
            del self.untold[key]
