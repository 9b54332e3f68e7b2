"""Policies without engines: holders as a table, time in steps, and the rules by which an engine asks a policy.

As in placement.py and peers.py: what a member sees, how often it may claim a held partition (one per topic and HI),
that it avoids what it released for 2 · HI unless that was its surplus, and that claims are forgotten after 2 · HI or
when their client releases something. Everything else is instant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from kafka_marshal.engine.policies import Balanced, PartitionView, Policy, View

HI = 1_000.0
STEP = 50.0
Key = tuple[str, int]


@dataclass
class Player:
    """One member."""

    client_id: str
    policy: Policy
    topics: frozenset[str]
    let_go: dict[Key, float] = field(default_factory=dict)
    next_ask: dict[str, float] = field(default_factory=dict)


class Board:
    """The whole group."""

    def __init__(self, keys: Iterable[Key], seed: int = 0) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.holder: dict[Key, str | None] = dict.fromkeys(sorted(keys))
        self.free_since: dict[Key, float] = dict.fromkeys(self.holder, 0.0)
        self.players: dict[str, Player] = {}
        self.asked: dict[Key, float] = {}
        self.waiting: dict[tuple[str, str], float] = {}
        #: Number of records that an engine would write: claims (granted or not) and releases.
        self.claims = 0
        self.releases = 0

    def join(self, client_id: str, policy: Policy | None = None, topics: Iterable[str] | None = None) -> None:
        wanted = frozenset(topics) if topics is not None else frozenset(topic for topic, _ in self.holder)
        self.players[client_id] = Player(client_id, policy or Balanced(), wanted)

    def leave(self, client_id: str) -> None:
        """Close: everything is released."""
        del self.players[client_id]
        for key in self.held(client_id):
            self._free(key)

    def die(self, client_id: str) -> None:
        """Crash: its leases become free after 2 · HI."""
        del self.players[client_id]
        for key in self.held(client_id):
            self.free_since[key] = self.now + 2 * HI

    def held(self, client_id: str) -> list[Key]:
        return [key for key, holder in self.holder.items() if holder == client_id]

    def counts(self) -> dict[str, int]:
        return {client: len(self.held(client)) for client in sorted(self.players)}

    def unowned(self) -> list[Key]:
        return [key for key, holder in self.holder.items() if holder not in self.players]

    def _free(self, key: Key) -> None:
        self.waiting = {wish: at for wish, at in self.waiting.items() if wish[0] != self.holder[key]}
        self.holder[key] = None
        self.free_since[key] = self.now
        self.releases += 1

    def is_open(self, key: Key) -> bool:
        holder = self.holder[key]
        return holder is None or (holder not in self.players and self.now >= self.free_since[key])

    def view(self, player: Player) -> View:
        partitions = {}
        for key, holder in self.holder.items():
            if key[0] in player.topics:
                free = self.is_open(key)
                partitions[key] = PartitionView(None if free else holder, self.free_since[key] if free else None)
        horizon = self.now - 2 * HI
        waiting: dict[str, frozenset[str]] = {}
        for (client, topic), at in self.waiting.items():
            if at >= horizon and topic in player.topics:
                waiting[client] = waiting.get(client, frozenset()) | {topic}
        asking = waiting.pop(player.client_id, None) is not None
        return View(
            client_id=player.client_id,
            heartbeat_interval_ms=int(HI),
            partitions=partitions,
            waiting=waiting,
            asking=asking,
            left_alone=frozenset(key for key, until in player.let_go.items() if until > self.now),
            asked_for=tuple(key for key, at in self.asked.items() if at >= horizon),
        )

    def turn(self, client_id: str) -> None:
        """One member decides and acts."""
        player = self.players[client_id]
        own = tuple(key for key in self.held(client_id) if key[0] in player.topics)
        view = self.view(player)
        wishes = player.policy.wishes(view, own, self.now)
        for key in wishes.release:
            assert key in own
            self._free(key)
            player.next_ask.clear()
            if key not in wishes.surplus:
                player.let_go[key] = self.now + 2 * HI
        claims = [key for key in wishes.claim if player.let_go.get(key, 0.0) <= self.now]
        for key in wishes.ask:
            if key not in own and player.let_go.get(key, 0.0) <= self.now >= player.next_ask.get(key[0], 0.0):
                player.next_ask[key[0]] = self.now + HI
                claims.append(key)
        for key in claims:
            assert key in view.partitions
            self.claims += 1
            if self.is_open(key):
                self.holder[key] = client_id
                self.asked.pop(key, None)
            elif self.holder[key] != client_id:
                self.asked.pop(key, None)
                self.asked[key] = self.now
                self.waiting[client_id, key[0]] = self.now

    def run(self, intervals: float) -> None:
        until = self.now + intervals * HI
        while self.now < until:
            self.now += STEP
            for client_id in self.rng.sample(sorted(self.players), len(self.players)):
                self.turn(client_id)

    def is_even(self) -> bool:
        low, high = divmod(len(self.holder), len(self.players))
        return not self.unowned() and all(low <= count <= low + bool(high) for count in self.counts().values())

    def time_until_even(self, limit: float) -> float:
        """HI until every member has its share; fails after limit."""
        began = self.now
        while not self.is_even():
            assert self.now - began <= limit * HI, f"not even within {limit} HI: {self.counts()}, {self.unowned()}"
            self.run(STEP / HI)
        return (self.now - began) / HI
