"""Handlers of lists (``run(…, batch=…)``): the messages of a list begin together, and fail as those of a loop do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.in_batches import MessagesFailedError
from kafka_marshal.testing.simulation.process import FailedError, Job

#: The share of lists that fail as a whole.
WHOLE_FAILING = 0.05


class InLists:
    """Handles lists by the draws of a handler of one message."""

    def __init__(
        self,
        job: Job,
        drawn: Callable[[Message], tuple[BaseException | None, float]],
        failed: Callable[[Attempt, BaseException], object],
    ) -> None:
        """drawn: what a try of this message raises, if anything, and by how much longer it takes (s).

        failed: hears of a try that has failed, and counts.
        """
        self._job = job
        self._drawn = drawn
        self._failed = failed

    def __call__(self, messages: Sequence[Message]) -> None:
        self._job.begin_together(messages)
        drawn = [self._drawn(message) for message in messages]
        errors, seconds = [error for error, _ in drawn], sum(slow for _, slow in drawn)
        whole: BaseException | None = next((each for each in errors if isinstance(each, SystemExit)), None)
        if whole is None and len(messages) > 1 and self._job.random.random() < WHOLE_FAILING:
            whole = FailedError()
        if whole is not None:
            self._job.handle_list(messages, [whole] * len(messages), seconds)
            self._job.come_again(messages)
            raise whole
        lines: set[Hashable] = set()
        waiting: list[Message] = []
        for place, message in enumerate(messages):
            if (line := self._line(message)) in lines:  # those after a message that fails are not handled before it
                errors[place] = FailedError()
                waiting.append(message)
            elif errors[place] is not None:
                lines.add(line)
        self._job.handle_list(messages, errors, seconds)
        self._job.come_again(waiting)
        named = {place: error for place, error in enumerate(errors) if isinstance(error, Exception)}
        for place, error in named.items():
            self._failed(Attempt.of(messages[place]), error)
        if named:
            raise MessagesFailedError(named)

    def _line(self, message: Message) -> Hashable:
        """What is handled in order with it."""
        order, key = self._job.order, message.key()
        if order == "none" or (order == "key" and key is None):
            return message.topic(), message.partition(), message.offset()
        return message.topic(), message.partition(), key if order == "key" else None
