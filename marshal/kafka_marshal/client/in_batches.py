"""``run(handle, batch=…)``: up to this many lanes are begun together, for one call of the handler.

Each message is settled by itself, as without batches. A batch that fails as a whole is tried again message by message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kafka_marshal.client.attempt import Attempt, current, in_batch
from kafka_marshal.client.handling import Fate, RetryAfter, deserialized, fate_of
from kafka_marshal.client.tries import Tries
from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.errors import ConfigurationError, LeaseLostError
from rationalizer.travel import Travels


class MessagesFailedError(Travels, Exception):
    """Raised by a handler of ``run(…, batch=…)``: these messages have failed, and all others of its list are done.

    failed: place in the list → its error; or pairs of a message of the list, or its (topic, partition, offset), and its
    error. A message of the same key that comes later in the list is done, too, unless it is named.
    """

    def __init__(self, failed: Mapping[int, Exception] | Iterable[tuple[Any, Exception]]) -> None:
        #: As given; pairs as a tuple of them.
        self.failed: Mapping[int, Exception] | tuple[tuple[Any, Exception], ...]
        self.failed = dict(failed) if isinstance(failed, Mapping) else tuple(failed)
        super().__init__(f"{len(self.failed)} message(s) of a batch have failed")


class One(NamedTuple):
    """One message of a batch: its lane, the lane's turn, and its attempt."""

    lane: Lane
    turn: int
    attempt: Attempt


class Gathered:
    """The messages of one call of the handler. What raises here ends the run: then ``broken`` is to be called.

    The last one of a key is settled first. So no message that waits is ahead of one that is not settled: it could be
    taken back (``recall``) and come again behind it.
    """

    def __init__(self, tries: Tries) -> None:
        self._tries = tries
        self._began = 0.0
        #: Those that have begun and are not settled.
        self.ones: list[One] = []

    @property
    def is_full(self) -> bool:
        """Whether it takes no more: it has as many as wanted, or one that is to be tried by itself."""
        ones = self.ones
        return len(ones) >= (self._tries.options.batch or 1) or (bool(ones) and ones[0].lane.is_single)

    @property
    def is_due(self) -> bool:
        """Whether it waits for no more: the run ends, or a partition is to be released when its messages are done."""
        return self._tries.call.is_ending or any(one.lane.assignment.stage is not Stage.ACTIVE for one in self.ones)

    def add(self, lane: Lane) -> bool:
        """Begin a ready lane, and what follows of its key. False: it is for another batch, and not begun."""
        tries = self._tries
        if self.ones and lane.is_single:
            return False
        turn, now = lane.turn + 1, tries.runtime.now_ms()
        try:
            attempt = tries.begin(lane, now)
            while attempt is not None:
                self.ones.append(One(lane, turn, attempt))
                behind = None if self.is_full else tries.lanes.along(lane, now, tries.call)
                if behind is None or behind.message is None:
                    break
                lane, turn = behind, behind.turn
                attempt = tries.attempt(lane, behind.message)
        except BaseException as error:
            tries.broken(lane, turn, error)
            raise
        return True

    def prepare(self) -> list[Any]:
        """The list for the handler, of one partition after the other, in order.

        What can't be deserialized has failed. What follows it of its key, and what may have another owner by now, comes
        again.
        """
        deserialize, self._began = self._tries.options.deserialize, self._tries.runtime.now_ms()
        self.ones.sort(key=lambda x: (*x.lane.assignment.key, x.attempt.message.offset() or 0))
        values: list[Any] = []
        ones: list[One] = []
        failed: dict[Lane, tuple[One, BaseException]] = {}
        not_now: dict[Lane, tuple[One, BaseException]] = {}
        for one in self.ones:
            ahead, attempt = one.lane.ahead, one.attempt
            if ahead is not None and (before := failed.get(ahead) or not_now.get(ahead)) is not None:
                not_now[one.lane] = one, before[1]
                continue
            try:
                attempt.require()
            except LeaseLostError as error:
                not_now[one.lane] = one, error
                continue
            current.set(attempt)
            try:
                values.append(attempt.message if deserialize is None else deserialized(deserialize, attempt.message))
                ones.append(one)
            except BaseException as error:  # noqa: BLE001 - it is reported, and may end the run
                failed[one.lane] = one, error
        current.set(None)
        for one, why in reversed(not_now.values()):
            self._again(one, why, is_single=False)
        for one, why in reversed(failed.values()):
            self._settle(one, why)
        self.ones = ones
        for one in ones:
            one.attempt._at_once = len(ones)
        in_batch.set({id(one.attempt.message): one.attempt for one in ones})
        return values

    def end(self, error: BaseException | None) -> None:
        """The handler has returned, or raised: settle each message."""
        in_batch.set(None)
        named: dict[int, Exception] = {}
        if isinstance(error, MessagesFailedError):
            try:
                named, error = self._named(error), None
            except ConfigurationError as wrong:
                error = wrong
        whole = error if len(self.ones) > 1 and not isinstance(error, RetryAfter) else None
        ends = whole is not None and fate_of(whole) is Fate.ENDS
        if whole is not None and ends:
            self._tries.end(whole)  # first, so that none of the others begins again
        elif isinstance(whole, Exception):
            first = self.ones[0].attempt
            self._tries.consumer._handled.failed(first.message.topic(), whole)
            self._tries.failures.failed(first, whole)
        while self.ones:
            one = self.ones.pop()
            if whole is None or (ends and not self.ones):
                self._settle(one, named.get(len(self.ones), error))
            else:
                self._again(one, whole, is_single=True)

    def give_back(self, error: BaseException) -> None:
        """The run ends, and has cancelled the handler: this try does not count."""
        in_batch.set(None)
        while self.ones:
            self._again(self.ones.pop(), error, is_single=False)

    def broken(self, error: BaseException) -> None:
        """This error was raised beside the handler: the run ends with it, and no handler has these messages."""
        in_batch.set(None)
        while self.ones:
            one = self.ones.pop()
            self._tries.broken(one.lane, one.turn, error)

    def _settle(self, one: One, error: BaseException | None) -> None:
        tries, lane = self._tries, one.lane
        try:
            if error is not None:
                tries.failed(lane, one.attempt, self._began, error)
            elif tries.done(lane, one.attempt, self._began):
                tries.workers.put((lane,))
        except BaseException as wrong:  # noqa: BLE001 - what follows a handler ends the run
            tries.broken(lane, one.turn, wrong)

    def _again(self, one: One, error: BaseException, *, is_single: bool) -> None:
        """This try does not count. is_single: the next one is by itself."""
        tries, attempt, lane = self._tries, one.attempt, one.lane
        try:
            attempt._take_outputs()
            attempt._restore(lane.assignment.key[0])
            took = (tries.runtime.now_ms() - self._began) / 1000
            tries._call_hooks("failed" if is_single and attempt.is_held else "lost", attempt, took, error)
            tries._returned(lane, tries.lanes.apart(lane, tries.call, is_single=is_single))
        except BaseException as wrong:  # noqa: BLE001 - what follows a handler ends the run
            tries.broken(lane, one.turn, wrong)

    def _named(self, error: MessagesFailedError) -> dict[int, Exception]:
        """Place in the list → its error. Raises ConfigurationError for what is not in it: no message is done then."""
        given, found = error.failed, dict[int, Exception]()
        places = {
            (*one.lane.assignment.key, one.attempt.message.offset()): place for place, one in enumerate(self.ones)
        }
        for pair in given.items() if isinstance(given, Mapping) else given:
            what, why = _pair(pair)
            if isinstance(given, Mapping):
                place = what if isinstance(what, int) and 0 <= what < len(self.ones) else None
            else:
                place = places.get(_where(what))
            if place is None or not isinstance(why, Exception):
                raise ConfigurationError(
                    f"MessagesFailedError names {what!r} with {why!r}: it takes {{place in the list: exception}}, or "
                    "[(message, exception), …] with messages of the list. No message of this batch is done, and they "
                    "come again"
                ) from error
            found[place] = why
        return found


def _pair(given: Any) -> tuple[Any, Any]:
    return given if isinstance(given, tuple) and len(given) == 2 else (given, None)


def _where(what: Any) -> tuple[Any, ...]:
    """The topic, partition and offset of a message, or these themselves; else nothing."""
    try:
        where = what if isinstance(what, tuple) else (what.topic(), what.partition(), what.offset())
        hash(where)
    except (AttributeError, TypeError):
        return ()
    return where
