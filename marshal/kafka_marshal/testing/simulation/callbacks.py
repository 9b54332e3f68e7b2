"""What ``on_restore`` and ``on_completed`` get, compared with the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kafka_marshal.checkpoints import Restore, RestorePiece
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.types import Key
from rationalizer.groups.checkpoints import Version

#: Why a piece comes that no member owned.
UNOWNED = frozenset({"joined", "rollback", "positions"})


class Callbacks:
    """Follows the log, and compares what callbacks of its members get."""

    def __init__(self, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        #: Checkpoint → what it sees.
        self._views: dict[int, Mapping[Key, Version]] = {}
        #: Checkpoint → processes whose answers count.
        self._parts: dict[int, set[str]] = {}
        #: (process, checkpoint): on_completed was called.
        self._completed: set[tuple[str, int]] = set()
        #: (process, partition) → keys that it has restored, under which token.
        self._restored: dict[tuple[str, Key], list[tuple[int, int, int]]] = {}
        #: (partition, token) → keys that came under it, and why.
        self._came: dict[tuple[Key, int], list[tuple[int, int, frozenset[str]]]] = {}

    # The log.

    def sees(self, checkpoint: int, view: Mapping[Key, Version]) -> None:
        """This one is the newest from now on."""
        self._views[checkpoint] = view

    def took_part(self, checkpoint: int, processes: Iterable[str]) -> None:
        """Its barrier is closed; these have answered."""
        self._parts[checkpoint] = set(processes)

    def came(self, key: Key, lo: int, hi: int, since: int, why: frozenset[str]) -> None:
        """Keys of a partition got an owner in this generation."""
        self._came.setdefault((key, since), []).append((lo, hi, why))

    # Callbacks.

    def completed(self, process: Living, checkpoint: int) -> None:
        """on_completed is called."""
        if process.name not in self._parts.get(checkpoint, ()):
            self._fail("callback", f"{process.name} hears that {checkpoint} is complete, in which it took no part")
        if (process.name, checkpoint) in self._completed:
            self._fail("callback", f"{process.name} hears twice that {checkpoint} is complete")
        self._completed.add((process.name, checkpoint))

    def restores(self, process: Living, restore: Restore, hashes: Mapping[Key, Sequence[int]]) -> None:
        """on_restore is called. hashes: the key hash of each message."""
        view = self._views.get(restore.checkpoint)
        if view is None:
            self._fail(
                "callback", f"{process.name} is to restore {restore.checkpoint}, which never was the newest (X17)"
            )
            return
        for piece in restore.pieces:
            where = f"{process.name} is to restore {piece.topic} [{piece.partition}] from {restore.checkpoint}"
            why = self._why(process, piece)
            if restore.why not in why:
                self._fail("callback", f"{where}, {restore.why}; by the log it is {' or '.join(sorted(why))} (X17)")
            if (version := view.get(piece.key)) is not None:
                self._check_version(where, piece, version, hashes.get(piece.key, ()))
        for key, version in view.items():
            if restore.positions.get(key) != version.progress.stable + 1:
                self._fail(
                    "callback", f"{process.name} gets a position of {key} that {restore.checkpoint} does not have"
                )

    def restored(self, process: Living, restore: Restore) -> None:
        """on_restore is about to return."""
        for piece in restore.pieces:
            self._restored.setdefault((process.name, piece.key), []).append((piece.lo, piece.hi, piece.epoch))

    def _why(self, process: Living, piece: RestorePiece) -> frozenset[str]:
        restored = self._restored.get((process.name, piece.key), ())
        if any(epoch >= piece.epoch and lo <= piece.hi and piece.lo <= hi for lo, hi, epoch in restored):
            return frozenset({"handed_over"})  # by itself: it is begun again with other keys
        came = self._came.get((piece.key, piece.epoch), ())
        return frozenset[str]().union(*(why for lo, hi, why in came if lo <= piece.hi and piece.lo <= hi))

    def _check_version(self, where: str, piece: RestorePiece, version: Version, hashes: Sequence[int]) -> None:
        lo, hi = piece.lo, piece.hi
        states = [(max(lo, x), min(hi, y), state or None) for x, y, state in version.states if x <= hi and lo <= y]
        if list(piece.states) != states:
            self._fail("callback", f"{where}, with the states {piece.states}; by the log they are {states} (X17)")
        for offset, hashed in enumerate(hashes):
            if not lo <= hashed <= hi:
                continue
            is_done = (
                offset < piece.position
                or any(first <= offset <= last for first, last in piece.ranges)
                or any(x <= hashed <= y and offset <= through for x, y, through in piece.done_through)
            )
            if is_done != version.progress.is_done(offset, hashed):
                self._fail("callback", f"{where} at {piece.position}, which is wrong about offset {offset} (X17)")
                return
