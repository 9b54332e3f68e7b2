"""Objects that belong to one process: they can't be sent to another one, and a ``with`` block ends them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NoReturn, Self


class OneProcess:
    """Can't be pickled or copied: connections, threads and leases belong to one object of one process."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"a {name} can't be pickled or copied: its connections, threads and leases belong to the process that made "
            "it. Nothing was sent. Pass on what it takes to make one (bootstrap servers, group_id, topics), and make a "
            "Marshal in each process. A function for Spark's executors must not mention it"
        )


class _Itself(property):
    """A property whose value is a weak reference: to call it returns the object. ``ExitStack`` calls it itself."""

    def __call__(self, entered: object) -> object:
        return entered


class WithBlock:
    """``__enter__`` that returns the object itself.

    It is written in C: no signal handler can raise between the call that makes the object and the block that ends it.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        def __enter__(self) -> Self: ...

    else:
        __enter__ = _Itself(weakref.ref)

        def __aiter__(self) -> NoReturn:
            raise TypeError(
                f"this {type(self).__name__} is not for `async for` or `async with`: its calls block. Nothing was "
                "delivered. Use Marshal of kafka_marshal.aio, whose consumers have the same methods as coroutines"
            )

        __aenter__ = __aexit__ = __aiter__
