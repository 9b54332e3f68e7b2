"""What the log has as done of a partition: ``committed()`` of every kind of consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from kafka_marshal import arguments
from kafka_marshal.client.view import open_messages
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.types import Key, Progress, TopicPartition
from rationalizer.holes import first_open

if TYPE_CHECKING:
    from kafka_marshal.engine.work.consumer import ConsumerEngine
    from kafka_marshal.node.driver import Driver


class ShowsCommitted:
    """The part of a consumer that shows the progress of its group."""

    __slots__ = ()

    _driver: Driver
    _engine: ConsumerEngine

    @overload
    def committed(
        self, partitions: Sequence[Key | TopicPartition], ranges: Literal[False] = False
    ) -> list[TopicPartition]: ...

    @overload
    def committed(self, partitions: Sequence[Key | TopicPartition], ranges: Literal[True]) -> list[Progress]: ...

    def committed(
        self, partitions: Sequence[Key | TopicPartition], ranges: bool = False
    ) -> list[TopicPartition] | list[Progress]:
        """Of each, what the group reads next (−1: it has not begun), and this member's epoch (−1: it has none).

        That is the next offset that is not done, or the first message below it that waits for another try.
        ``ranges=True``: all that is done of each, and which messages are open or set aside.
        """
        keys = arguments.partitions("partitions", partitions)
        if arguments.a_flag("ranges", ranges):
            return self._driver.call(self._progress_of, keys)
        return self._driver.call(self._committed_of, keys)

    def _committed_of(self, keys: Sequence[Key]) -> list[TopicPartition]:
        found = []
        with self._driver.locked(step=False):
            for key in keys:
                done = self._engine.source.view.progress(key)
                offset = -1 if done is None else first_open(done.stable + 1, self._engine.source.view.open(key))
                found.append(TopicPartition(*key, offset, self._epoch_of(key)))
        return found

    def _epoch_of(self, key: Key) -> int:
        """The token under which this member works on it now; −1: it does not."""
        assignment = self._engine.assignments.get(key)
        return -1 if assignment is None or assignment.over else assignment.epoch

    def _progress_of(self, keys: Sequence[Key]) -> list[Progress]:
        with self._driver.locked(step=False):
            return [self._shown(key) for key in keys]

    def _shown(self, key: Key) -> Progress:
        done = self._engine.source.view.whole_progress(key)
        if done is None:
            return Progress(-1, None, (), ())
        # A coordinated group has no leases, and its members read only the group's home.
        lease = None if self._engine.settings.group is not None else self._driver.engine.peers.lease(key)
        return Progress(
            first_open(done.stable + 1, done.open),
            _or_none(done.stable),
            tuple((lo, hi, _or_none(through)) for lo, hi, through in done.done_through),
            tuple((first, last) for first, last in split(done.ranges).ranges),
            open_messages(done.open, lease),
        )


def _or_none(offset: int) -> int | None:
    return None if offset < 0 else offset
