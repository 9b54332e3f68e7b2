"""Members whose program counts its messages, with state that is saved at checkpoints and restored from them."""

from __future__ import annotations

from collections import Counter
from random import Random

from kafka_marshal.engine.effects import Effect, RestoredPiece, RestoreState
from kafka_marshal.engine.groups.client import GroupClient
from kafka_marshal.engine.settings import CheckpointOptions, GroupOptions
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.types import Key
from rationalizer import key_hash
from tests.engine.harness import FakeMessage, Member, Net

#: What was counted of one partition: offset → how often.
Counts = Counter[int]


class Store:
    """States by partition, keys and checkpoint, as any store keeps them."""

    def __init__(self) -> None:
        self.states: dict[tuple[Key, int, int, int], Counts] = {}

    def load(self, piece: RestoredPiece) -> Counts:
        """The state of a piece: for each part what overlaps it, less other keys (X18)."""
        found: Counts = Counter()
        for lo, hi, checkpoint in piece.states:
            parts = [
                (first, last, counts)
                for (key, first, last, number), counts in self.states.items()
                if key == piece.key and number == checkpoint and first <= hi and lo <= last
            ]
            assert parts or not checkpoint, f"the state of {piece} under {checkpoint} is missing"
            for first, last, counts in parts:
                found += of_keys(counts, max(lo, first), min(hi, last))
        return found


def of_keys(counts: Counts, lo: int, hi: int) -> Counts:
    """Those of these key hashes."""
    return Counter({at: times for at, times in counts.items() if lo <= key_hash(None, at) <= hi})


class CountingMember(Member):
    """A member whose program has several messages in flight, and counts each when it is handled."""

    def __init__(self, net: Net, client_id: str, store: Store, chance: Random) -> None:
        super().__init__(net, client_id, rng=Random(chance.random()))
        self.store = store
        self.chance = chance
        self.counts: dict[Key, Counts] = {}
        #: Messages in the program's hand.
        self.in_hand: list[tuple[Run, FakeMessage]] = []
        #: (why, partition) of all restores.
        self.restores: list[tuple[str, Key]] = []
        #: What was handled, with repetitions.
        self.handled_of: Counter[tuple[Key, int]] = Counter()
        net.members.append(self)

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, RestoreState):
            for restored in effect.pieces:
                assert not any(of.assignment.key == restored.key for of, _ in self.in_hand)
                self.counts[restored.key] = found = self.store.load(restored)
                self.restores.append((effect.why, restored.key))
                fits(found, restored, self.net.data[restored.key].end)
        super().carry_out(effect)

    def answer_saves(self, *, are_safe: bool = True) -> None:
        """on_checkpoint returns: what is saved is what was counted until now."""
        for asked in self.held_saves:
            for piece in asked.pieces:
                is_ours = any(consumer.of(piece.key, piece.token) is not None for consumer in self.consumers)
                if is_ours:
                    assert not any(of.assignment.key == piece.key for of, _ in self.in_hand)
                    saved = of_keys(self.counts.get(piece.key, Counter()), piece.lo, piece.hi)
                    self.store.states[piece.key, piece.lo, piece.hi, asked.barrier] = saved
        super().answer_saves(are_safe=are_safe)

    def take_some(self) -> None:
        """The program takes messages."""
        self.fetch(self.chance.randint(1, 6))
        if (run := self.take(self.chance.randint(1, 5))) is not None:
            self.in_hand += [(run, message) for message in run.messages]  # type: ignore[misc]

    def handle_some(self, most: int = 4) -> None:
        """The program handles some of its messages, in any order."""
        for _ in range(self.chance.randint(0, most)):
            if self.in_hand:
                _, message = self.in_hand.pop(self.chance.randrange(len(self.in_hand)))
                self.counts.setdefault(message.of, Counter())[message.at] += 1
                self.handled_of[message.of, message.at] += 1
                self.done(message)

    def close_by(self, leave_by: float) -> None:
        """The program closes its consumer."""
        for consumer in self.consumers:
            self.engine.take(consumer.number, consumer.close, self.clock(), leave_by)
        self.settle()

    @property
    def source(self) -> GroupClient:
        """Its membership."""
        found = self.consumers[0].source
        assert isinstance(found, GroupClient)
        return found


def fits(counts: Counts, piece: RestoredPiece, end: int) -> None:
    """Whether a state has each message of its keys that is done once, and no other."""
    for at in range(end):
        if piece.lo <= key_hash(None, at) <= piece.hi:
            is_done = any(
                lo <= key_hash(None, at) <= hi and at <= through for lo, hi, through in piece.done_through
            ) or any(first <= at <= last for first, last in piece.ranges)
            wanted = int(is_done and at > piece.initial)
            assert counts[at] == wanted, (
                f"{piece.key}@{at} counts {counts[at]} times, and should {wanted} times: {piece}"
            )


def begun(
    net: Net,
    client_id: str,
    store: Store,
    chance: Random,
    *,
    share: bool = False,
    **policy: object,
) -> CountingMember:
    """A member that takes checkpoints."""
    member = CountingMember(net, client_id, store, chance)
    checkpoints = CheckpointOptions(**{"has_callback": True, **policy})  # type: ignore[arg-type]
    member.consumer("t", group=GroupOptions("sticky", 3_000, share, checkpoints))
    return member
