"""The type of the messages that users get, and their headers.

A header's name may not be UTF-8, as programs in C or PHP may write it. confluent-kafka returns such headers with a null
pointer for the name and an error that is not raised yet. The error comes up at some later line, and a program that
unpacks the pair crashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from gc import get_referents
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final

__all__ = ["UNREADABLE", "Headers", "Message", "headers_of", "mend"]

if TYPE_CHECKING:
    import confluent_kafka

    class Message(confluent_kafka.Message[bytes, bytes]):
        """A confluent_kafka.Message that was fetched: it has a topic, a partition and an offset."""

        def topic(self) -> str: ...
        def partition(self) -> int: ...
        def offset(self) -> int: ...

else:
    from kafka_marshal.ports import Message


#: Stands for a name whose bytes are not known any more: of several in one message only the first one's are.
UNREADABLE: Final = "(not UTF-8)"

#: A call made in C is checked for the error that was not raised; one that the interpreter makes itself may not be.
_headers = methodcaller("headers")


#: What a message has; None: it has none.
Headers = Sequence[tuple[str, bytes | None]] | None


def headers_of(message: Any) -> Headers:
    """The headers of a message that was fetched, and not changed since. Bytes of a name that are no UTF-8 are escaped.

    The message is mended, too: others may read its headers from then on.
    """
    try:
        found: Headers = _headers(message)
    except SystemError as error:
        cause: BaseException | None = error
        while not isinstance(cause, UnicodeDecodeError):  # a second such name wraps the error of the first
            if cause is None:
                raise
            cause = cause.__cause__
        mend(message, cause.object.decode("utf-8", "backslashreplace"))
        found = message.headers()
    return found


def mend(message: Any, first_name: str = UNREADABLE) -> None:
    """Give such headers names, so that the next to read them does not crash, even if they were read before."""
    found = message.headers()
    if type(found) is list and any(map(_is_broken, found)):  # others were set by the user
        names = iter((first_name,))
        message.set_headers([(next(names, UNREADABLE), x[1]) if _is_broken(x) else x for x in found])


def _is_broken(pair: object) -> bool:
    """Whether a null pointer is in it. The collector of cycles sees that; to touch it is a crash."""
    return type(pair) is tuple and len(get_referents(pair)) < len(pair)
