"""The server's answers and access checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from kafka_marshal.admin import StoredMessage
from kafka_marshal.errors import AdminError
from kafka_marshal.observe.checkpoints import seen_by
from kafka_marshal.ui import moments
from kafka_marshal.ui.archive import Histories
from kafka_marshal.ui.fold import History
from kafka_marshal.ui.moments import Moment
from kafka_marshal.ui.server import TOKEN_HEADER
from kafka_marshal.ui.steering import ACTIONS, Steering, words_of
from rationalizer import World
from rationalizer.dump import DumpReader
from tests.cli.conftest import command, environment
from tests.cli.harness import Command
from tests.ui.conftest import get, served
from tests.ui.story import BEGIN, FENCED_AT, GROUP, KILLED_AT, PAUSED_AT, TAKEN_AT, TOPIC

if TYPE_CHECKING:
    from playwright.sync_api import Browser


__all__ = ["command", "environment"]

GROUP_NAME = f"group={GROUP}"


def at(seconds: float) -> str:
    return f"at={BEGIN + int(seconds * 1000)}"


def owners(url: str, seconds: float, group: str = GROUP) -> dict[str, tuple[str | None, str]]:
    state = get(f"{url}api/state?group={group}&{at(seconds)}").json
    return {
        f"{topic['topic']}/{topic['places'].get(str(index), partition)}": (
            None if owner < 0 else state["members"][owner]["client"],
            state["states"][code],
        )
        for topic in state["topics"]
        for index, (partition, owner, code) in enumerate(
            zip(topic["partitions"], topic["owners"], topic["states"], strict=True)
        )
    }


def test_what_there_is(page_url: str) -> None:
    found = get(f"{page_url}api/log").json
    assert (found["topic"], found["groups"], found["live"]) == ("__marshal", ["billing", GROUP], False)
    assert (found["begin"], found["complete"], found["problem"], found["steering"]) == (BEGIN, True, "", None)


def test_the_map_before_and_after_a_worker_is_killed(page_url: str) -> None:
    assert owners(page_url, KILLED_AT)["flights/1"] == ("worker-2", "seen")
    assert owners(page_url, KILLED_AT + 5)["flights/1"] == ("worker-2", "silent")
    assert owners(page_url, KILLED_AT + 7)["flights/1"] == ("worker-2", "gone")
    assert owners(page_url, TAKEN_AT + 1)["flights/1"] == ("worker-3", "seen")
    assert owners(page_url, 0) == {}, "nobody had claimed anything"


def test_a_coordinated_group(page_url: str) -> None:
    state = get(f"{page_url}api/state?group=billing").json
    assert state["kind"] == "coordinated"
    assert [member["client"] for member in state["members"]] == ["a", "b"]
    assert [each["text"] for each in state["waiting"]] == [
        f"a is to release invoices/{number}, then b gets it" for number in (4, 5)
    ]
    (last, first) = get(f"{page_url}api/rebalances?group=billing").json["rebalances"]
    assert (last["why"], last["moved"], first["why"]) == ("b joined", 1, "a joined")


def test_one_partition_in_the_words_of_who(page_url: str, dump: bytes, command: Command) -> None:
    moment = KILLED_AT + 7
    found = get(f"{page_url}api/partition?{GROUP_NAME}&topic={TOPIC}&partition=1&{at(moment)}").json
    said = command("who", GROUP, TOPIC, "1", "--at", "2025-11-25T19:49:17Z", "--from-dump", "-", stdin=dump)
    assert BEGIN + moment * 1000 == 1764100157000
    assert said.out.splitlines()[1:3] == found["text"].splitlines()
    whole = command("who", GROUP, TOPIC, "1", "--from-dump", "-", "--json", stdin=dump).json["history"]
    shown = [{key: each[key] for key in whole[0]} for each in found["spans"]]
    assert shown == whole
    assert [each["what"] for each in found["events"]][:1] == ["claims flights/1 (beats every 3.0 s or sooner)"]


def test_what_was_rejected_and_why(page_url: str) -> None:
    found = get(f"{page_url}api/events?{GROUP_NAME}&only=rejected&limit=1&{at(FENCED_AT + 1)}").json["events"]
    assert [(each["client"], each["code"]) for each in found] == [("worker-2", "FENCED")]
    assert found[0]["why"].startswith("worker-3 holds it, epoch ")
    paused = get(f"{page_url}api/events?{GROUP_NAME}&only=rejected&limit=1&{at(PAUSED_AT + 5)}").json["events"]
    assert paused[0]["code"] == "PAUSED"


def test_a_pause_is_reported(page_url: str) -> None:
    state = get(f"{page_url}api/state?{GROUP_NAME}&{at(PAUSED_AT + 5)}").json
    assert [each["client"] for each in state["pauses"]] == ["admin-7"]
    assert get(f"{page_url}api/state?{GROUP_NAME}&{at(PAUSED_AT + 25)}").json["pauses"] == []


def test_who_waited_for_whom(page_url: str) -> None:
    state = get(f"{page_url}api/state?{GROUP_NAME}&{at(61)}").json
    assert [each["client"] for each in state["waiting"]] == ["worker-4"]
    assert "worker-1 holds it" in state["waiting"][0]["text"]


def test_two_moments_compared(page_url: str) -> None:
    found = get(f"{page_url}api/diff?{GROUP_NAME}&from={BEGIN + KILLED_AT * 1000}&to={BEGIN + TAKEN_AT * 1000}").json
    assert found["changed"] == len(found["partitions"]) > 0
    assert {each["before"] for each in found["partitions"]} == {"worker-2"}
    first = found["partitions"][0]
    assert (first["partition"], first["after"]) == (1, "worker-3")
    assert first["why"] == "silent for 8.0 s, then claimed by worker-3"
    turned = get(f"{page_url}api/diff?{GROUP_NAME}&from={BEGIN + TAKEN_AT * 1000}&to={BEGIN + KILLED_AT * 1000}").json
    assert turned == found


def test_from_change_to_change(page_url: str) -> None:
    found = get(f"{page_url}api/near?{GROUP_NAME}&{at(KILLED_AT)}&direction=on").json["event"]
    assert found["time"] == BEGIN + TAKEN_AT * 1000
    assert found["topic"] == TOPIC
    there: list[dict[str, object]] = []
    back: list[dict[str, object]] = []
    moment = at(0)
    while (event := get(f"{page_url}api/near?{GROUP_NAME}&{moment}&direction=on").json["event"]) is not None:
        there.append(event)
        moment = f"at={event['at']}"
    assert [each["changed"] for each in there] == [1] * len(there)
    moment = at(1000)
    while (event := get(f"{page_url}api/near?{GROUP_NAME}&{moment}&direction=back").json["event"]) is not None:
        back.append(event)
        moment = f"at={event['at']}"
    assert back == there[::-1], "each change once, in either direction"


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("api/state", 400, "which group"),
        ("api/state?group=delay", 404, "did you mean 'delays'"),
        (f"api/state?{GROUP_NAME}&at=yesterday", 400, "is no moment"),
        (f"api/state?{GROUP_NAME}&at=99:1", 400, "no partition 99"),
        (f"api/events?{GROUP_NAME}&only=nice", 400, "all, changed or rejected"),
        (f"api/events?{GROUP_NAME}&limit=-1", 400, "a number is wanted"),
        (f"api/partition?{GROUP_NAME}", 400, "which partition"),
        (f"api/partition?{GROUP_NAME}&topic=x&partition=" + quote("²"), 400, "a number is wanted"),
        ("api/live?group=delays", 404, "does not grow"),
    ],
)
def test_wrong_questions_are_answered(page_url: str, path: str, status: int, words: str) -> None:
    found = get(page_url + path)
    assert found.status == status
    assert words in found.json["error"]


# -- access ------------------------------------------------------------------------------------------------------


def test_the_page_may_load_nothing_from_elsewhere(page_url: str) -> None:
    for path in ("", "static/app.js", "api/log", "nowhere"):
        found = get(page_url + path)
        assert "default-src 'none'" in found.headers["content-security-policy"]
        assert found.headers["x-frame-options"] == "DENY"
    page = get(page_url).text
    assert "http" not in page.replace("http-equiv", "")
    assert "<script>" not in page


@pytest.mark.parametrize("path", ["static/../server.py", "static/%2e%2e/server.py", "static/vendor/../../server.py"])
def test_only_the_pages_own_files_are_served(page_url: str, path: str) -> None:
    assert get(page_url + path).status == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:9450"}, 403),
        ({"Host": "["}, 403),
        ({"Host": "localhost:1"}, 200),
        ({"Host": "[::1]:9450"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-origin"}, 200),
    ],
)
def test_hosts_and_origins_of_others_are_refused(page_url: str, headers: dict[str, str], status: int) -> None:
    assert get(f"{page_url}api/log", **headers).status == status


def test_a_link_to_the_page_may_stand_on_another_site(page_url: str) -> None:
    assert get(page_url, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200


def test_a_name_that_was_allowed(archive: Histories) -> None:
    with served(archive, names=["Marshal.example"]) as url:
        assert get(f"{url}api/log", Host="marshal.example:80").status == 200
        assert "--allow-host other.example" in get(f"{url}api/log", Host="other.example").json["error"]


# -- steering ----------------------------------------------------------------------------------------------------


def test_who_only_shows_can_not_be_steered(page_url: str) -> None:
    found = get(
        f"{page_url}api/plan", "POST", {"action": "pause"}, Origin=page_url[:-1], Content_Type="application/json"
    )
    assert found.status == 403
    assert "--allow-steering" in found.json["error"]


def test_steering_needs_the_token_the_origin_and_json(archive: Histories) -> None:
    steering = Steering(["--bootstrap=127.0.0.1:1", "--timeout=1"])
    token = TOKEN_HEADER.replace("-", "_")
    body = {"action": "pause", "group": "g"}
    with served(archive, None, steering) as url:
        good = {"Origin": url[:-1], "Content_Type": "application/json", token: steering.token}
        assert get(f"{url}api/plan", "POST", body, **good).json["error"].startswith("expires: a text")
        for name, value in (("Origin", "http://evil.example"), ("Content_Type", "text/plain"), (token, "x")):
            assert get(f"{url}api/plan", "POST", body, **{**good, name: value}).status == 403
        anonymous = {name: value for name, value in good.items() if name != "Origin"}
        assert get(f"{url}api/plan", "POST", body, **anonymous).status == 403
        assert get(f"{url}api/plan", **good).status == 405
        assert get(f"{url}api/jobs").status == 403
        assert "not planned" in get(f"{url}api/carry-out", "POST", {"plan": "x"}, **good).json["error"]
        found = get(f"{url}api/plan", "POST", {**body, "expires": "1m"}, **good).json
        assert (found["plan"], found["status"]) == (None, 3), "no Kafka: there is nothing to confirm"
        assert "127.0.0.1:1" in found["err"]


def test_names_can_not_pass_for_options() -> None:
    body = {"group": "--force", "topic": "--yes", "partition": 3, "member": "--wait=1h", "expires": "5m", "to": "--yes"}
    body |= {"offset": 9, "time": "--yes", "key": "--yes"}
    for action in ACTIONS:
        words = words_of(action, body, dry_run=True)
        separator = words.index("--")
        assert words[separator + 1] == "--force"
        assert all(word.startswith("--") and word not in ("--force", "--yes") for word in words[1:separator])
    assert words_of("evict", {**body, "member": None}, dry_run=False)[-3:] == ["--force", "--yes", "3"]


@pytest.mark.parametrize(
    "body", [{}, {"group": 3}, {"group": ""}, {"group": "g", "topic": "t", "partition": "3"}, {"group": "g" * 256}]
)
def test_invalid_requests_are_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Nothing was changed"):
        words_of("evict", body, dry_run=True)


# -- Messages of topics on the page: text, never markup; sent only on request; nothing with --no-payloads ---------


EVIL = "<img src=x onerror=\"document.title='owned'\">\u202e\x1b[31m"

#: (topic, partition, offset)
asked: list[tuple[str, int, int]] = []


def read(key: tuple[str, int], offset: int) -> StoredMessage:
    asked.append((*key, offset))
    if offset == 404:
        raise AdminError("there is no message at offset 404. The next message is at 405.")
    headers = ((EVIL, EVIL.encode()), ("none", None))
    return StoredMessage(*key, offset, 1_700_000_000_000, "create", b"\xff", EVIL.encode(), headers, False)


@pytest.fixture(scope="module")
def url(archive: Histories) -> Iterator[str]:
    with served(archive, payloads=read) as found:
        yield found


def test_a_message_is_a_separate_answer(url: str, page_url: str) -> None:
    place = f"api/message?topic={TOPIC}&partition=1&offset="
    found = get(f"{url}{place}7").json
    assert (found["offset"], found["key"], found["form"], found["committed"]) == (7, "0xff", "hex", False)
    assert found["headers"][1] == ["none", "null"]
    assert found["headers"][0][0].isprintable()
    missing = get(f"{url}{place}404")
    assert (missing.status, missing.json["error"]) == (
        404,
        "there is no message at offset 404. The next message is at 405.",
    )
    assert get(f"{url}{place}x").status == 400
    assert get(f"{url}api/message?offset=1").status == 400
    refused = get(f"{page_url}{place}7")
    assert (refused.status, "--no-payloads" in refused.json["error"]) == (403, True)
    assert (get(f"{url}api/log").json["payloads"], get(f"{page_url}api/log").json["payloads"]) == (True, False)
    assert get(f"{url}{place}7", Origin="http://evil.example").status == 403


def test_the_page_shows_it_on_demand_as_text(browser: Browser, url: str, page_url: str) -> None:
    page = browser.new_page(timezone_id="UTC")
    page.set_default_timeout(20_000)
    try:
        asked.clear()
        page.goto(f"{url}#group={GROUP}&p={TOPIC}:1")
        panel = page.locator("[data-message]")
        panel.wait_for()
        assert asked == []
        panel.get_by_role("button", name="Show the one at").click()
        panel.get_by_text("aborted or is not finished").wait_for()
        assert [each[:2] for each in asked] == [(TOPIC, 1)]
        assert "\\x1b[31m" in panel.inner_text()
        assert "<img src=x" in panel.inner_text()
        assert page.locator("[data-message] img").count() == 0
        assert "owned" not in page.title()
        panel.get_by_label("or at offset").fill("404")
        panel.get_by_role("button", name="Show", exact=True).click()
        panel.get_by_text("The next message is at 405.").wait_for()
        page.goto("about:blank")
        page.goto(f"{page_url}#group={GROUP}&p={TOPIC}:1")
        page.locator(".answer").wait_for()
        assert page.locator("[data-message]").count() == 0
    finally:
        page.close()


# -- Checkpoints on the page: on the slider, in the list, and each piece's cut at any moment ----------------------


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
