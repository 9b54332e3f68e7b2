"""Values of `frozen` behave as those of `dataclass(frozen=True, slots=True)` do."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any, ClassVar

import pytest

from rationalizer.frozen import frozen

KINDS: dict[str, tuple[type, ...]] = {}


def both(cls: type) -> type:
    body = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    KINDS[cls.__name__] = tuple(
        make(type(cls.__name__, (), dict(body))) for make in (frozen, dataclass(frozen=True, slots=True))
    )
    return KINDS[cls.__name__][0]


@both
class One:
    only: int


@both
class Empty:
    """No field."""


@both
class Pair:
    left: int
    right: str = "r"
    #: Not a field.
    NAME: ClassVar[str] = "pair"


@both
class Rich:
    """All that a field can be."""

    left: int
    many: list[int] = field(default_factory=list)
    named: str = "n"
    hidden: int = field(default=5, repr=False)
    aside: int = field(default=6, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", self.hidden * 2)


@frozen
class Base:
    first: int

    def twice(self) -> int:
        return 2 * self.first


@frozen
class Derived(Base):
    second: str = "s"

    def __repr__(self) -> str:
        return "its own"


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("One", (1,), {}),
    ("Empty", (), {}),
    ("Pair", (1,), {}),
    ("Pair", (1, "x"), {}),
    ("Pair", (), {"left": 3, "right": "y"}),
    ("Pair", (), {}),
    ("Pair", (1, 2, 3), {}),
    ("Rich", (1,), {}),
    ("Rich", (1, (2, 3)), {"aside": 8, "named": "m"}),
    ("Rich", (1, (), "m", 8, 9), {}),
    ("Rich", (1,), {"none": 3}),
]


def outcome(kind: type, given: tuple[Any, ...], named: dict[str, Any]) -> list[object]:
    """What can be seen of a value, or of the error that it makes."""
    try:
        value: Any = kind(*given, **named)
    except TypeError as error:
        return [str(error)]
    try:
        number: object = hash(value)
    except TypeError as error:
        number = str(error)
    values = [getattr(value, each.name) for each in fields(value)]
    return [repr(value), number, values, value == kind(*given, **named), value == 1, hasattr(value, "__dict__")]


@pytest.mark.parametrize(("name", "given", "named"), CALLS)
def test_a_value_is_what_a_dataclass_is(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    ours, known = KINDS[name]
    assert outcome(ours, given, named) == outcome(known, given, named)


@pytest.mark.parametrize("name", KINDS)
def test_a_class_shows_the_same_parameters(name: str) -> None:
    ours, known = (inspect.signature(kind).parameters for kind in KINDS[name])
    assert list(ours) == list(known)
    assert [each.kind for each in ours.values()] == [each.kind for each in known.values()]
    assert [each.annotation for each in ours.values()] == [each.annotation for each in known.values()]
    assert KINDS[name][0].__match_args__ == KINDS[name][1].__match_args__  # type: ignore[attr-defined]


def test_what_is_not_compared_makes_no_difference() -> None:
    rich = KINDS["Rich"][0]
    assert rich(1, aside=1) == rich(1, aside=2) != rich(1, hidden=1)
    assert KINDS["Pair"][0](1) != KINDS["Pair"][1](1)


def test_nothing_is_assigned_or_deleted() -> None:
    for kind in KINDS["Pair"]:
        value = kind(1)
        with pytest.raises(FrozenInstanceError, match="cannot assign to field 'left'"):
            value.left = 2
        with pytest.raises(FrozenInstanceError, match="cannot delete field 'left'"):
            del value.left
        assert value.left == 1


def test_a_class_derived_from_one_has_its_fields_and_methods() -> None:
    value = Derived(4)
    assert (value.first, value.second, value.twice(), repr(value)) == (4, "s", 8, "its own")
    assert value == Derived(4, "s") != Base(4)
    with pytest.raises(FrozenInstanceError):
        value.first = 1  # type: ignore[misc]

    class Plain(Base):
        """It may have more attributes."""

    plain = Plain(1)
    plain.more = 2  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        plain.first = 2  # type: ignore[misc]


def test_a_dataclass_is_derived_from_one_if_it_is_frozen_too() -> None:
    @dataclass(frozen=True)
    class Ordinary(Derived):
        third: int = 3

    assert Ordinary(1) == Ordinary(1, "s", 3) != Ordinary(1, "s", 4)
    with pytest.raises(TypeError, match="non-frozen"):
        dataclass(type("Loose", (Derived,), {}))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_value_is_copied_pickled_and_replaced(protocol: int) -> None:
    value = Derived(4, "t")
    assert pickle.loads(pickle.dumps(value, protocol)) == copy.copy(value) == copy.deepcopy(value) == value
    assert replace(value, second="s") == Derived(4)
