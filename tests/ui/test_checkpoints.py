"""Checkpoints on the page: on the slider, in the list, and each piece's cut at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafka_marshal.observe.checkpoints import seen_by
from kafka_marshal.ui import moments
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.moments import Moment
from rationalizer import World
from rationalizer.dump import DumpReader

EXAMPLES = Path(__file__).parents[1] / "rationalizer" / "examples"

Entries = list[tuple[int, int, bytes | None]]


def entries(name: str) -> Entries:
    with (EXAMPLES / f"checkpoint_{name}.dump.jsonl").open("rb") as file:
        return [(each.offset, each.timestamp_ms, each.value) for each in DumpReader(file)]


def told(name: str, skip: int = 0) -> History:
    found = entries(name)
    world = World(0, 1)
    world.apply_many(found[:skip])
    history = History(1, {0: world})
    history.take(0, found[skip:])
    return history


@pytest.mark.parametrize("name", ["hand_over", "rollback", "positions", "loss", "shares", "leave"])
@pytest.mark.parametrize("skip", [0, 8])
def test_at_each_moment_the_cuts_are_those_of_a_replay(name: str, skip: int) -> None:
    history = told(name, skip)
    group = history.groups["g"]
    world = World(0, 1)
    for offset, stamp, value in entries(name):
        world.apply(offset, stamp, value)
        state = world.group("g")
        if offset < skip or state is None or state.checkpoints is None:
            continue
        newest = state.checkpoints.newest
        found = moments.checkpoints(group, Moment(world.log_time, 0, offset), 50)
        assert found["checkpoints"][0]["checkpoint"] == newest, offset
        wanted = {
            (key, cut or None)
            for key in state.partitions()
            if state.kept(*key) is not None
            for _, _, cut in seen_by(state, key, newest).states
        }
        shown = {((each["topic"], each["partition"]), each["cut"]) for each in found["pieces"]}
        # A partition that was never handed in is not listed.
        assert shown <= wanted, offset
        assert {each for each in wanted if each[1]} <= shown, offset
        for each in found["pieces"]:
            at = min(done for _, _, done in seen_by(state, (each["topic"], each["partition"]), newest).done_through)
            assert "(" in each["place"] or each["next"] == at + 1


def test_they_are_on_the_slider_and_in_the_list() -> None:
    history = told("rollback")
    group = history.groups["g"]
    shown = moments.timeline(group, 2_000)
    assert [each[2] for each in shown["checkpoints"]] == [2, 6, 8, 12, 8]
    found = moments.checkpoints(group, Moment(10_000), 2)
    first, second = found["checkpoints"]
    assert (first["went_back"], first["at"], first["checkpoint"]) == (True, "0:15", 8)
    assert "admin put the group back: 2 pieces at checkpoint 8" in first["text"]
    assert (second["went_back"], second["checkpoint"]) == (False, 12)
    events = moments.events(history, "g", Moment(10_000), "all", None, 50)
    assert any("2 of 2 members" in each["why"] for each in events)
    assert sum(shown["done"]) == (110 - 99) + (111 - 99) + (120 - 110) + (120 - 111) + 10 + 10


def test_a_group_without_any() -> None:
    history = History(1)
    history.take(0, entries("hand_over")[:2])
    group = history._group("g")
    assert moments.checkpoints(group, Moment(10_000), 5) == {"checkpoints": [], "pieces": []}
    assert moments.timeline(group, 2_000)["checkpoints"] == []
