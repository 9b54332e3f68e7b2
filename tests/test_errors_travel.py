"""Every error survives pickle, copy, deepcopy and a process pool."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import Any

import kafka_marshal
import rationalizer
from kafka_marshal.errors import ExtraMissingError, StaleEpochError

#: Beginning of an annotation → a value of that type.
VALUES: dict[str, object] = {
    "int": 3,
    "float": 1.5,
    "bool": True,
    "Sequence[tuple[str, int]]": [("t", 1)],
    "Mapping[Any, Exception]": {},
}
MORE_VALUES: dict[str, object] = {"Sequence[tuple[str, int, int, int]]": [("t", 1, 2, 3)], "Kind": None}


@cache
def errors() -> list[type[BaseException]]:
    """All error classes, except those private to a module."""
    found: set[type[BaseException]] = set()
    for package in (kafka_marshal, rationalizer):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name.rpartition(".")[2] == "__main__":
                continue
            inside = vars(importlib.import_module(module.name)).values()
            found.update(x for x in inside if inspect.isclass(x) and issubclass(x, BaseException))
    ours = (x for x in found if x.__module__.partition(".")[0] in ("kafka_marshal", "rationalizer"))
    return sorted((x for x in ours if not x.__name__.startswith("_")), key=lambda x: x.__qualname__)


def made(kind: type[BaseException]) -> BaseException:
    """An instance with a value in every field, by its constructor's annotations."""
    given: list[object] = []
    named: dict[str, object] = {}
    own = next((x for x in kind.__mro__ if "__init__" in vars(x) and x.__module__ != "builtins"), None)
    if own is None:
        given.append("what happened")
    for name, parameter in inspect.signature(own).parameters.items() if own else ():
        annotation = str(parameter.annotation).partition(" |")[0]
        value = {**VALUES, **MORE_VALUES}.get(annotation, f"the {name}")
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = value
        elif parameter.kind is not parameter.VAR_KEYWORD:
            given.append(value)
    error = kind(*given, **named)
    error.add_note("a note")
    return error


def raise_it(kind: type[BaseException]) -> None:
    raise made(kind)


def says(error: BaseException) -> tuple[object, ...]:
    """All its fields; the remote traceback that a pool adds is a cause, not a field."""
    return type(error), str(error), error.args, vars(error), getattr(error, "msg", None), getattr(error, "name", None)


def pickled(protocol: int, error: BaseException) -> object:
    return pickle.loads(pickle.dumps(error, protocol))


WAYS: dict[str, Callable[[Any], Any]] = {
    **{f"pickle {x}": partial(pickled, x) for x in range(pickle.HIGHEST_PROTOCOL + 1)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def changed(error: BaseException) -> Iterator[str]:
    """The ways that lose or change the error."""
    for name, way in WAYS.items():
        try:
            if says(came := way(error)) != says(error):
                yield f"{type(error).__qualname__}, {name}: {came!r}"
        except Exception as refused:  # noqa: BLE001 - each is listed
            yield f"{type(error).__qualname__}, {name}: {refused!r}"


def test_every_error_is_the_same_when_pickled_or_copied() -> None:
    assert len(errors()) > 60
    assert [text for kind in errors() for text in changed(made(kind))] == []


def test_through_a_process_pool() -> None:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        for kind, future in [(kind, pool.submit(raise_it, kind)) for kind in errors() if issubclass(kind, Exception)]:
            came = future.exception(60)
            assert came is not None
            assert says(came) == says(made(kind))
            assert "raise_it" in str(came.__cause__)


class OfAUser(StaleEpochError):
    """A subclass with another constructor."""

    def __init__(self, why: int) -> None:
        super().__init__(f"why: {why}", topic="t", partition=1, epoch=why, stored_epoch=3)


def test_a_users_own_subclass_does_too() -> None:
    error = OfAUser(2)
    for way in WAYS.values():
        assert says(way(error)) == says(error)


def test_a_missing_module_keeps_its_name() -> None:
    error = ExtraMissingError("no pyspark", name="pyspark")
    for way in WAYS.values():
        assert (way(error).name, way(error).msg) == ("pyspark", "no pyspark")
