"""What one client concludes about the others, beyond the shared state: silence by its own clock, and requests.

The shared state is judged at log time, which does not move without traffic. So a client estimates when a claim is
worth sending. A lease is *open* if it has no holder, if it is stale at log time, or if nothing was heard of it for
more than 2 · HI by our own clock. The timestamp of the claim then moves log time, and the log decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import inf

import xxhash

from kafka_marshal.engine.settings import EXPIRY_JITTER_SHARE, EngineSettings, proof_margin_ms
from kafka_marshal.types import Key
from rationalizer import Lease, World, route_lease


class Peers:
    """The group's leases as this client sees them."""

    def __init__(self, settings: EngineSettings, worlds: Mapping[int, World]) -> None:
        self._settings = settings
        self._worlds = worlds
        #: Own clock (ms) when we last heard of a lease's holder.
        self._heard: dict[Key, float] = {}
        #: Own clock (ms) when a CP's log time last moved.
        self._moved: dict[int, float] = {}
        self._free_since: dict[Key, float] = {}
        #: Lease → client_id of its holder; client_id → number of leases.
        self._holders: dict[Key, str] = {}
        self._holdings: Counter[str] = Counter()
        #: Own clock (ms) of the last request: held lease → by another client; (client_id, topic) → by that client.
        self._asked: dict[Key, float] = {}
        self._waiting: dict[tuple[str, str], float] = {}
        #: instance_id → own clock (ms) of its first grant, if that is recent.
        self._met: dict[str, float] = {}
        #: Those instances that we have asked for a lease since.
        self._told: set[str] = set()
        #: Hashes by key. They never change, and a placement reads every partition: there may be thousands.
        self._cps: dict[Key, int] = {}
        self._shares: dict[Key, float] = {}
        #: Leases that any member of the group ever held.
        self.claimed: set[Key] = set()
        #: Leases of an older instance of this client, by epoch: they may be taken over while starting (C7).
        self.inherited: dict[Key, int] = {}

    def cp_of(self, key: Key) -> int:
        """The CP that a lease belongs to (L3)."""
        cp = self._cps.get(key)
        if cp is None:
            cp = self._cps[key] = route_lease(key[0], key[1], self._settings.coordination_partitions)
        return cp

    def next_offset(self, cp: int) -> int:
        """The offset above all records of a CP that our replica has applied."""
        return self._worlds[cp].next_offset

    def lease(self, key: Key) -> Lease | None:
        """A lease as our replica knows it; None: never granted."""
        cp = self._cps.get(key)
        return self._worlds[self.cp_of(key) if cp is None else cp].lease(self._settings.group_id, *key)

    def caught_up(self, now: float) -> None:
        """The replica has caught up: start tracking the CPs that it reads, and stop tracking all others."""
        for cp in self._moved.keys() - self._worlds.keys():
            del self._moved[cp]
            self.forgotten(cp)
        for cp, world in self._worlds.items():
            if cp in self._moved:
                continue
            self._moved[cp] = now
            for lease in world.leases():
                if lease.group_id != self._settings.group_id:
                    continue
                key = (lease.topic, lease.partition)
                self.claimed.add(key)
                self._heard[key] = now - (world.log_time - lease.last_beat)
                if lease.client_id is None:
                    self._free_since[key] = now
                    continue
                self._hold(key, lease.client_id)
                if lease.client_id == self._settings.client_id:
                    self.inherited[key] = lease.epoch

    def log_time_moved(self, cp: int, now: float) -> None:
        """A record was applied in a CP."""
        self._moved[cp] = now

    def log_time(self, cp: int, now: float) -> float:
        """What the log time of a CP is by now, if our clock and the brokers' run alike."""
        return self._worlds[cp].log_time + (now - self._moved.get(cp, now))

    def heard(self, key: Key, now: float) -> bool:
        """A beat was applied. Returns whether the lease was free until now, as far as we saw."""
        self._heard[key] = now
        return self._free_since.pop(key, None) is not None

    def granted(self, client_id: str, instance_id: str, key: Key, now: float) -> None:
        """A claim (or takeover) was granted."""
        self.heard(key, now)
        self.claimed.add(key)
        self._asked.pop(key, None)  # that request went to the previous holder
        self._hold(key, client_id)
        horizon = now - self._settings.heartbeat_interval_ms
        while self._met and self._met[first := next(iter(self._met))] < horizon:
            del self._met[first]
            self._told.discard(first)
        self._met.setdefault(instance_id, now)

    def shared(self, key: Key, now: float) -> None:
        """A share was granted: the lease has no holder, and is not free."""
        self.heard(key, now)
        self.claimed.add(key)
        self._hold(key, None)

    def freed(self, client_id: str, key: Key, now: float) -> None:
        """A lease has no holder any more. A client that released its last lease has left: drop its requests."""
        self._free_since[key] = now
        self._hold(key, None)
        if not self._holdings[client_id]:
            for wish in [wish for wish in self._waiting if wish[0] == client_id]:
                del self._waiting[wish]

    def _hold(self, key: Key, client_id: str | None) -> None:
        before = self._holders.pop(key, None)
        if before is not None:
            self._holdings[before] -= 1
            if not self._holdings[before]:
                del self._holdings[before]
        if client_id is not None:
            self._holders[key] = client_id
            self._holdings[client_id] += 1

    def forgotten(self, cp: int) -> list[Key]:
        """The group was forgotten in a CP (C16). Returns the leases that are gone."""
        keys = sorted(key for key in self.claimed if self.cp_of(key) == cp)
        for key in keys:
            self.claimed.discard(key)
            self._heard.pop(key, None)
            self._hold(key, None)
            self._free_since.pop(key, None)
        return keys

    def wished(self, client_id: str, key: Key, now: float) -> None:
        """A client asked for a held lease (C4). Our own requests count too, since others count them."""
        self._waiting[client_id, key[0]] = now
        if client_id != self._settings.client_id:
            self._asked.pop(key, None)
            self._asked[key] = now

    def wished_at(self, topic: str) -> float:
        """When (own clock, ms) others last saw us ask for a lease of a topic; −inf: not lately."""
        return self._waiting.get((self._settings.client_id, topic), -inf)

    def may_not_know(self, key: Key, wished_at: float) -> bool:
        """Whether a lease's holder may have missed our last request: it came after the request, or shortly before.

        A starting replica sees no earlier requests. The two records may lie in different CPs, so their order says
        little. True once per holder.
        """
        lease = self.lease(key)
        if lease is None or lease.instance_id is None or lease.instance_id in self._told:
            return False
        if self._met.get(lease.instance_id, -inf) < wished_at - proof_margin_ms(self._settings.heartbeat_interval_ms):
            return False
        self._told.add(lease.instance_id)
        return True

    def refused(self, key: Key, now: float) -> None:
        """Our claim was rejected as HELD or NOT_FRESH: log time now shows how long the holder has been silent."""
        lease = self.lease(key)
        if lease is not None and (kept_by := lease.longest) is not None:
            self._heard[key] = now - (self._worlds[self.cp_of(key)].log_time - kept_by.last_beat)

    def opens_at(self, key: Key, now: float) -> float:
        """When (own clock, ms) a claim is worth sending: ≤ now if the lease is open."""
        return self.look(key, now)[0]

    def look(self, key: Key, now: float, enough: float = inf) -> tuple[float, str | None]:
        """When a claim is worth sending, as in ``opens_at``, and the client_id of the holder until then (None: free).

        Of a lease that is shared: of the sharer that is the last to go stale.

        enough: a caller that wants the earliest of many times passes the earliest so far. A time that is not before
        it comes back without jitter.
        """
        cp = self.cp_of(key)
        world = self._worlds[cp]
        lease = world.lease(self._settings.group_id, *key)
        kept_by = None if lease is None else lease.longest
        if kept_by is None:
            return 0.0, None
        hi = kept_by.heartbeat_interval_ms
        age = world.log_time - kept_by.last_beat
        if age > 2 * hi:
            return 0.0, kept_by.client_id
        opens_at = self._goes_stale_at(key, hi, age, now, self._moved.get(cp, now))
        if opens_at >= enough:
            return opens_at, kept_by.client_id
        return opens_at + self.jitter(key, hi), kept_by.client_id

    def opening(self, keys: Iterable[Key], cp: int, now: float, before: float) -> list[Key]:
        """The held leases of one CP that a claim may win before that time (own clock, ms); ``look`` returns when."""
        world = self._worlds[cp]
        log_time, group_id, moved = world.log_time, self._settings.group_id, self._moved.get(cp, now)
        found = []
        for key in keys:
            lease = world.lease(group_id, *key)
            if lease is not None and (kept_by := lease.longest) is not None:
                hi = kept_by.heartbeat_interval_ms
                opens_at = self._goes_stale_at(key, hi, log_time - kept_by.last_beat, now, moved)
                if opens_at < before and opens_at + self.jitter(key, hi) < before:
                    found.append(key)
        return found

    def _goes_stale_at(self, key: Key, hi: int, age: int, now: float, moved: float) -> float:
        """When (own clock, ms) a lease is stale if no more beats come. age: by log time, which last moved at moved."""
        return min(self._heard.get(key, now), moved - age) + 2 * hi + 1

    def jitter(self, key: Key, hi: int) -> float:
        """Differs between clients, so that one of many waiting clients claims first and the others see it."""
        share = self._shares.get(key)
        if share is None:
            name = f"{self._settings.instance_id}\0{key[0]}\0{key[1]}"
            share = self._shares[key] = xxhash.xxh32_intdigest(name.encode()) / 2**32
        return share * hi * EXPIRY_JITTER_SHARE

    def free_since(self, key: Key, now: float) -> float:
        """Since when (own clock, ms) an open lease has no live holder, as far as we saw."""
        return self._free_since.setdefault(key, now)

    def waiting(self, topics: frozenset[str], now: float) -> dict[str, frozenset[str]]:
        """Clients that asked for a lease of these topics within the last 2 · HI, and have not left since."""
        horizon = now - 2 * self._settings.heartbeat_interval_ms
        self._waiting = {who: at for who, at in self._waiting.items() if at >= horizon}
        found: dict[str, frozenset[str]] = {}
        for client, topic in self._waiting:
            if topic in topics:
                found[client] = found.get(client, frozenset()) | {topic}
        return found

    def asked_for(self, now: float) -> tuple[Key, ...]:
        """Held leases asked for within the last 2 · HI, most recent last."""
        horizon = now - 2 * self._settings.heartbeat_interval_ms
        while self._asked and self._asked[first := next(iter(self._asked))] < horizon:
            del self._asked[first]
        return tuple(self._asked)

    def closed_cps(self, now: float) -> dict[int, float]:
        """CPs in which nothing can be claimed now → when (own clock, ms) that should end; inf: never (E4)."""
        closed: dict[int, float] = {}
        for cp in self._worlds:
            if self.is_stopped(cp):
                closed[cp] = inf
            elif (ends := self.paused_until(cp, now)) is not None:
                closed[cp] = ends
        return closed

    def hole_count(self, cp: int) -> int:
        """How many holes all groups have in this CP."""
        return self._worlds[cp].hole_count()

    def is_stopped(self, cp: int) -> bool:
        """Whether this CP has an Upgrade that we cannot follow (E4): we read no more of it."""
        return self._worlds[cp].required_level is not None

    def paused_until(self, cp: int, now: float) -> float | None:
        """When (own clock, ms) another client's pause of the group should end in a CP; None: not paused (C10)."""
        world = self._worlds[cp]
        pause = world.pause(self._settings.group_id)
        if pause is None or pause.client_id == self._settings.client_id:
            return None
        ends = self._moved.get(cp, now) + (pause.expires - world.log_time)
        return ends if ends > now else None


def vacant_since(peers: Peers, key: Key) -> float | None:
    """When (own clock, ms) the last holder of a lease released it, or was last heard of; None: never held."""
    return peers._free_since.get(key, peers._heard.get(key)) if key in peers.claimed else None


def open_since(peers: Peers, key: Key, now: float) -> float:
    """Since when (own clock, ms) a lease is open, or from when on it will be; −inf: it was never held."""
    lease, cp = peers.lease(key), peers.cp_of(key)
    if lease is None or not lease.held:
        return peers._free_since.get(key, -inf)
    age = peers._worlds[cp].log_time - lease.last_beat
    return peers._goes_stale_at(key, lease.heartbeat_interval_ms, age, now, peers._moved.get(cp, now))


def holders_of(peers: Peers, topics: Collection[str]) -> int:
    """How many members hold a lease of these topics."""
    return len({client_id for key, client_id in peers._holders.items() if key[0] in topics})


def holders(peers: Peers) -> int:
    """How many members hold a lease. Any thread may call it, without the lock."""
    return len(peers._holdings)
