"""Hostile records about coordinated groups (section 5): near the log's state, and wild ones."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

from msgpack import packb

from rationalizer import Outcome
from rationalizer.limits import MAX_COMMIT_ENTRIES, MAX_KEY_HASH, MAX_TOPICS
from rationalizer.routing import key_range, route_group
from tests.rationalizer.samples import OTHERS, fields_of

#: Begin a checkpoint, answer its barrier, go back, keep.
CHECKPOINT_TYPES: Final = (23,) * 10 + (24,) * 22 + (25,) * 2 + (27,) * 4

_OTHERS: Final = frozenset(kind.type for kind in OTHERS)

#: Types by frequency.
GROUP_TYPES: Final = (
    *((16,) * 14 + (17,) * 8 + (18,) * 3 + (19,) * 26 + (20,) * 4 + (21,) * 4),
    *CHECKPOINT_TYPES,
    *sorted(_OTHERS) * 4,
)

LARGEST: Final = 2**63 - 1
CLIENTS: Final = tuple("abcdefg")
#: Clients that pause, and may then set positions.
ADMINS: Final = ("a", "b", "admin")
INSTANCES: Final = ("1", "1", "2")
TOPICS: Final = ("t", "u", "тема")
STRATEGIES: Final = ("sticky",) * 6 + ("range", "roundrobin", "dice", "Sticky")
PATTERNS: Final = ("",) * 8 + ("^t", "[tu]", "(", "é" * 500)
SESSIONS: Final = (1_000, 2_000, 2_000, 60_000, 60_000, 60_000, 100, 99, 1_800_000, 1_800_001, 2**31 - 1)
SETTINGS: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    ("accept_individual_commit", (True, True, False)),
    ("accept_range_fetch", (["t"], ["t", "u"], ["u", "t", "u"], [], ["t"] * 99, ["тема"])),
    ("max_session_timeout_ms", (60_000, 2_000, 100, 2**31 - 1, 99)),
    ("max_individual_commits", (60_000, 3, 1, 60_001)),
    ("max_members", (1,)),
)
ODD_METADATA: Final = (None,) * 6 + ("", "checkpoint-7", "\x00", "é" * 127)

#: (instance, client, group, own fields): what a record of one of these types is made of.
Parts = tuple[str, str, str, list[Any]]


class GroupHand:
    """A hostile writer's view of a CP's coordinated groups, and its records about them."""

    def __init__(self, random: Random, cp: int, partitions: int, claimed: Sequence[str]) -> None:
        """claimed: names that claims are fought for under, which now and then are written about as groups."""
        names = [f"c{number}" for number in range(64)]
        home = [name for name in names if route_group(name, partitions) == cp][:2]
        away = [name for name in names if route_group(name, partitions) != cp][:1]
        #: Those of this CP.
        self.names = (*home,)
        self._groups = (*home * 10, *away, *claimed)
        self._random = random
        #: group: client: (instance, member_id), as the log said last.
        self._members: dict[str, dict[str, tuple[str, str]]] = {}
        self._generations: dict[str, int] = {}
        #: Progress of a partition.
        self._far: dict[tuple[str, str, int], int] = {}
        self._next_offset = 0
        self._seen_ids: dict[str, list[str]] = {}
        #: Of groups that take checkpoints: the newest, and the open barrier or None; ids that were ever the newest.
        self._newest: dict[str, int] = {}
        self._barrier: dict[str, int | None] = {}
        self._checkpoints: dict[str, list[int]] = {}
        #: These are to take checkpoints from the beginning.
        self._planned = set(home[: random.choice((0, 1, 1, 2))])

    def hear(self, offset: int, outcome: Outcome) -> None:
        """The outcome of a record."""
        self._next_offset = offset + 1
        message = outcome.message
        if message is None:
            return
        number, instance, client, group = message.type, message.instance_id, message.client_id, message.group_id
        if number == 8 and outcome.accepted:
            self._members.pop(group, None)
            self._newest.pop(group, None)
            self._generations.pop(group, None)
        if number in CHECKPOINT_TYPES and outcome.of_group:
            self._hear_checkpoint(group, outcome)
        if not outcome.of_group or outcome.generation is None:
            return
        self._generations[group] = outcome.generation
        members = self._members.setdefault(group, {})
        if outcome.member is not None:
            members[client] = (instance, outcome.member)
            self._seen_ids.setdefault(group, []).append(outcome.member)
        elif outcome.accepted and number == 18:
            members.pop(client, None)
        elif outcome.code == "UNKNOWN_CONSUMER" and message.member_id == members.get(client, ("", ""))[1]:
            members.pop(client, None)  # dead, as it turns out

    def _hear_checkpoint(self, group: str, outcome: Outcome) -> None:
        newest: int | None = outcome.checkpoint
        self._barrier[group] = outcome.barrier
        if newest is None:
            self._newest.pop(group, None)
        elif self._newest.get(group) != newest:
            self._newest[group] = newest
            self._checkpoints.setdefault(group, []).append(newest)

    def _begins(self, number: int, group: str) -> int:
        """The type to write instead, so that a group takes checkpoints before it has members."""
        if group not in self._planned or group in self._newest or number not in (16, 19):
            return number
        return 21 if group not in self._generations else 23

    def write(self, number: int) -> tuple[int, Parts]:
        """A record of this type, or of one that has to come before; and its type."""
        group = self._random.choice(self._groups)
        number = self._begins(number, group)
        return number, self._write(number, group)

    def _write(self, number: int, group: str) -> Parts:
        chance = self._random
        instance, client, member_id = self._who(group)
        if number in CHECKPOINT_TYPES:
            return instance, client, group, self._checkpoint(number, group, member_id)
        if number in _OTHERS:
            return instance, client, group, fields_of(number, chance.choice)
        if number == 16:
            return self._join(group, instance, client, member_id)
        if number == 21:
            return instance, client, group, [self._settings()]
        own: list[Any] = [member_id]
        if number == 20:
            return instance, client, group, [member_id, self._topics()]
        own.append(self._generation(group))
        if number == 19:
            if chance.random() < 0.12:
                own[0], client = "", chance.choice(ADMINS)
            entries = [self._entry(group) for _ in range(chance.choice((1, 1, 1, 2, 3, 6, 30)))]
            own += [chance.random() < 0.2, entries]
        return instance, client, group, own

    def _checkpoint(self, number: int, group: str, member_id: str) -> list[Any]:
        """Own fields of types 23, 24, 25 and 27."""
        chance = self._random
        newest = self._newest.get(group, 0)
        known = [*self._checkpoints.get(group, [])[-6:], newest]
        odd = chance.choice((*known, 0, newest + 1, self._next_offset, LARGEST))
        if number == 23:
            after = newest if chance.random() < 0.9 else odd
            timeout_ms = chance.choice((100, 100, 500, 5_000, 3_600_000))
            return [after, timeout_ms, chance.choice((0, 0, 1, 2, 3, 64)), chance.random() < 0.3]
        if number == 25:
            checkpoint = chance.choice((0, *known)) if chance.random() < 0.9 else odd
            return [self._generation(group), checkpoint]
        if number == 27:
            return [chance.choice(known) if chance.random() < 0.9 else odd, chance.choice((0, 0, 1, 1, 1, 2))]
        answer = chance.choice((1,) * 8 + (2, 0))
        entries = [] if answer == 0 else [self._cut(group) for _ in range(chance.choice((0, 1, 1, 2, 3, 30)))]
        barrier = self._barrier.get(group) or 0
        return [member_id, self._generation(group), barrier if chance.random() < 0.9 else odd, answer, entries]

    def _cut(self, group: str) -> list[Any]:
        """An entry that an answer may have, mostly."""
        entry = self._entry(group)
        if self._random.random() < 0.95:
            entry[4] = 0
            entry[1] = entry[1] % 3
            if self._random.random() < 0.6:
                entry[2:4] = [0, MAX_KEY_HASH]
        return entry

    def large(self, size: int) -> bytes:
        """A record that is valid, and long: a commit of a member, or a join that is rejected."""
        chance = self._random
        group = chance.choice(self._groups)
        instance, client, member_id = self._who(group)
        if chance.random() < 0.6:
            entries = [self._entry(group) for _ in range(max(1, min(MAX_COMMIT_ENTRIES, size // 30)))]
            own: list[Any] = [member_id, self._generation(group), False, entries]
            return self._packed(19, instance, client, group, own)
        topics = [[f"topic-{number}", chance.randrange(3)] for number in range(min(MAX_TOPICS, size // 13))]
        own = ["", self._next_offset, 60_000, "dice", True, "", topics]
        return self._packed(16, instance, client, group, own)

    def _packed(self, number: int, instance: str, client: str, group: str, own: list[Any]) -> bytes:
        value: bytes = packb((2, number, instance, client, group, *own))
        return value

    def _who(self, group: str) -> tuple[str, str, str]:
        """(instance, client, member_id): a member's mostly, else another's, or of ids that do not go together."""
        chance, members = self._random, self._members.get(group)
        if members and chance.random() < 0.9:
            client = chance.choice(sorted(members))
            instance, member_id = members[client]
            if chance.random() < 0.97:
                return instance, client, member_id
        else:
            instance, client, member_id = chance.choice(INSTANCES), chance.choice(CLIENTS), f"{group}-nobody"
        known = self._seen_ids.get(group)
        if known and chance.random() < 0.7:
            member_id = chance.choice(known)
        return instance, chance.choice((client, *CLIENTS)), member_id

    def _generation(self, group: str) -> int:
        """The newest mostly; an older one, one above, or a wild one."""
        newest, chance = self._generations.get(group, 0), self._random.random()
        if chance < 0.8:
            return newest
        if chance < 0.95:
            return max(0, newest - 1 - self._random.randrange(30))
        return self._random.choice((newest + 1, 0, LARGEST, self._next_offset))

    def _join(self, group: str, instance: str, client: str, member_id: str) -> Parts:
        """A first join, the same again, a restart."""
        chance = self._random
        if chance.random() < 0.5:
            instance, client, member_id = chance.choice(INSTANCES), chance.choice(CLIENTS), ""
        elif chance.random() < 0.5:
            member_id = ""
        own = [
            *(member_id, chance.choice((self._next_offset, self._next_offset, 0, LARGEST))),
            *(chance.choice(SESSIONS), chance.choice(STRATEGIES), chance.random() < 0.8),
            *(chance.choice(PATTERNS), self._topics()),
        ]
        return instance, client, group, own

    def _topics(self) -> list[Any]:
        """Few partitions mostly, so that they are shared; seldom more than a CP can take, or none."""
        chance = self._random
        topics: list[Any] = [
            [topic, chance.choice((1, 1, 2, 3, 0))] for topic in TOPICS if chance.random() < 0.6 or topic == "t"
        ]
        match chance.randrange(40):
            case 0:
                return [["huge", 100_000], *topics]  # never accepted: an accepted one would make all records slow
            case 1:
                return []
            case 2:
                return topics * 2
            case 3:
                return [["t", 100_001], *topics]
            case _:
                return topics

    def _settings(self) -> dict[str, Any]:
        chance = self._random
        chosen = chance.sample(SETTINGS, chance.choice((0, 1, 1, 1, 2)))
        return {name: chance.choice(values) for name, values in chosen}

    def _entry(self, group: str) -> list[Any]:
        """Of a partition, a part of its keys as sharers have them, or some keys."""
        chance = self._random
        topic, partition = chance.choice(TOPICS), chance.choice((0, 0, 0, 1, 2, 5, 2**31 - 1))
        lo, hi = 0, MAX_KEY_HASH
        if chance.random() < 0.5:
            parts = chance.randrange(2, 8)
            lo, hi = key_range(chance.randrange(parts), parts)
            if chance.random() < 0.2:
                lo, hi = sorted((lo + chance.choice((0, 1, 2**40)), min(MAX_KEY_HASH, hi + chance.choice((-1, 1)))))
        action = chance.choice((0, 0, 0, 0, 1, 1, 1, 2))
        far = self._far.get((group, topic, partition), 0)
        at = max(-1, far + chance.randrange(-3, 9)) if chance.random() < 0.98 else chance.choice((-1, LARGEST))
        self._far[group, topic, partition] = min(at, 2**40)
        through: int | None = at
        ranges: list[tuple[int, int]] = []
        if action == 2:
            lo, hi = 0, MAX_KEY_HASH
        elif chance.random() < 0.4:
            through = None
            for _ in range(chance.choice((0, 1, 1, 2, 5))):
                first = min(LARGEST - 4, max(0, at + chance.randrange(12)))
                ranges.append((first, first + chance.randrange(4)))
        return [topic, partition, lo, hi, action, through, ranges, chance.choice(ODD_METADATA)]
