"""kafka-marshal for asyncio: the same names, to be awaited (docs/threads.md)."""

from kafka_marshal.client.aio import Consumer, GroupConsumer, Leader, Marshal

__all__ = ["Consumer", "GroupConsumer", "Leader", "Marshal"]
