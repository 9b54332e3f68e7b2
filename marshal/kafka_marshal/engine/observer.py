"""What one client concludes about the others, beyond the shared state: silence by its own clock, and wishes.

The state of the world is judged at log time, which stands still without traffic. To know when a claim is worth
sending, a client estimates: a lease is *open* when it has no holder, is stale at log time, or when our own clock says
that nothing was heard of it for more than 2 · HI. The claim's own stamp then moves log time, and the log decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import xxhash

from kafka_marshal.engine.settings import EXPIRY_JITTER_SHARE, EngineSettings
from rationalizer import Lease, World, route_lease

__all__ = ["Observer"]

Key = tuple[str, int]


class Observer:
    """The group's leases as this client sees them."""

    def __init__(self, settings: EngineSettings, worlds: Mapping[int, World]) -> None:
        self._settings = settings
        self._worlds = worlds
        #: Own clock (ms) when we last heard of a lease's holder.
        self._heard: dict[Key, float] = {}
        #: Own clock (ms) when a CP's log time last moved.
        self._moved: dict[int, float] = {}
        self._free_since: dict[Key, float] = {}
        self._asked: dict[Key, float] = {}
        self._waiting: dict[tuple[str, str], float] = {}
        #: Hashes that never change, by key: a placement looks at every partition, and a group may have thousands.
        self._cps: dict[Key, int] = {}
        self._shares: dict[Key, float] = {}
        #: Leases that anybody of the group ever held.
        self.claimed: set[Key] = set()
        #: Leases of an older instance of this client, by epoch: they may be taken over while starting (C7).
        self.inherited: dict[Key, int] = {}

    def cp_of(self, key: Key) -> int:
        """The CP that a lease belongs to (L3)."""
        cp = self._cps.get(key)
        if cp is None:
            cp = self._cps[key] = route_lease(key[0], key[1], self._settings.coordination_partitions)
        return cp

    def lease(self, key: Key) -> Lease | None:
        """A lease as our replica knows it; None: never granted."""
        return self._worlds[self.cp_of(key)].lease(self._settings.group_id, *key)

    def caught_up(self, now: float) -> None:
        """The replica has caught up: start watching."""
        for cp, world in self._worlds.items():
            self._moved[cp] = now
            for lease in world.leases():
                if lease.group_id != self._settings.group_id:
                    continue
                key = (lease.topic, lease.partition)
                self.claimed.add(key)
                self._heard[key] = now - (world.log_time - lease.last_beat)
                if not lease.held:
                    self._free_since[key] = now
                elif lease.client_id == self._settings.client_id:
                    self.inherited[key] = lease.epoch

    def log_time_moved(self, cp: int, now: float) -> None:
        """A record was applied in a CP."""
        self._moved[cp] = now

    def heard(self, key: Key, now: float) -> None:
        """A beat or a granted claim was applied."""
        self.claimed.add(key)
        self._heard[key] = now
        self._free_since.pop(key, None)

    def freed(self, key: Key, now: float) -> None:
        """A lease has no holder any more."""
        self._free_since[key] = now

    def forgotten(self, cp: int) -> list[Key]:
        """The group was forgotten in a CP (C16); returns the leases that are gone."""
        keys = sorted(key for key in self.claimed if self.cp_of(key) == cp)
        for key in keys:
            self.claimed.discard(key)
            self._heard.pop(key, None)
            self._free_since.pop(key, None)
        return keys

    def wished(self, client_id: str, key: Key, now: float) -> None:
        """Somebody asked for a held lease (C4)."""
        self._asked.pop(key, None)
        self._asked[key] = now
        self._waiting[client_id, key[0]] = now

    def refused(self, key: Key, now: float) -> None:
        """Our own claim was rejected as HELD or NOT_FRESH: log time tells how long the holder has been silent."""
        lease = self.lease(key)
        if lease is not None:
            self._heard[key] = now - lease.age(self._worlds[self.cp_of(key)].log_time)

    def opens_at(self, key: Key, now: float) -> float:
        """Our own clock's time at which a claim is worth sending: ≤ now when the lease is open."""
        return self.look(key, now)[0]

    def look(self, key: Key, now: float) -> tuple[float, str | None]:
        """When a claim is worth sending, as opens_at says, and who holds the lease until then."""
        cp = self.cp_of(key)
        world = self._worlds[cp]
        lease = world.lease(self._settings.group_id, *key)
        if lease is None or lease.client_id is None:
            return 0.0, None
        hi = lease.heartbeat_interval_ms
        age = lease.age(world.log_time)
        if age > 2 * hi:
            return 0.0, lease.client_id
        silent_since = min(self._heard.get(key, now), self._moved.get(cp, now) - age)
        return silent_since + 2 * hi + 1 + self._jitter(key, hi), lease.client_id

    def _jitter(self, key: Key, hi: int) -> float:
        """Differs between clients, so that of a waiting fleet one claims first and the others see it."""
        share = self._shares.get(key)
        if share is None:
            name = f"{self._settings.instance_id}\0{key[0]}\0{key[1]}"
            share = self._shares[key] = xxhash.xxh32_intdigest(name.encode()) / 2**32
        return share * hi * EXPIRY_JITTER_SHARE

    def free_since(self, key: Key, now: float) -> float:
        """Since when nobody holds an open lease, as far as we saw."""
        return self._free_since.setdefault(key, now)

    def waiting(self, topics: frozenset[str], now: float) -> dict[str, frozenset[str]]:
        """Clients that asked for a lease of these topics within the last 2 · HI, and for which; ourselves left out."""
        horizon = now - 2 * self._settings.heartbeat_interval_ms
        self._waiting = {who: at for who, at in self._waiting.items() if at >= horizon}
        found: dict[str, frozenset[str]] = {}
        for client, topic in self._waiting:
            if topic in topics and client != self._settings.client_id:
                found[client] = found.get(client, frozenset()) | {topic}
        return found

    def asked_for(self, now: float) -> tuple[Key, ...]:
        """Held leases asked for within the last 2 · HI, most recent last."""
        horizon = now - 2 * self._settings.heartbeat_interval_ms
        self._asked = {key: at for key, at in self._asked.items() if at >= horizon}
        return tuple(self._asked)

    def closed_cps(self, now: float) -> dict[int, float]:
        """CPs in which nothing can be claimed now, and when (own clock) that should end; E4: never, inf."""
        closed: dict[int, float] = {}
        for cp in self._worlds:
            if self.is_stopped(cp):
                closed[cp] = inf
            elif (ends := self.paused_until(cp, now)) is not None:
                closed[cp] = ends
        return closed

    def is_stopped(self, cp: int) -> bool:
        """Does this CP stand before an Upgrade that we can't follow (E4)? Then we see nothing of it any more."""
        return self._worlds[cp].required_level is not None

    def paused_until(self, cp: int, now: float) -> float | None:
        """When (own clock) another client's pause of the group should end in a CP; None: not paused (C10)."""
        world = self._worlds[cp]
        pause = world.pause(self._settings.group_id)
        if pause is None or pause.client_id == self._settings.client_id:
            return None
        ends = self._moved.get(cp, now) + (pause.expires - world.log_time)
        return ends if ends > now else None
