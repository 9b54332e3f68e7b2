"""The queue of a lock: members that wait for it claim it in the order of their first requests in the log.

The log grants the first claim after a lock fell free (C4). So while it is free, each member waits in case one that
asked before it claims. Requests are claims that were rejected; a member that waits repeats them once per HI.
"""

from __future__ import annotations

from math import inf

from kafka_marshal.engine.claims.peers import Peers, open_since
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.topic_names import is_lock
from kafka_marshal.types import Key

#: How much later each further member in a queue claims, in heartbeat intervals.
TURN_SHARE = 1 / 8


class Queues:
    """Who waits for the locks of the group, as this client sees it."""

    def __init__(self, settings: EngineSettings, peers: Peers) -> None:
        self._settings = settings
        self._peers = peers
        #: Lock → client_ids in the order of their first requests → own clock (ms) of the last one.
        self._waiting: dict[Key, dict[str, float]] = {}
        #: Since when (own clock, ms) we see requests; inf: not yet.
        self.seen_since: float = inf

    def asked(self, client_id: str, key: Key, now: float) -> None:
        """A client asked for a held lease. Who has not for two HI is gone, or comes again as a new one."""
        if is_lock(key[0]):
            horizon, waiting = now - 2 * self._settings.heartbeat_interval_ms, self._waiting.get(key, {})
            self._waiting[key] = {who: at for who, at in waiting.items() if at >= horizon} | {client_id: now}

    def granted(self, client_id: str, key: Key) -> None:
        """A client has got a lease."""
        self._waiting.get(key, {}).pop(client_id, None)

    def turn_at(self, key: Key, now: float, next_try: float) -> float:
        """When (own clock, ms) to claim a lease that a user has named; next_try: when to repeat the request for it.

        A lock is claimed in turn once it is open, and requested before; any other lease by whichever comes first.
        """
        if not is_lock(key[0]):
            return min(next_try, self._peers.opens_at(key, now))
        turn_ms = self._places_before(key, now) * TURN_SHARE * self._settings.heartbeat_interval_ms
        opens_at = open_since(self._peers, key, now)
        return opens_at + turn_ms if opens_at <= now else min(next_try, opens_at + turn_ms)

    def _places_before(self, key: Key, now: float) -> int:
        """How many clients that may still wait for a lock have asked for it before us."""
        hi, own = self._settings.heartbeat_interval_ms, self._settings.client_id
        waiting = [who for who, at in self._waiting.get(key, {}).items() if who == own or at >= now - 2 * hi]
        if own not in waiting:
            return len(waiting) + 1 if waiting else 0  # behind a new one, too
        # One that started less than an interval ago may not have seen all requests before its own.
        is_new = now < self.seen_since + (1 + TURN_SHARE) * hi
        return waiting.index(own) + is_new
