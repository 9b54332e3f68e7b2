"""`fork` and `compare` on a real Kafka. The members are raw records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.harness import Command
from tests.cli.test_checkpoints import Delays, delays
from tests.cli.test_kafka import append, cluster, data

__all__ = ["append", "cluster", "data", "delays"]  # fixtures


def test_a_fork_and_how_far_it_is(
    kafka: Command, delays: Delays, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = delays.taken(4, 4, 4)
    newest = delays.taken(9, 9, 9)
    args = ("fork", "delays", good, "--as", "canary", "--partitions", f"{delays.data}:0-1")
    asked = kafka(*args)
    assert asked.status == 2
    assert "--yes" in asked.err
    planned = kafka(*args, "--dry-run", "--json").json
    assert (planned["group"], planned["checkpoint"], planned["name"], planned["begins"]) == (
        *("delays", good, "canary"),
        None,
    )
    first = planned["partitions"][0]
    assert (first["topic"], first["partition"], first["position"], first["gone"]) == (delays.data, 0, 5, 0)
    assert kafka("group", "canary").status == 1, "nothing was changed"
    ran = kafka(*args, "--yes")
    assert ran.status == 0, ran.err
    assert f"canary begins at checkpoint {good} of delays: 2 partitions" in ran.out
    assert "checkpoints delays" in ran.err and f"--retire {good}" in ran.err
    kept = {each["checkpoint"]: each["kind"] for each in kafka("checkpoints", "delays", "--json").json["checkpoints"]}
    assert kept[good] == "pinned"

    found = kafka("compare", "delays", "canary", "--json")
    assert found.status == 1
    assert [
        (x["partition"], x["position"], x["other"], x["verdict"], x["messages"]) for x in found.json["partitions"]
    ] == [
        (0, 10, 5, "behind", 5),
        (1, 10, 5, "behind", 5),
    ]
    assert "2 partitions in both, 2 differ" in kafka("compare", "delays", "canary").out
    Path(tmp_path, "comparing_states.py").write_text(
        "import json\ndef same(one, two):\n    return one.states == two.states\n"
        "def shown(one, two):\n    return json.dumps([one.group_id, two.group_id])\n"
    )
    monkeypatch.chdir(tmp_path)
    assert kafka("fork", "delays", newest, "--as", "second", "--yes").status == 0
    same = kafka("compare", "delays", "second", "--states", "comparing_states:same")
    assert same.status == 0, same.out + same.err
    assert "3 partitions in both, equal" in same.out
    shown = kafka("compare", "delays", "second", "--states", "comparing_states:shown", "--json")
    assert shown.status == 1
    assert json.loads(shown.json["partitions"][0]["states"]) == ["delays", "delays"]


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        (("fork", "delays", "999", "--as", "canary", "--yes"), 1, "keeps no checkpoint 999"),
        (("fork", "delays", "initial", "--as", "delays", "--yes"), 2, "is the group itself"),
        (("fork", "delays", "initial", "--as", "canary", "--partitions", "orders"), 2, "is not of the form TOPIC:N"),
        (("fork", "nobody", "7", "--as", "canary", "--yes"), 1, "does not know a group 'nobody'"),
        (("compare", "delays", "nobody"), 1, "does not know a group 'nobody'"),
        (("compare", "delays", "delays", "--states", "no_such_module:f"), 2, "--states no_such_module:f: can't be"),
    ],
)
def test_what_is_refused(kafka: Command, delays: Delays, args: tuple[str, ...], status: int, text: str) -> None:
    found = kafka(*args)
    assert found.status == status
    assert text in " ".join(found.err.split())
