"""Which right a broker with ACLs asks for: named in errors, with the command that grants it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

#: Names in one message.
_SOME = 3


def grant(operation: str, resource: str, names: Iterable[str], *, prefix: bool = False) -> str:
    """Completes "… is forbidden. " with the right that is missing and the remedy.

    operation: as Kafka's documentation spells it (``DESCRIBE_CONFIGS``). resource: ``"topic"``, ``"group"`` or
    ``"transactional-id"``. prefix: on all names that begin so.
    """
    known = sorted(names)
    shown = ", ".join(map(repr, known[:_SOME])) + (f" and {len(known) - _SOME} more" if len(known) > _SOME else "")
    spelled = "".join(part.capitalize() for part in operation.split("_"))
    options = " ".join(f"--{resource} {shlex.quote(name)}" for name in known[:_SOME])
    if prefix:
        shown, options = f"prefix {shown}", f"{options} --resource-pattern-type prefixed"
    return (
        f"It needs the right {operation} on {resource} {shown}: ask for it for the principal you connect as "
        f"(kafka-acls --add --allow-principal User:NAME --operation {spelled} {options}). "
        "docs/security.md has the rights of each role"
    )
