"""A member that counts its messages by partition, with checkpoints of its counts or without: in this process."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kafka_marshal import Checkpoint, CheckpointPolicy, Group, Marshal, Message, Restore
from kafka_marshal.checkpoints import Folder

__all__ = ["LOOPS", "Member", "Place", "stood_still", "usual_gaps"]

#: The time in which a group that has just started must be at work (s).
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group works."""

    bootstrap: str
    log: str
    topic: str
    partitions: int
    group: str


class Member(AbstractContextManager["Member"]):
    """Counts; and what it was asked to save, and when."""

    def __init__(self, place: Place, every: float | None = None, states: Path | None = None, name: str = "a") -> None:
        """Join. every: None: without checkpoints. states: None: there is nothing to save."""
        self.counts: dict[int, int] = defaultdict(int)
        #: When on_checkpoint was called for a partition.
        self.saved: list[tuple[float, int]] = []
        #: When checkpoints were complete.
        self.completed: list[float] = []
        #: By partition: when its handlers began and ended.
        self.handled: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._states = None if states is None else Folder(states)
        self._thread: threading.Thread | None = None
        self.marshal = Marshal(place.bootstrap, group_id=place.group, client_id=name, topic=place.log)
        options: dict[str, Any] = {}
        if every is not None:
            options["checkpoints"] = CheckpointPolicy(
                every=every,
                on_checkpoint=self._save,
                on_restore=self._restore,
                on_completed=lambda _: self.completed.append(time.monotonic()),
            )
        self.consumer = self.marshal.consumer([place.topic], mode=Group(), **options)

    def _save(self, checkpoint: Checkpoint) -> None:
        now = time.monotonic()
        for piece in checkpoint.pieces:
            self.saved.append((now, piece.partition))
            if self._states is not None:
                self._states.save(checkpoint.id, piece, b"%d" % self.counts[piece.partition])
        if self._states is not None:
            self._states.collect(checkpoint)

    def _restore(self, restore: Restore) -> None:
        for piece in restore.pieces:
            self.counts[piece.partition] = int((self._states and self._states.load(piece, missing=b"0")) or 0)

    def begin(self, loop: Callable[[Member], object]) -> None:
        """Work, on a thread."""
        self._thread = threading.Thread(target=loop, args=(self,), daemon=True)
        self._thread.start()

    def is_at_work(self, on: Iterable[int]) -> bool:
        """Whether it has counted something of each of these partitions."""
        return all(self.counts.get(partition) for partition in on)

    def close(self) -> None:
        """Leave, when its loop has ended."""
        self.marshal.stop()
        if self._thread is not None:
            self._thread.join()
        self.marshal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def by_iteration(member: Member) -> None:
    counts = member.counts
    for message in member.consumer:
        counts[message.partition() or 0] += 1


def by_run(member: Member) -> None:
    counts = member.counts

    def handle(message: Message) -> None:
        counts[message.partition() or 0] += 1

    member.consumer.run(handle, order="partition", concurrency=4)


LOOPS: Mapping[str, Callable[[Member], None]] = {"a plain loop": by_iteration, "run": by_run}


# Standstill.


def handling(work_s: float) -> Callable[[Member, Message], None]:
    """A handler that takes this long, and notes when."""

    def handle(member: Member, message: Message) -> None:
        began, partition = time.monotonic(), message.partition() or 0
        time.sleep(work_s)
        member.counts[partition] += 1
        member.handled[partition].append((began, time.monotonic()))

    return handle


def slowly(work_s: float, *, run: bool) -> Callable[[Member], None]:
    """Handlers that take this long: of `run`, or of a plain loop."""
    handle = handling(work_s)

    def loop(member: Member) -> None:
        if run:
            member.consumer.run(lambda message: handle(member, message), order="partition", concurrency=4)
        else:
            for message in member.consumer:
                handle(member, message)

    return loop


def stood_still(member: Member, since: float) -> list[float]:
    """Milliseconds from the end of the last handler before each cut to the begin of the first one after it."""
    found = []
    for at, partition in list(member.saved):
        handled = member.handled[partition]
        before = bisect_right(handled, at, key=lambda each: each[1]) - 1
        after = bisect_left(handled, at, key=lambda each: each[0])
        if at >= since and before >= 0 and after < len(handled):
            found.append(1000 * (handled[after][0] - handled[before][1]))
    return found


def usual_gaps(member: Member, since: float) -> list[float]:
    """Milliseconds between two handlers of a partition; the median of all is that without a checkpoint."""
    return [
        1000 * (late[0] - early[1])
        for handled in member.handled.values()
        for early, late in pairwise(handled)
        if early[0] >= since
    ]
