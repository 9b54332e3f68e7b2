"""The table of least rights in docs/security.md, and users with exactly some of them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from tests.secured import Config, login

PAGE = Path(__file__).parents[2] / "docs" / "security.md"

#: In Kafka, each of these operations implies DESCRIBE.
IMPLY_DESCRIBE = frozenset({"READ", "WRITE", "DELETE", "ALTER"})

_KINDS = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
}
_HEAD = "| role | on | operations |"


@dataclass(frozen=True, slots=True)
class Right:
    """One operation on one resource; ``name`` is the page's, later the trial's."""

    kind: str
    name: str
    operation: str

    def __str__(self) -> str:
        return f"{self.operation} on {self.kind} {self.name!r}"


def roles_of(page: str) -> dict[str, tuple[Right, ...]]:
    """Role → its rights. A row without a role belongs to the one above; "all of `x`" copies the rights of x."""
    found: dict[str, list[Right]] = {}
    role = ""
    for cells in _rows(page):
        name, on, operations = cells
        role = name.partition("`")[2].partition("`")[0] or role
        mine = found.setdefault(role, [])
        if inherited := re.fullmatch(r"all of `([\w-]+)`", on):
            mine += found[inherited[1]]
            continue
        place = re.fullmatch(r"(topic|group|transactional-id) `([\w.-]+/?)`( \(all that begin so\))?", on)
        assert place, f"{PAGE.name}: {on!r} is neither a resource nor a role of before"
        mine += [Right(place[1], place[2], each.strip()) for each in operations.split(",")]
    return {role: tuple(dict.fromkeys(rights)) for role, rights in found.items()}


def _rows(page: str) -> Iterator[list[str]]:
    lines = iter(page.splitlines())
    for line in lines:
        if line.startswith(_HEAD):
            break
    next(lines)
    for line in lines:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")][:3]


def give(bootstrap: str, wanted: Mapping[str, Iterable[Right]], root: Config | None = None) -> None:
    """Grant exactly these rights; returns when the broker applies them (within 30 s)."""
    admin = AdminClient({**(root or login("root")), "bootstrap.servers": bootstrap})
    bindings = [
        AclBinding(
            _KINDS[right.kind],
            right.name,
            ResourcePatternType.PREFIXED if right.name.endswith("/") else ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            AclOperation[right.operation],
            AclPermissionType.ALLOW,
        )
        for user, rights in wanted.items()
        for right in rights
    ]
    for answer in admin.create_acls(bindings).values():
        answer.result(30)
    every: Any = AclBindingFilter  # None matches anything, but the types don't allow it
    all_of_them = every(
        *(ResourceType.ANY, None, ResourcePatternType.ANY, None, None), AclOperation.ANY, AclPermissionType.ANY
    )
    until = time.monotonic() + 30
    while len(admin.describe_acls(all_of_them).result(30)) < len(bindings):
        assert time.monotonic() < until
        time.sleep(0.02)
