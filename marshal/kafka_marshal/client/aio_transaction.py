"""A transaction of a batch, for an event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from kafka_marshal.client import transaction as plain
from kafka_marshal.client.transactions import Headers


class Transaction:
    """:class:`kafka_marshal.client.transaction.Transaction` for an event loop; use it in ``async with``."""

    __slots__ = ("_carry_out", "_transaction")

    def __init__(self, transaction: plain.Transaction, carry_out: Callable[..., Awaitable[object]]) -> None:
        """carry_out: has a function called with these arguments by a thread of the library."""
        self._transaction = transaction
        self._carry_out = carry_out

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> None:
        """Produce a record when the transaction commits; it waits for nothing."""
        self._transaction.produce(topic, value, key, headers, partition)

    async def __aenter__(self) -> Self:
        self._transaction.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._carry_out(*self._transaction.end(error))
