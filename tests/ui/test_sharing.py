"""Sharers and open messages on the page: a log in memory, taken as the live page takes it; and in Chromium."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kafka_marshal.observe.log import Source
from kafka_marshal.observe.view import LiveView
from kafka_marshal.ports import Cluster
from kafka_marshal.ui import moments
from kafka_marshal.ui.archive import Histories
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.kept import pack, unpack
from kafka_marshal.ui.live import Live
from kafka_marshal.ui.moments import Moment
from kafka_marshal.ui.steering import ACTIONS, Steering, words_of
from rationalizer import ClaimingShare, ReleasingPartition, SettlingMessages
from tests.observe.test_open_problems import DATA, GROUP, HI, LOG, W1, W2, Scene
from tests.ui.conftest import get, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser

HALF = 2**62
PLACE = (DATA, 0)


class _Memory(Source):
    """The log of a scene."""

    scene: Scene

    def connect(self) -> Cluster:
        return self.scene.cluster.connect("page")


def taken(scene: Scene) -> Live:
    """A live page that has taken one picture of this scene, and its history."""
    source = _Memory(LOG, 5, lambda: ("", {}))
    object.__setattr__(source, "scene", scene)
    archive = Histories(LOG, is_live=True)
    live = Live(source, archive)
    view = LiveView(source.connect(), LOG, 5, now=lambda: scene.now)
    archive.whole = History(len(view.worlds), view.worlds)
    view.observers.append(archive.whole.see)
    try:
        view.catch_up(lambda done, of_all: None)
        view.look_at_data()
        live._take(view)
    finally:
        view.replica.close()
    archive.finished()
    return live


def share_by_batches(scene: Scene) -> None:
    """w1 has 2 to 4, w2 5 to 9; 0 and 1 are set aside, 10 waits for its third delivery."""
    first = scene.append(ClaimingShare(*W1, DATA, 0, HI))
    second = scene.append(ClaimingShare(*W2, DATA, 0, HI))
    scene.append(SettlingMessages(*W1, DATA, 0, first, 99, take=(5, 29, False)))
    scene.append(SettlingMessages(*W2, DATA, 0, second, 99, take=(6, 29, False)))
    parked = ((0, 7, 5, "ValueError"), (1, 8, 5, "KeyError"))
    scene.now += 1_000
    scene.append(SettlingMessages(*W1, DATA, 0, first, 99, parked=parked))
    scene.append(SettlingMessages(*W2, DATA, 0, second, 99, open=((10, 10, 9, 2),)))


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_members_that_share_by_batches_and_what_is_open(scene: Scene) -> None:
    share_by_batches(scene)
    live = taken(scene)
    found = live.sharing(GROUP, PLACE)
    assert (found["mode"], found["text"]) == ("batches", "Shared by batches: w1, w2.")
    assert [(each["client"], each["state"], each["batches"]) for each in found["sharers"]] == [
        ("w1", "seen", [{"first": 2, "last": 4, "deliveries": 1}]),
        ("w2", "seen", [{"first": 5, "last": 9, "deliveries": 1}]),
    ]
    assert found["open"] == (
        "2 set aside (1 ValueError, 1 KeyError), 1 waiting for the next try, 8 in workers' batches"
    )
    assert [(each["first"], each["state"], each["deliveries"], each["reason"]) for each in found["messages"]] == [
        (0, "parked", 5, "ValueError"),
        (1, "parked", 5, "KeyError"),
        (10, "waiting", 2, None),
    ]
    text = live.state_text(GROUP)
    assert text is not None
    state = json.loads(text)
    assert state["headline"].endswith(", 2 set aside")
    (topic,) = state["topics"]
    assert (topic["parked"], topic["sharers"]) == ({"0": 2}, {"0": [[0, 1], [1, 1]]})
    assert [(each["client"], each["held"]) for each in state["members"]] == [("w1", 1), ("w2", 1)]


def test_a_sharer_that_is_silent_is_gone_and_keeps_its_batch_until_another_takes(scene: Scene) -> None:
    share_by_batches(scene)
    for _ in range(3):
        scene.now += HI
        scene.append(SettlingMessages(*W2, DATA, 0, scene_epoch(scene, "w2"), 99))
    found = taken(scene).sharing(GROUP, PLACE)
    assert [(each["client"], each["state"]) for each in found["sharers"]] == [("w1", "gone"), ("w2", "seen")]
    assert found["sharers"][0]["batches"] == [{"first": 2, "last": 4, "deliveries": 1}]


def scene_epoch(scene: Scene, client: str) -> int:
    sharers = scene.group(lambda view, row: row.leases[0].sharers)
    return int(next(each.epoch for each in sharers if each.client_id == client))


def test_parts_of_the_keys_and_those_that_nobody_names(scene: Scene) -> None:
    scene.append(ClaimingShare(*W1, DATA, 0, HI, 0, HALF - 1, 0))
    found = taken(scene).sharing(GROUP, PLACE)
    assert (found["mode"], found["text"], found["open"]) == ("keys", "Shared by keys: w1.", "")
    assert [(each["client"], each["keys"], each["state"]) for each in found["sharers"]] == [
        ("w1", "0-50%", "seen"),
        (None, "50-100%", "free"),
    ]


def test_one_open_message_and_its_key_only_where_messages_are_shown(scene: Scene) -> None:
    share_by_batches(scene)
    live = taken(scene)
    with served(live._archive, live) as url:
        place = f"group={GROUP}&topic={DATA}&partition=0"
        found = get(f"{url}api/open-message?{place}&offset=1").json
        assert (found["state"], found["deliveries"], found["reason"], found["client"]) == (
            "parked",
            5,
            "KeyError",
            "w1",
        )
        assert (found["time"], found["at"], found["key"]) == (int(scene.now), "0:6", None), "started without messages"
        assert get(f"{url}api/open-message?{place}&offset=7").json["state"] == "acquired"
        done = get(f"{url}api/open-message?{place}&offset=20")
        assert (done.status, done.json["error"].startswith("It is not open")) == (404, True)
        assert get(f"{url}api/open-message?{place}&offset=x").status == 400
        assert get(f"{url}api/sharing?group={GROUP}").status == 400
        assert get(f"{url}api/sharing?group=other&topic={DATA}&partition=0").status == 404
        assert get(f"{url}api/partition?{place}").json["text"] == "Shared by batches: w1, w2."
    assert live.open_message(GROUP, PLACE, 1, with_key=True)["key"] == "null", "it has none"


def test_a_dump_has_no_present(page_url: str) -> None:
    found = get(f"{page_url}api/sharing?group={GROUP}&topic={DATA}&partition=0")
    assert (found.status, "running Kafka only" in found.json["error"]) == (404, True)


def test_a_redrive_and_a_discard_are_the_commands_of_one_message() -> None:
    body: dict[str, Any] = {"group": GROUP, "topic": DATA, "partition": 0, "offset": 148}
    assert words_of("redrive", body, dry_run=True) == ["redrive", "--dry-run", "--", GROUP, "orders:0:148"]
    assert words_of("redrive", body, dry_run=False) == ["redrive", "--", GROUP, "orders:0:148"]
    assert words_of("discard", body, dry_run=True) == ["discard", "--dry-run", "--", GROUP, "orders:0:148"]
    assert words_of("discard", body, dry_run=False) == ["discard", "--yes", "--", GROUP, "orders:0:148"]
    with pytest.raises(ValueError, match="Nothing was changed"):
        words_of("discard", {**body, "offset": "148"}, dry_run=True)
    assert {"redrive", "discard", "redo"} <= set(ACTIONS)


def test_a_redo_is_the_command_of_one_partition_or_of_topics() -> None:
    body: dict[str, Any] = {"group": GROUP, "topic": DATA, "partition": 0, "time": "03:10..03:20"}
    assert words_of("redo", body, dry_run=True) == ["redo", "--dry-run", "--time=03:10..03:20", "--", GROUP, "orders:0"]
    body = {"group": GROUP, "topics": [DATA, "-x"], "time": "30m..10m", "key": "customer-7"}
    words = ["redo", "--yes", "--time=30m..10m", "--key=customer-7", "--", GROUP, DATA, "-x"]
    assert words_of("redo", body, dry_run=False) == words
    changes: list[dict[str, Any]] = [{"topics": []}, {"topics": [7]}, {"topics": DATA}, {"time": ""}, {"key": 7}]
    for wrong in changes:
        with pytest.raises(ValueError, match="Nothing was changed"):
            words_of("redo", {**body, **wrong}, dry_run=True)


def test_the_page_at_390_pixels_shows_who_has_what_and_one_message_on_a_click(scene: Scene, browser: Browser) -> None:
    share_by_batches(scene)
    live = taken(scene)
    steering = Steering(["--bootstrap=127.0.0.1:1", "--timeout=1"])
    page = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark", timezone_id="UTC")
    page.set_default_timeout(20_000)
    with served(live._archive, live, steering) as url:
        page.goto(f"{url}#group={GROUP}&p={DATA}:0")
        page.get_by_text("orders/0: shared by batches by w1 (seen), w2 (seen), lag 28, 2 set aside").wait_for()
        page.get_by_role("table", name="Sharers").wait_for()
        rows = page.get_by_role("table", name="Sharers").locator("tbody tr").all_inner_texts()
        assert [each.split("\t")[:2] for each in rows] == [["w1", "2-4"], ["w2", "5-9"]]
        page.get_by_role("table", name="Open messages").get_by_role("button", name="1", exact=True).click()
        shown = page.locator("[data-open-message]")
        shown.get_by_text("parked, 5 deliveries").wait_for()
        assert "KeyError" in shown.inner_text()
        assert shown.get_by_role("button", name="Redrive").count() == 0, "no token"
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.goto("about:blank")
        page.goto(f"{url}#group={GROUP}&p={DATA}:0&at=0:4&token={steering.token}")
        page.get_by_text("of now, not of the moment shown").wait_for()
        page.get_by_role("table", name="Open messages").get_by_role("button", name="10", exact=True).click()
        shown.get_by_role("button", name="Discard").wait_for()
        assert shown.get_by_role("button", name="Redrive").count() == 0, "it waits for its next try already"
        page.close()
        live.end()


def test_the_past_names_who_shared_and_not_what_they_had(scene: Scene) -> None:
    share_by_batches(scene)  # w1 claims at offset 2, w2 at 3
    scene.append(ReleasingPartition(*W1, DATA, 0, 2, None), ReleasingPartition(*W2, DATA, 0, 3, None))  # 8, 9
    scene.append(ClaimingShare(*W1, DATA, 0, HI, 0, HALF - 1))  # 10: refused, holes have no key hash
    history = taken(scene)._archive.whole
    assert history is not None
    group = history.groups[GROUP]

    def at(offset: int) -> tuple[str, Any]:
        moment = Moment(moments.time_of(history, 0, offset), 0, offset)
        state = moments.state(history, group, moment)
        clients = [each["client"] for each in state["members"]]
        (topic,) = state["topics"]
        sharers = topic["sharers"].get(0, [(topic["owners"][0], topic["states"][0])])
        named = [(clients[owner] if owner >= 0 else None, state["states"][code]) for owner, code in sharers]
        return moments.detail(history, group, PLACE, moment)["text"], named

    assert at(2) == ("After offset 2: shared by batches: w1.", [("w1", "unknown")])
    assert at(7) == ("After offset 7: shared by batches: w1, w2.", [("w1", "unknown"), ("w2", "unknown")])
    assert at(8) == ("After offset 8: shared by batches: w2.", [("w2", "unknown")])
    text, named = at(10)
    assert (text.startswith("After offset 10: nobody"), named) == (True, [(None, "free")])
    changes = [history.events.columns["offset"][number] for number in history.events.down_from("changed", GROUP, 2**60)]
    assert changes == [9, 8, 3, 2]
    assert [each["shared"] for each in moments.detail(history, group, PLACE, Moment(2**60))["spans"]] == [True]
    before, after = (Moment(moments.time_of(history, 0, offset), 0, offset) for offset in (2, 7))
    assert moments.diff(history, group, before, after)["partitions"][0]["after"] == "w1, w2"
    kept = unpack(pack(history))
    assert moments.state(kept, kept.groups[GROUP], after) == moments.state(history, group, after)


def test_the_past_of_parts_of_the_keys(scene: Scene) -> None:
    scene.append(ClaimingShare(*W1, DATA, 0, HI, 0, HALF - 1, 0))
    history = taken(scene)._archive.whole
    assert history is not None
    state = moments.state(history, history.groups[GROUP], Moment(int(scene.now)))
    (topic,) = state["topics"]
    assert (topic["places"], topic["owners"]) == ({0: "0 (0-50%)", 1: "0 (50-100%)"}, [0, -1])
    text = moments.detail(history, history.groups[GROUP], PLACE, Moment(int(scene.now)))["text"]
    assert text.endswith("shared by keys: w1 (0-50%).")
