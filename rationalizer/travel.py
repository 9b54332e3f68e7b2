"""Errors that can be pickled and copied, whatever their constructor takes: they cross process pools and task queues."""

from __future__ import annotations

from typing import Any, cast


class Travels(BaseException):
    """Base of errors that pickle and copy as they are: message, fields and notes.

    Without it Python calls the constructor again with the message alone, which fails, or words the message twice.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        _, args, *state = cast("tuple[Any, ...]", super().__reduce__())
        return _restored, (type(self), args), *state


def _restored(kind: type[BaseException], args: tuple[object, ...]) -> BaseException:
    error = kind.__new__(kind, *args)
    built_in: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    built_in.__init__(error, *args)  # such as ImportError, which keeps its message beside the args
    return error
