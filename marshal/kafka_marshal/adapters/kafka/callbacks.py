"""The user's functions in a configuration, behind a guard before librdkafka gets them.

Whatever else is callable is guarded like those we know. ``oauth_cb`` alone may raise: librdkafka takes that for a
token that could not be had, says so as an authentication error, and asks again.
"""

from __future__ import annotations

from collections.abc import Callable

from kafka_marshal.guard import Guard, report

__all__ = ["guarded"]


def guarded(name: str, value: object) -> object:
    """A value of a configuration as librdkafka may get it."""
    if name == "logger" and hasattr(value, "log"):
        return _Log(value.log)
    if not callable(value) or isinstance(value, Guard):
        return value
    return _Token(value) if name == "oauth_cb" else Guard(name, value)


class _Log:
    """A logger whose handlers and filters may raise."""

    def __init__(self, log: Callable[..., object]) -> None:
        self.log = Guard("the log of librdkafka's lines", log)


class _Token:
    """An ``oauth_cb``: what it raises is logged and raised again, since confluent-kafka drops all but the fact."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, config: object) -> object:
        try:
            answer = self._call(config)
            _check(answer)
        except BaseException as error:
            report("oauth_cb", error)
            raise
        return answer


def _check(answer: object) -> None:
    """Raise for what confluent-kafka can't read: librdkafka would not learn of it, and never ask for a token again."""
    if isinstance(answer, tuple) and 2 <= len(answer) <= 4:
        extensions = answer[3] if len(answer) == 4 else {}
        texts = (answer[0], *answer[2:3], *(extensions.values() if isinstance(extensions, dict) else (None,)))
        if hasattr(answer[1], "__float__") and all(isinstance(text, str) for text in texts):
            return
    raise TypeError(
        "oauth_cb must return (token, expiry in seconds since 1970[, principal[, extensions]]), with text in all but "
        f"the second; this was a {type(answer).__name__}. No token was set, and no connection is made with it"
    )
