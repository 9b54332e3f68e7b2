"""The dead letters, read back: what is in the topic is held against what was planted.

The topic is written at least once: a driver that dies between its dead letters and its database leaves letters that its
successor writes again. Whence a letter comes (its headers say topic, partition and offset) tells which of them are one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flights.bad_records import Planted
from flights.errors import DemoError
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.ports import Cluster, Message

__all__ = ["Letters", "collect", "read_letters"]

_TIMEOUT_S: Final = 30.0

#: (topic, partition, offset) of the message that is no flight.
Source = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Letters:
    """What the dead-letter topic holds."""

    #: Messages in it.
    written: int
    #: Different messages that were no flights, each with what it held and what is wrong with it.
    found: Mapping[Source, Planted]

    @property
    def repeated(self) -> int:
        """Messages that were there already."""
        return self.written - len(self.found)

    @property
    def troubles(self) -> Counter[str]:
        """How many there are of each kind."""
        return Counter(trouble for _, trouble in self.found.values())

    def missing(self, planted: Counter[Planted]) -> Counter[Planted]:
        """Planted, and not here."""
        return planted - Counter(self.found.values())

    def unexpected(self, planted: Counter[Planted]) -> Counter[Planted]:
        """Here, and not planted."""
        return Counter(self.found.values()) - planted


def read_letters(cluster: Cluster, topic: str) -> Letters:
    """Read the whole topic, which has one partition, as it is now (*blocking*).

    Raises KafkaUnavailableError where it can't be read to its end, DemoError where a letter does not say whence it is.
    """
    _, end = cluster.watermarks([(topic, 0)], _TIMEOUT_S)[topic, 0]
    messages: list[Message] = []
    reader = cluster.data_reader(f"{topic}-check", {})
    until = time.monotonic() + _TIMEOUT_S
    try:
        reader.assign({(topic, 0): 0})
        while (messages[-1].offset() or 0 if messages else -1) + 1 < end:
            found, faults = reader.read(1_000, 0.2)
            messages += found
            if time.monotonic() > until:
                raise KafkaUnavailableError(
                    f"The dead letters in {topic!r} were not read to their end within {_TIMEOUT_S:g} s"
                    f"{''.join(f' ({fault.message})' for fault in faults)}. They are unchanged. Does the broker run?"
                )
    finally:
        reader.close()
    return collect(messages)


def collect(messages: Iterable[Any]) -> Letters:
    """What these letters (confluent_kafka.Message) hold. Raises DemoError as read_letters does."""
    found: dict[Source, Planted] = {}
    written = 0
    for message in messages:
        written += 1
        try:
            headers = {name: bytes(value).decode() for name, value in message.headers() or ()}
            source = headers["source.topic"], int(headers["source.partition"]), int(headers["source.offset"])
            letter = message.value(), headers["trouble"]
        except (KeyError, ValueError, TypeError) as error:
            raise DemoError(
                f"The dead letter at offset {message.offset()} does not say whence it comes ({error!r}). It is in the "
                "topic all the same. Did somebody else write there?"
            ) from error
        if found.setdefault(source, letter) != letter:
            raise DemoError(
                f"Two dead letters of {source[0]} [{source[1]}] @ {source[2]} differ. Both are in the topic. Was the "
                "topic of flights made anew meanwhile?"
            )
    return Letters(written, found)
