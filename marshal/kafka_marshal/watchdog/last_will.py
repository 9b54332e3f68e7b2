"""What a watchdog is to say at its worker's death: the encoded release of each lease held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

from kafka_marshal.types import Key
from kafka_marshal.watchdog import process
from rationalizer import Outcome, ReleasingPartition, World, encode

__all__ = ["LastWill"]


class LastWill:
    """One worker's last will. Not safe for threads: its watchdog has a lock."""

    def __init__(self, ids: tuple[str, str, str]) -> None:
        """ids: instance, client, group of the member."""
        self._ids = ids
        #: By CP: the member's own replica.
        self.worlds: Mapping[int, World] = {}
        self._numbers: dict[Key, int] = {}
        #: Leases that we hold: CP and packed entry.
        self.leases: dict[Key, tuple[int, bytes]] = {}
        #: What the watchdog was not told yet, in order.
        self.untold: dict[Key, None] = {}

    def touched(self, cp: int, outcome: Outcome) -> list[Key]:
        """The leases that may have become ours, or ceased to be, with this record."""
        message = outcome.message
        if message is None or message[4] != self._ids[2]:
            return []
        match outcome.type:
            case "ClaimingPartition" | "ReleasingPartition":
                return [(message[5], message[6])]
            case "Heartbeat" if message[7] is None:  # a takeover (C7)
                return [(message[5], message[6])]
            case "ForgetGroup":
                return [key for key, (its_cp, _) in self.leases.items() if its_cp == cp]
        return []

    def look(self, cp: int, key: Key) -> None:
        """Bring one lease up to date with the replica."""
        instance_id, client_id, group_id = self._ids
        lease = self.worlds[cp].lease(group_id, *key)
        if lease is None or not lease.is_held_by(instance_id, client_id, lease.epoch):
            if self.leases.pop(key, None) is not None:
                self.untold[key] = None
            return
        release = encode(ReleasingPartition(*self._ids, *key, lease.epoch, None))
        entry = process.pack_lease(self._number(key), cp, lease.heartbeat_interval_ms, release)
        if self.leases.get(key) != (cp, entry):
            self.leases[key] = (cp, entry)
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
