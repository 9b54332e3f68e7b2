"""Proofs of transactions that no story can be: the steps of scripts, and how Kafka is asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_marshal.adapters.kafka import cluster as kafka_cluster
from kafka_marshal.adapters.kafka.errors import Troubles
from tests.scripts.blocks import Blocks
from tests.scripts.members import Members
from tests.scripts.replica import Replica
from tests.scripts.runner import SCRIPTS, played

#: Those of rules M.
TRANSACTION_SCRIPTS = [x for x in SCRIPTS["engine"] if x.name.startswith("m")] + SCRIPTS["transactions"]

#: Those of members that take checkpoints.
CHECKPOINT_SCRIPTS = [x for x in SCRIPTS["engine"] if x.name.startswith("x")]


#: Those of shares and open messages, and of what level 5 added to groups.
SHARING_SCRIPTS = [*SCRIPTS["sharing"], *(x for x in SCRIPTS["groups"] if x.stem.startswith("r0"))]

#: All others of members.
MEMBER_SCRIPTS = [x for x in SCRIPTS["engine"] if x not in TRANSACTION_SCRIPTS and x not in CHECKPOINT_SCRIPTS]


def script_differs(path: Path) -> str:
    """The first line that the script's commands print otherwise; "": all is as it says."""
    says = path.read_text(encoding="utf-8")
    player = Replica if path in SHARING_SCRIPTS else Blocks if path in SCRIPTS["transactions"] else Members
    prints = played(says, player().play)
    lines = zip(says.splitlines(), [*prints.splitlines(), *[""] * len(says)], strict=False)
    return next((f"{theirs!r} in place of {ours!r}" for ours, theirs in lines if ours != theirs), "")


def reads_uncommitted() -> str:
    """A committed offset is exact only if it is read as read_committed; with a user's own isolation.level, too."""
    asked: list[dict[str, Any]] = []

    class Consumer:
        def __init__(self, settings: dict[str, Any]) -> None:
            asked.append(settings)

        def committed(self, places: list[Any], timeout: float) -> list[Any]:
            return [SimpleNamespace(error=None, offset=3, metadata="")]

        def poll(self, timeout: float) -> None:
            pass

        def close(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kafka_cluster, "Consumer", Consumer)
        given: dict[str, object] = {"isolation.level": "read_uncommitted"}
        offsets = kafka_cluster.CommittedOffsets("localhost:1", lambda: (given, Troubles()))
        found = offsets.ask("g", ("t", 0), 1.0)
        offsets.close()
    level = [each.get("isolation.level") for each in asked]
    return "" if (found, level) == ((3, ""), ["read_committed"]) else f"{found} is read with {level}"
