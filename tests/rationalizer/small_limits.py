"""Limits of sections 7 and 7b that are made so small that logs meet them, in the product and in the oracle alike."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

#: By the names in the product, and in the oracle.
LIMITS: dict[str, tuple[tuple[str, ...], int]] = {
    "MAX_PINNED": (("MOST_PINNED",), 2),
    "MAX_OLD_WEIGHT": (("MOST_WEIGHT",), 40),
    "MAX_KEY_PIECES": (("MOST_STATES", "MOST_PIECES", "MOST_PARTS"), 4),
    "MAX_HOLES": (("MOST_HOLES",), 4),
}


def small_limits(monkeypatch: pytest.MonkeyPatch, **other: int) -> None:
    """Set them wherever they were imported; other: values in place of those here."""
    for name, (of_oracle, usual) in LIMITS.items():
        value = other.get(name, usual)
        for top, names in (("rationalizer.", (name,)), ("tests.rationalizer.oracle.", of_oracle)):
            there = [(module, each) for module in _modules(top) for each in names if hasattr(module, each)]
            assert there, f"no module of {top} has {names}"
            for module, each in there:
                monkeypatch.setattr(module, each, value)


def _modules(top: str) -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if name.startswith(top)]
