"""The dead letters, read back: what is in the topic is held against what was planted.

The topic is written at least once: a driver that dies between its dead letters and its database leaves letters that its
successor writes again. A letter's source (topic, partition and offset in its headers) shows which of them are one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flights.bad_records import Planted
from flights.errors import DemoError

__all__ = ["Letters", "collect"]

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


def collect(messages: Iterable[Any]) -> Letters:
    """What these letters (confluent_kafka.Message) hold. Raises DemoError if one does not say whence it is."""
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
