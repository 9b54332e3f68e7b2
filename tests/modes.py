"""The options of consumers in one flat mapping, as tables of tests and helpers give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from kafka_marshal import CheckpointPolicy, Claims, Group, Transactions


def options_of(flat: Mapping[str, Any], kind: type[Claims | Group] = Claims, **defaults: Any) -> dict[str, Any]:
    """As the makers take them: fields of the mode's class in the mode, callbacks of checkpoints in their policy.

    defaults: fields of the class, unless they are given. ``transactions=True``: ``exactly_once=Transactions()``.
    """
    left = dict(flat)
    of_mode = {**defaults, **{each.name: left.pop(each.name) for each in fields(kind) if each.name in left}}
    calls = {name: left.pop(name) for name in ("on_checkpoint", "on_restore", "on_completed") if name in left}
    if calls:
        left["checkpoints"] = replace(left.get("checkpoints") or CheckpointPolicy(), **calls)
    if left.pop("transactions", False):
        left["exactly_once"] = Transactions()
    return {"mode": kind(**of_mode), **left} if of_mode or kind is Group else left
