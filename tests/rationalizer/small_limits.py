"""Limits of section 7 that are made so small that logs meet them, in the product and in the oracle alike."""

from __future__ import annotations

import sys

import pytest

__all__ = ["small_limits"]

#: By the names in the product, and in the oracle.
LIMITS = {
    "MAX_PINNED": ("MOST_PINNED", 2),
    "MAX_CHECKPOINTS_WEIGHT": ("MOST_WEIGHT", 40),
    "MAX_PIECES": ("MOST_STATES", 3),
}


def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set them wherever they were imported."""
    for name, (of_oracle, value) in LIMITS.items():
        found = 0
        for module in list(sys.modules.values()):
            of_product = module.__name__.startswith("rationalizer.")
            mine = name if of_product else of_oracle
            if (of_product or module.__name__.startswith("tests.rationalizer.oracle")) and hasattr(module, mine):
                monkeypatch.setattr(module, mine, value)
                found += of_product
        assert found, f"the product has no limit {name}"
