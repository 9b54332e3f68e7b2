"""Arguments of public calls, checked before anything is sent: each function returns the value, or names what is wanted.

Every failure is a ConfigurationError with the argument's name, what it has to be and what it was.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Coroutine, Generator, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from inspect import (
    isasyncgenfunction,
    iscoroutine,
    iscoroutinefunction,
    isfunction,
    isgeneratorfunction,
    signature,
)
from math import isfinite, nan
from numbers import Real
from operator import index
from threading import Thread
from types import FunctionType, MethodType
from typing import Any

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.secret import HIDDEN, is_secret, scrub
from kafka_marshal.types import T

#: The highest number of a partition, and the highest offset, that Kafka's protocol can name.
MOST_PARTITION = 2**31 - 1
MOST_OFFSET = 2**63 - 1

#: The longest wait that the system takes: 31 years.
MOST_SECONDS = 1e9

#: The highest port of TCP.
MAX_PORT = 65_535

#: What functions usually return: nothing of it is still to run.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, dict, tuple})


def wrong(
    name: str, wanted: str, value: object, fate: str = "Nothing was changed", hint: str = "."
) -> ConfigurationError:
    """The error to raise; fate: the result of the call, for people. hint: what :func:`near` says."""
    kind = "" if value is None or isinstance(value, str | int | float) else f" ({type(value).__name__})"
    shown = repr(value)
    shown = HIDDEN if is_secret(name) or scrub(shown) != shown else shown
    shown = shown if len(shown) <= 200 else f"{shown[:200]}…"
    return ConfigurationError(f"{name} must be {wanted}, not {shown}{kind}{hint} {fate}")


def near(given: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for a name that is close to a known one, in any case; else ``.``"""
    from difflib import get_close_matches  # not for a program without such a mistake

    by_lower = {name.lower(): name for name in known}
    found = get_close_matches(given.lower(), by_lower, 1, 0.75)
    return f"; did you mean {by_lower[found[0]]!r}?" if found else "."


def text(name: str, value: object, wanted: str = "a string that is not empty") -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise wrong(name, wanted, value)
    return value


def a_whole(name: str, value: object, least: int = 0, most: int = MOST_OFFSET) -> int:
    """A whole number (numpy's, too, but no bool) from least to most."""
    try:
        number = None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise wrong(name, "a whole number", value)
    if not least <= number <= most:
        raise wrong(name, f"at least {least}" if number < least else f"at most {most}", value)
    return number


def seconds(name: str, value: object, *, above: float | None = None, below: float = MOST_SECONDS) -> float:
    """Seconds: a finite number (numpy's, too, but no bool), not below 0; above, below: within these, both excluded."""
    number = _finite(name, value, "a number of seconds")
    if number < 0 or (above is not None and number <= above):
        raise wrong(name, "at least 0 seconds" if above is None else f"above {above:g} seconds", value)
    if number >= below:
        raise wrong(name, f"below {below:g} seconds", value)
    return number


def seconds_within(name: str, value: object, least: float, most: float) -> float:
    """Seconds from least to most, both included."""
    number = _finite(name, value, "a number of seconds")
    if not least <= number <= most:
        raise wrong(name, f"{least:g} to {most:,.0f} seconds", value)
    return number


def a_rate(name: str, value: object) -> float:
    """A finite number above 0 (no bool)."""
    number = _finite(name, value, "a number above 0")
    if number <= 0:
        raise wrong(name, "a number above 0", value)
    return number


def _finite(name: str, value: object, wanted: str) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    number = float(value) if is_number else nan  # type: ignore[arg-type]
    if not isfinite(number):
        raise wrong(name, wanted, value)
    return number


def a_flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise wrong(name, "True or False", value)
    return value


def a_function(name: str, value: object, takes: str) -> None:
    """Something that can be called with these arguments (their names, for people), and has done its work then."""
    wanted = f"a function that takes ({takes})"
    if not callable(value):
        raise wrong(name, wanted, value)
    kinds = (iscoroutinefunction, isasyncgenfunction, isgeneratorfunction)
    if any(kind(function_of(value)) for kind in kinds):
        wanted += " and does its work when called: what it returns is not awaited or iterated over"
        raise wrong(name, wanted, value)
    try:
        parameters = signature(value)
    except (TypeError, ValueError):
        return  # some that are written in C report none
    try:
        parameters.bind(*takes.split(", ") if takes else ())
    except TypeError:
        raise wrong(name, wanted, value) from None


def function_of(value: object) -> object:
    """The function that a call of this runs: of a partial, of an object that can be called, or itself."""
    while isinstance(value, partial):
        value = value.func
    call = getattr(type(value), "__call__", None)  # noqa: B004
    return call if isfunction(call) else value


def a_result(name: str, value: T) -> T:
    """Check what a user's function has returned: nothing whose work is still to come, as it would not be awaited."""
    if value is not None and (what := unfinished(value)):
        drop(value)
        raise ConfigurationError(
            f"{name} has returned {what}, and nothing waits for it: its work did not run, or not to its end. Give a "
            "function that does its work when called; asyncio.run_coroutine_threadsafe reaches an event loop"
        )
    return value


def is_awaited(value: object) -> bool:
    """Whether it has to be awaited, or waited for, to have its result. (By its class: a mock has any attribute.)"""
    kind = type(value)
    return hasattr(kind, "__await__") or iscoroutine(value) or hasattr(kind, "add_done_callback")


def unfinished(value: object) -> str:
    """What a function has returned instead of doing its work, for people; "": it has done it, as far as can be seen."""
    kind = type(value)
    if kind in _PLAIN:
        first = _unfinished_in(value) if kind in (list, tuple) else None
        return "" if first is None else f"a {kind.__name__} with {unfinished(first)}"
    name = "coroutine" if iscoroutine(value) else kind.__name__.replace("_", " ")
    shown = f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
    if is_awaited(value):
        return f"{shown}, which must be awaited" if hasattr(kind, "__await__") else f"{shown}, which may still run"
    if kind.__module__ == "multiprocessing.pool" or isinstance(value, Thread):
        return f"{shown}, which may still run"
    if isinstance(value, Generator | AsyncGenerator | map | filter):
        return f"{shown}, which runs when it is iterated over"
    if isinstance(value, FunctionType | MethodType | partial):
        return f"{shown}, which was not called"
    return ""


def _unfinished_in(several: Any) -> object:
    """The first that must be awaited, or may still run; None: there is none. (All are of one kind, if any is.)"""
    if not several or not is_awaited(several[0]):
        return None
    return next((each for each in several if is_awaited(each) and not _has_ended(each)), None)


def _has_ended(value: Any) -> bool:
    return hasattr(type(value), "add_done_callback") and bool(value.done())


def drop(value: object) -> None:
    """End what was refused, as far as it has not begun: it must not run later, nor be warned of."""
    if isinstance(value, list | tuple):
        for each in value:
            drop(each)
    elif isinstance(value, Coroutine | Generator):
        value.close()
    elif isinstance(value, Future):
        value.cancel()


def an_instance(name: str, value: T, kind: type | tuple[type, ...], wanted: str) -> T:
    """An object of this class, or of one of these."""
    if not isinstance(value, kind):
        raise wrong(name, wanted, value)
    return value


def one_of(name: str, value: object, known: Collection[str], wanted: str = "") -> str:
    """One of these strings."""
    if not isinstance(value, str) or value not in known:
        hint = near(value, known) if isinstance(value, str) else "."
        raise wrong(name, wanted or " or ".join(map(repr, known)), value, hint=hint)
    return value


def a_mapping(name: str, value: object, wanted: str = "a mapping of names to values") -> dict[Any, Any]:
    """A copy of a mapping; None: an empty one."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(name, wanted, value)
    return dict(value)


def several(name: str, value: object, wanted: str) -> list[Any]:
    """What a list, or anything else that can be iterated, holds; a string is no list."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise wrong(name, wanted, value)
    return list(value)


def partitions(name: str, value: object) -> list[tuple[str, int]]:
    """(topic, partition) of each; further fields are left out, so that assignment() fits."""
    wanted = "a list of (topic, partition)"
    found = []
    for each in several(name, value, wanted):
        if not isinstance(each, tuple | list) or len(each) < 2 or not isinstance(each[0], str):
            raise wrong(name, wanted, value)
        found.append((each[0], a_whole(f"{name}: the partition of {each[0]!r}", each[1], 0, MOST_PARTITION)))
    return found


def offsets(name: str, value: object, least: int = 0) -> None:
    """A mapping of (topic, partition) to an offset, at least ``least``."""
    wanted = "a mapping of (topic, partition) to an offset"
    if value is None:
        raise wrong(name, wanted, value)
    found = a_mapping(name, value, wanted)
    partitions(name, found)
    for key, offset in found.items():
        a_whole(f"{name}: the offset of {key!r}", offset, least)
