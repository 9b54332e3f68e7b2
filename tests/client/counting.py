"""Workers whose state is how often they have handled each offset, by partition; saved at checkpoints.

As a program, ``python -m tests.client.counting '{"bootstrap": …}'``, it writes JSON lines of what it does.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kafka_marshal import Checkpoint, CheckpointPolicy, Group, GroupConsumer, Marshal, MemberPiece, Message, Restore
from kafka_marshal.checkpoints import Folder
from kafka_marshal.checkpoints.store import SavedPart
from tests.client.program import Program
from tests.modes import options_of


class Store(Protocol):
    """Keeps states."""

    def save(self, checkpoint: int, piece: Any, state: bytes) -> None: ...

    def load_parts(self, piece: Any) -> Iterable[SavedPart]: ...

    def collect(self, checkpoint: Checkpoint) -> object: ...


class Ledger:
    """One member's state, and what its callbacks do with it."""

    def __init__(self, store: Store, say: Callable[..., object] = lambda what, **more: None) -> None:
        self.store = store
        self.say = say
        #: By partition: key, offset → how often it was handled. A piece of some keys has those.
        self.counts: dict[int, Counter[tuple[str, int]]] = {}
        self.lock = threading.Lock()
        #: How often on_checkpoint still raises.
        self.failures = 0

    def save(self, checkpoint: Checkpoint) -> None:
        """on_checkpoint."""
        if self.failures:
            self.failures -= 1
            self.say("failed", id=checkpoint.id)
            raise OSError("no space left on device")
        for piece in checkpoint.pieces:
            with self.lock:
                state = [[*at, times] for at, times in self.counts[piece.partition].items()]
            self.store.save(checkpoint.id, piece, json.dumps(state).encode())
        self.store.collect(checkpoint)
        partitions = [piece.partition for piece in checkpoint.pieces]
        self.say("saved", id=checkpoint.id, partitions=partitions, leaving=checkpoint.leaving)

    def restore(self, restore: Restore) -> None:
        """on_restore."""
        for piece in restore.pieces:
            found: Counter[tuple[str, int]] = Counter()
            for part in self.store.load_parts(piece):
                of_part = [row for row in json.loads(part.state) if part.holds(row[0] or None, row[1])]
                found.update({(key, offset): times for key, offset, times in of_part})
            with self.lock:
                self.counts[piece.partition] = found
            self.say("restored", why=restore.why, partition=piece.partition, position=piece.position)

    def drop(self, _: GroupConsumer, pieces: list[MemberPiece]) -> None:
        """on_revoke and on_lost: another member has this state, or goes back to what was saved of it."""
        for piece in pieces:
            with self.lock:
                self.counts.pop(piece.partition, None)
            self.say("dropped", partition=piece.partition)

    def handle(self, message: Message) -> None:
        """Count a message."""
        at = ((message.key() or b"").decode(), message.offset() or 0)
        with self.lock:
            self.counts[message.partition() or 0][at] += 1
        self.say("handled", partition=message.partition(), offset=message.offset())

    def consumer(self, marshal: Marshal, topic: str, policy: CheckpointPolicy, **options: Any) -> GroupConsumer:
        """A consumer with these callbacks. ranges: of ranges."""
        callbacks: dict[str, Any] = {"on_checkpoint": self.save, "on_restore": self.restore}
        callbacks |= {"on_revoke": self.drop, "on_lost": self.drop}
        make: Any = marshal.ranges if options.pop("ranges", False) else marshal.consumer
        made: GroupConsumer = make([topic], **options_of({"checkpoints": policy, **callbacks, **options}, Group))
        return made


class Memory:
    """A store in memory, for members of one process."""

    def __init__(self) -> None:
        self.states: dict[tuple[int, int, int, int], bytes] = {}

    def save(self, checkpoint: int, piece: Any, state: bytes) -> None:
        """Keep it; an id is used for one cut of a piece only."""
        name = (piece.partition, piece.lo, piece.hi, checkpoint)
        assert name not in self.states, f"saved twice: {name}"
        self.states[name] = state

    def load_parts(self, piece: Any) -> Iterable[SavedPart]:
        """What was saved of the partition under each id, and overlaps."""
        for low, high, number in piece.states:
            found = [
                SavedPart(max(lo, low), min(hi, high), state)
                for (partition, lo, hi, at), state in list(self.states.items())
                if (partition, at) == (piece.partition, number) and lo <= high and low <= hi
            ]
            assert found or number is None, f"{piece}: nothing is saved under {number}"
            yield from found

    def collect(self, checkpoint: Checkpoint) -> object:
        """Keep all."""


def counted(ledgers: Iterable[Ledger]) -> Counter[tuple[int, int]]:
    """(partition, offset) → how often it counts in these states together."""
    found: Counter[tuple[int, int]] = Counter()
    for ledger in ledgers:
        with ledger.lock:
            for partition, counts in ledger.counts.items():
                for (_, offset), times in counts.items():
                    found[partition, offset] += times
    return found


def main(program: Program) -> None:
    """Work until SIGTERM. SIGUSR1: roll back; SIGUSR2: the next on_checkpoint raises."""
    arguments, say = program.arguments, program.say
    ledger = Ledger(Folder(arguments["states"]), say)
    policy = CheckpointPolicy(**arguments["policy"])
    with program.marshal(watchdog=arguments.get("watchdog", False)) as marshal:
        wanted: list[str] = []
        signal.signal(signal.SIGUSR1, lambda *_: wanted.append("rollback"))
        signal.signal(signal.SIGUSR2, lambda *_: setattr(ledger, "failures", 1))
        options = {"session_timeout": arguments["session"] / 1000, **arguments.get("options", {})}
        with ledger.consumer(marshal, arguments["topic"], policy, **options) as consumer:
            for message in consumer:
                if message.value() == b"hang":
                    say("hangs")
                    time.sleep(3600)
                ledger.handle(message)
                time.sleep(arguments.get("pause_s", 0.0))
                if wanted:
                    wanted.clear()
                    say("rolls back", to=consumer.checkpoints.newest)
                    consumer.rollback()
    say("closed")


if __name__ == "__main__":
    main(Program())
