"""Outputs of transactions, as a reader of committed records sees them: of each input once, and in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from zlib import crc32

from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.types import Key

#: The topic that workers produce to; each record names its input.
OUTPUTS = "outputs"
OUTPUT_PARTITIONS = 3


def output_partition(key: Key) -> int:
    """Where the outputs of an input partition go: its order can be seen there."""
    return crc32(f"{key[0]}/{key[1]}".encode()) % OUTPUT_PARTITIONS


class Outputs:
    """The checks of one story. Without transactions nothing is ever written."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        self.broker: MemoryBroker | None = None
        self._read: dict[int, int] = {}
        #: Input partition → the offset of its last output.
        self._last: dict[Key, int] = {}
        #: Input partition → positions that an admin has set: each lets the order begin there once.
        self._moved: dict[Key, list[int]] = {}
        #: The last of these, and the inputs of all outputs since.
        self._from: dict[Key, int] = {}
        self._since: dict[Key, set[int]] = {}
        #: Number of outputs.
        self.count: int = 0

    def repositioned(self, key: Key, position: int) -> None:
        """An admin has set where the group continues."""
        self._moved.setdefault(key, []).append(position)
        self._from[key] = position
        self._since[key] = set()

    def committed(self, key: Key) -> None:
        """Transactions of this partition have ended: check what can be read now."""
        log = self.broker.log(*key) if self.broker is not None and key[0] == OUTPUTS else None
        if log is None:
            return
        end = log.stable_end
        for message in log.messages[log.index(self._read.get(key[1], 0)) : log.index(end)]:
            topic, partition, offset = (message.value() or b"").decode().split("/")
            self._check((topic, int(partition)), int(offset))
        self._read[key[1]] = end

    def _check(self, key: Key, offset: int) -> None:
        self.count += 1
        last, moved = self._last.get(key), self._moved.get(key, [])
        if offset != self._first_at(key, 0 if last is None else last + 1):
            begins = next((at for at in reversed(moved) if self._first_at(key, at) == offset), None)
            if begins is None:
                follows = "is the first" if last is None else f"follows that of {last}"
                self._fail("outputs", f"the output of {key[0]} [{key[1]}] offset {offset} {follows}")
                return
            moved.remove(begins)
        self._last[key] = offset
        self._since.setdefault(key, set()).add(offset)

    def _first_at(self, key: Key, position: int) -> int | None:
        """The offset of the first message at or after a position."""
        log = self.broker.log(*key) if self.broker is not None else None
        if log is None or (index := log.index(position)) >= len(log.offsets):
            return None
        return log.offsets[index]

    def check_complete(self, keys: Iterable[Key]) -> None:
        """At the end: every message since the last position that was set has its output."""
        for key in keys:
            log = self.broker.log(*key) if self.broker is not None else None
            due = [] if log is None else log.offsets[log.index(self._from.get(key, 0)) :]
            missing = [offset for offset in due if offset not in self._since.get(key, ())]
            if missing:
                self._fail("outputs", f"{key[0]} [{key[1]}] offset {missing[0]} is done, and has no output")
