"""Counts messages by carrier, in memory. Start it several times, kill some, deploy, go back: the counts stay exact.

    python examples/counting_worker.py localhost:9092 flights /mnt/shared/delays worker-1

The folder is shared by all workers. docs/checkpoints.md says what holds.
"""

from __future__ import annotations

import json
import signal
import sys

from kafka_marshal import Checkpoint, CheckpointPolicy, Group, Marshal, Message, Restore
from kafka_marshal.checkpoints import Folder


class Counts:
    """Counts by partition: what is not kept by partition can't move with it."""

    def __init__(self, folder: str) -> None:
        self.states = Folder(folder)
        self.by_partition: dict[int, dict[str, int]] = {}

    def save(self, checkpoint: Checkpoint) -> None:
        """Nothing of these pieces is in flight. If this raises, they are left for the next checkpoint."""
        for piece in checkpoint.pieces:
            state = json.dumps(self.by_partition[piece.partition], sort_keys=True)
            self.states.save(checkpoint.id, piece, state.encode())
        self.states.collect(checkpoint)  # deletes what no checkpoint needs

    def restore(self, restore: Restore) -> None:
        """What these pieces had in memory is void. None: nothing was done yet."""
        for piece in restore.pieces:
            self.by_partition[piece.partition] = json.loads(self.states.load(piece) or b"{}")
            counts = self.by_partition[piece.partition]
            print(f"{restore.why}: partition {piece.partition} continues at {piece.position} with {counts}", flush=True)

    def count(self, message: Message) -> None:
        """The last line changes the state: a try that raises leaves it as it was."""
        counts = self.by_partition[message.partition()]
        carrier = (message.value() or b"").decode()[:2]
        counts[carrier] = counts.get(carrier, 0) + 1


def main(servers: str, topic: str, folder: str, name: str) -> None:
    """Work until SIGTERM; a second worker takes over with the state, and repeats nothing."""
    counts = Counts(folder)
    policy = CheckpointPolicy(every=30, keep=16, on_checkpoint=counts.save, on_restore=counts.restore)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # while it starts it holds nothing
    with Marshal(servers, group_id="delays", client_id=name) as marshal:
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        with marshal.consumer([topic], mode=Group(), checkpoints=policy) as consumer:
            for message in consumer:
                counts.count(message)


if __name__ == "__main__":
    main(*sys.argv[1:5])
