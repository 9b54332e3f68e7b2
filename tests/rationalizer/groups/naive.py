"""A second, literal and slow implementation of G17, K1 and K2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from rationalizer.groups.assignors import Before, Target

KEYS = 2**63

#: (topic, partition)
Thing = tuple[str, int]


@dataclass
class Game:
    """The input of one application of a strategy. Topics are (name, count); bins may be members or partitions."""

    topics: list[tuple[str, int]]
    subscribers: Mapping[str, Sequence[int]]
    targets: Mapping[Thing, int]  # the one target of every key; absent: there was none
    owners: Mapping[Thing, int]  # the one owner of every key

    def things(self) -> list[Thing]:
        return [(topic, n) for topic, count in sorted(self.topics) for n in range(count)]


def by_range(game: Game) -> dict[Thing, int]:
    found = {}
    for topic, n in game.topics:
        members = sorted(game.subscribers[topic])
        m = len(members)
        partitions = list(range(n))
        for i, member in enumerate(members):
            for _ in range(n // m + (1 if i < n % m else 0)):
                found[topic, partitions.pop(0)] = member
    return found


def by_roundrobin(game: Game) -> dict[Thing, int]:
    circle = sorted({slot for topic, _ in game.topics for slot in game.subscribers[topic]})
    found = {}
    pointer = 0
    for topic, partition in game.things():
        while circle[pointer] not in game.subscribers[topic]:
            pointer = (pointer + 1) % len(circle)
        found[topic, partition] = circle[pointer]
        pointer = (pointer + 1) % len(circle)
    return found


def by_sticky(game: Game) -> dict[Thing, int]:
    members = sorted({slot for topic, _ in game.topics for slot in game.subscribers[topic]})
    order = game.things()
    found: dict[Thing, int] = {}

    def count(member: int) -> int:
        return list(found.values()).count(member)

    for thing in order:  # (1)
        if game.targets.get(thing) in game.subscribers[thing[0]]:
            found[thing] = game.targets[thing]
    stayed = dict(found)
    for thing in order:  # (2)
        if thing not in found:
            able = sorted(game.subscribers[thing[0]])
            fewest = min(map(count, able))
            equals = [member for member in able if count(member) == fewest]
            owner = game.owners.get(thing)
            found[thing] = owner if owner is not None and owner in equals else equals[0]

    def could_move(a: int, b: int) -> list[Thing]:
        if count(b) > count(a) - 2:
            return []
        return [thing for thing in order if found[thing] == a and b in game.subscribers[thing[0]]]

    while True:  # (3)
        givers = [a for a in members if any(could_move(a, b) for b in members)]
        if not givers:
            return found
        a = min(givers, key=lambda each: (-count(each), each))
        b = min((b for b in members if could_move(a, b)), key=lambda each: (count(each), each))
        chosen = max(
            could_move(a, b),
            key=lambda thing: (game.owners.get(thing) == b, stayed.get(thing) != a, order.index(thing)),
        )
        found[chosen] = b


STRATEGIES: dict[str, Callable[[Game], dict[Thing, int]]] = {
    "range": by_range,
    "roundrobin": by_roundrobin,
    "sticky": by_sticky,
}


def compute_targets(
    strategy: str,
    subscribers: Mapping[str, Sequence[int]],
    counts: Mapping[str, int],
    opted_in: AbstractSet[int],
    shared: AbstractSet[str],
    before: Mapping[str, Before],
    any_target: Callable[[str], Mapping[int, int]],
) -> dict[str, list[Target]]:
    def known(which: str) -> dict[Thing, int]:
        return {
            (topic, n): slot
            for topic, was in before.items()
            for n, slot in enumerate(getattr(was, which))
            if slot >= 0 and n < counts.get(topic, 0)
        }

    game = Game([], subscribers, known("targets"), known("owners"))
    found: dict[str, list[Target]] = {}
    for topic, n in counts.items():
        able = subscribers.get(topic, ())
        willing = [slot for slot in able if slot in opted_in]
        if topic in shared and n >= 1 and len(willing) > n:
            found[topic] = share(strategy, topic, n, able, willing, game, any_target(topic))
        elif able:
            game.topics.append((topic, n))
        else:
            found[topic] = [-1] * n
    dealt = STRATEGIES[strategy](game)
    found |= {topic: [dealt[topic, n] for n in range(count)] for topic, count in game.topics}
    return found


def share(
    strategy: str,
    topic: str,
    n: int,
    able: Sequence[int],
    willing: Sequence[int],
    whole_game: Game,
    had: Mapping[int, int],
) -> list[Target]:
    others = [slot for slot in able if slot not in willing]
    m, u = len(able), len(others)
    w = 0
    if u:
        w = u * n // m
        if 2 * (u * n % m) >= m:  # half up
            w += 1
        w = max(w, 1)
        w = min(w, n - 1)
    k = n - w
    sharers: dict[int, list[int]] = {p: [] for p in range(k)}
    if strategy == "roundrobin":
        for i, slot in enumerate(willing):
            sharers[i % k].append(slot)
    elif strategy == "range":
        queue = list(willing)
        for p in range(k):
            for _ in range(len(willing) // k + (1 if p < len(willing) % k else 0)):
                sharers[p].append(queue.pop(0))
    else:
        with_ = {("", i): had[slot] for i, slot in enumerate(willing) if slot in had and had[slot] < k}
        for (_, i), p in by_sticky(Game([("", len(willing))], {"": list(range(k))}, with_, {})).items():
            sharers[p].append(willing[i])
    targets: list[Target] = []
    for p in range(k):
        slots = sorted(sharers[p])
        parts = len(slots)
        cut = [(i * KEYS // parts, (i + 1) * KEYS // parts - 1, slot) for i, slot in enumerate(slots)]
        targets.append(tuple(cut) if parts > 1 else slots[0])
    if w:
        last = {(topic, p - k): whole_game.targets[topic, p] for p in range(k, n) if (topic, p) in whole_game.targets}
        owned = {(topic, p - k): whole_game.owners[topic, p] for p in range(k, n) if (topic, p) in whole_game.owners}
        whole = STRATEGIES[strategy](Game([(topic, w)], {topic: others}, last, owned))
        targets += [whole[topic, p] for p in range(w)]
    return targets
