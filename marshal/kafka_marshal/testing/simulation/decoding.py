"""A cache of decoded values: all replicas of a story decode the same ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache

from rationalizer import Record, outcome, world
from rationalizer.wire.records import Kind
from rationalizer.wire.unpacking import Message

__all__ = ["decoded_once"]

#: Capacity of the cache.
READ_CACHE = 512


@contextmanager
def decoded_once() -> Iterator[None]:
    """Decode each value once for all replicas; decoding has no state (E6)."""
    with ExitStack() as stack:
        for module, name, keep in ((world, "read", lru_cache(READ_CACHE)), (outcome, "build", _built_once)):
            function = getattr(module, name)
            setattr(module, name, keep(function))
            stack.callback(setattr, module, name, function)
        yield


def _built_once(build: Callable[[Kind, Message], Record]) -> Callable[[Kind, Message], Record]:
    """Cached by the message's identity, which replicas share: hashing it costs as much as building the record."""
    built: dict[int, tuple[Message, Record]] = {}

    def keep(kind: Kind, message: Message) -> Record:
        found = built.get(id(message))
        if found is None:
            if len(built) >= READ_CACHE:
                built.clear()
            found = built[id(message)] = (message, build(kind, message))
        return found[1]

    return keep
