"""The type of the messages that users get."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["Message"]

if TYPE_CHECKING:
    import confluent_kafka

    class Message(confluent_kafka.Message[bytes, bytes]):
        """A confluent_kafka.Message that was fetched: it has a topic, a partition and an offset."""

        def topic(self) -> str: ...
        def partition(self) -> int: ...
        def offset(self) -> int: ...

else:
    from kafka_marshal.ports import Message
