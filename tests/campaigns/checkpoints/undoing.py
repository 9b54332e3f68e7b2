"""A bad release is deployed, and its deploy undone, by the recipe of docs/checkpoints.md."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random
from typing import TypeVar

from kafka_marshal import Restore
from kafka_marshal.admin import Admin
from kafka_marshal.errors import AdminError, GroupPausedError, KafkaUnavailableError
from tests.campaigns.chaos.fleet import Fleet
from tests.campaigns.chaos.lines import Pen
from tests.campaigns.checkpoints.ground import Ground
from tests.campaigns.checkpoints.rows import Rows, retrying
from tests.campaigns.frame import Violation

__all__ = ["Undoing"]

#: A step that fails as brokers die is done again for this time (s).
TRIES_S = 180.0

#: The bad release works until it has written this many rows.
SPOILS = 100

#: The group stays paused this long (s) at most.
PAUSE_S = 120.0

T = TypeVar("T")


class Undoing:
    """What an operator does, while workers still die."""

    def __init__(self, ground: Ground, fleet: Fleet, rows: Rows, pen: Pen, rng: Random) -> None:
        self.violations: list[Violation] = []
        #: From where to where in the log a bad release was at work.
        self.spoilt: list[tuple[int, int]] = []
        #: Of steps that were done again.
        self.errors: list[str] = []
        self._ground = ground
        self._fleet = fleet
        self._rows = rows
        self._pen = pen
        self._rng = rng
        self._pool = ThreadPoolExecutor(1)
        self._spoilt_before = 0

    def run(self, turn: Callable[[], None], deploy: Callable[[], None]) -> None:
        """All of it. turn: keeps workers coming. deploy: all members, one by one."""
        group = self._ground.group
        pinned = self._step(turn, lambda admin: admin.checkpoint(group, pin=True, timeout=10.0)).id
        self._spoilt_before = self._rows.spoilt()  # of deploys that were undone without their own undo
        self._release(spoils=True)
        deploy()
        until = time.monotonic() + TRIES_S
        while (found := self._rows.spoilt() - self._spoilt_before) < SPOILS and time.monotonic() < until:
            for _ in range(20):
                turn()
        if not found:
            self.violations.append(Violation("liveness", f"no row of the new release within {TRIES_S:g} s"))
        # Rows of tables that only the bad release knows go with its own undo.
        undo = self._undo if self._rng.random() < 0.5 else None
        done = self._step(turn, lambda admin: admin.rollback(group, pinned, stay_paused=PAUSE_S, undo=undo))
        assert done.generation is not None
        self.spoilt.append((pinned, done.generation))
        self._release(spoils=False)
        deploy()
        self._step(turn, lambda admin: admin.resume(group))

    def close(self) -> None:
        """Nothing is under way."""
        self._pool.shutdown()

    def _release(self, *, spoils: bool) -> None:
        for place in self._fleet.places:
            place.template = replace(place.template, spoils=spoils)  # type: ignore[call-arg]

    def _undo(self, restore: Restore) -> None:
        rows = self._rows
        retrying(lambda: rows.sink.restore(restore, rows.undo_all))
        for piece in restore.pieces:
            spans = [list(each) for each in piece.ranges]
            self._pen.write("undone", piece.partition, piece.position, spans, rows.left[piece.partition])
        if (number := rows.spoilt() - self._spoilt_before) > 0:
            self.violations.append(Violation("undo", f"{number} rows of the bad release's own table are left"))

    def _step(self, turn: Callable[[], None], act: Callable[[Admin], T]) -> T:
        """One command, again if brokers die; workers come and go meanwhile."""
        until = time.monotonic() + TRIES_S

        def once() -> T:
            # The same client: a pause that the try before has left is its own.
            with Admin(self._ground.bootstrap, topic=self._ground.coordination, client_id="undoes") as admin:
                return act(admin)

        while True:
            asked = self._pool.submit(once)
            while not asked.done():
                turn()
            error = asked.exception()
            if error is None:
                return asked.result()
            if not isinstance(error, AdminError | KafkaUnavailableError | GroupPausedError) or time.monotonic() > until:
                raise error
            self.errors.append(f"{time.time():.1f} undoing: {type(error).__name__}: {error}")
